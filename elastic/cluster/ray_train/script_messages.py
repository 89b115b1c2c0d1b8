"""What the driver and the supervisors of a script's ranks say to each other, and the board where
they leave it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

OrderKind = Literal["end", "go", "leave"]


@dataclass(frozen=True)
class ScriptMessage:
    """Said by the supervisor of `rank` of `group`; a group is one start of the script, named by
    when its rank 0 began (ns)."""

    group: int
    rank: int
    at_s: float


@dataclass(frozen=True)
class Hello(ScriptMessage):
    """The rank's process is started."""

    world: int
    local_rank: int
    ray_id: str
    pid: int  # of the Ray worker, the script's parent


@dataclass(frozen=True)
class Formed(ScriptMessage):
    """All ranks have met at MASTER_PORT."""


@dataclass(frozen=True)
class ScriptOutput(ScriptMessage):
    """What the rank has printed, in whole lines."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Ended(ScriptMessage):
    """`code`: exit code, negative = signal. `asked`: it had been told to end. `tail`: the last
    lines of its output."""

    code: int
    asked: bool
    tail: str


@dataclass(frozen=True)
class ScriptOrder:
    """end: SIGTERM, after `grace_s` SIGKILL; `listeners`: only processes that have a handler for
    SIGTERM. go: leave with an error, so that Ray Train starts the next group. leave: go without
    one, the run is over."""

    group: int
    kind: OrderKind
    grace_s: float = 0.0
    listeners: bool = False


@dataclass
class Board:
    """A Ray actor beside the driver. Supervisors exchange words for orders, the driver the other
    way round."""

    words: list[ScriptMessage] = field(default_factory=list)
    orders: dict[int, list[ScriptOrder]] = field(default_factory=dict)
    heard_s: dict[tuple[int, int], float] = field(default_factory=dict)

    def exchange(
        self, group: int, rank: int, words: Sequence[ScriptMessage], *, n_seen: int
    ) -> list[ScriptOrder]:
        """From a supervisor that has obeyed `n_seen` orders; returns the later ones."""
        self.heard_s[group, rank] = time.monotonic()
        self.words += words
        return self.orders.get(group, [])[n_seen:]

    def take(
        self, orders: Sequence[ScriptOrder]
    ) -> tuple[list[ScriptMessage], dict[tuple[int, int], float]]:
        """From the driver; returns the words since the last call, and how long (s) each supervisor
        has been silent."""
        for order in orders:
            self.orders.setdefault(order.group, []).append(order)
        words, self.words = self.words, []
        now_s = time.monotonic()
        return words, {seat: now_s - at_s for seat, at_s in self.heard_s.items()}
