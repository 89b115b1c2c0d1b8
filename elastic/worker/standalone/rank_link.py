"""What goes between rank 0 and another rank: JSON of known shapes. Nothing of it is ever unpickled,
so nobody who gets into such a connection can run code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.journal import built, plain
from elastic.types import Outcome, StopAsked, WorkerId
from elastic.types.orders import WorkerOrder, WriteShard
from elastic.worker.hosting.served_session import Said
from elastic.worker.process.beat import Beat

MOST_BYTES = 1 << 28  # of a word: a plan grows with its ranks
NO_WORD = (
    SpecError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
SHOWN_MOST = 200  # characters of what is wrong with one


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed copy, as rank 0 tells the others of it."""

    step: int
    uri: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class StandaloneResult:
    """How it ended."""

    run: str
    outcome: Outcome
    reason: str
    step: int = 0
    layout: str = ""
    world_size: int = 1
    resumed_at: int = 0
    final_loss: float | None = None
    tokens: int = 0
    wall_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""

    def summary(self) -> dict[str, Any]:
        rate = self.tokens / self.wall_s if self.wall_s else 0.0
        known = plain(self) | {"steps": self.step, "wall_s": round(self.wall_s, 3)}
        known["tokens_per_s"] = round(rate, 1)
        return {key: value for key, value in known.items() if key != "step"}


@dataclass(frozen=True)
class SignOfLife:
    """Rank 0 is there, whether it has orders or not."""


@dataclass(frozen=True)
class EndOfRun:
    """What rank 0 tells the others at the end: the result, or what it has raised."""

    result: StandaloneResult | None
    error: str = ""
    exit_code: int = 0


WORDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Beat,
        CommittedCheckpoint,
        EndOfRun,
        SignOfLife,
        StopAsked,
        WorkerId,
        WorkerOrder,
        WriteShard,
    )  # fmt: skip
}


class RankLink:
    """A connection that carries what is said, as a pipe to a child does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def fileno(self) -> int:
        return self._connection.fileno()

    def poll(self, wait_s: float = 0.0) -> bool:
        return self._connection.poll(wait_s)

    def send(self, message: Said) -> None:
        word = message.what
        if isinstance(word, WorkerOrder) and isinstance(word.action, WriteShard):
            word = word.action  # no noun of a journal, so it goes by itself
        text = json.dumps([message.serial, type(word).__name__, plain(word)])
        self._connection.send_bytes(text.encode())

    def recv(self) -> Said:
        """Raises EOFError, and OSError for what is no such word."""
        text = self._connection.recv_bytes(MOST_BYTES)
        try:
            serial, name, data = json.loads(text)
            word: Any = built(WORDS[name], data)
            number = int(serial)
        except NO_WORD as error:
            raise OSError(f"not a word between ranks: {str(error)[:SHOWN_MOST]}") from error
        return Said(number, WorkerOrder(word) if isinstance(word, WriteShard) else word)

    def close(self) -> None:
        self._connection.close()
