"""One worker of a pool, as the pool sees it: a process of this host, or
(elastic.cluster.workers.remote_processes) an actor on some node.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from elastic.certify.harness.worker_process import Word, serve


class Member(Protocol):
    """`pipe`: its messages, closed at its end."""

    pipe: Connection

    @property
    def ended(self) -> bool: ...
    def ready(self, timeout_s: float) -> str:
        """Waits until it has its place; why it has none, '' = it has."""

    def send(self, word: Word) -> None: ...
    def signal(self, number: int) -> None: ...
    def end(self) -> None:
        """SIGKILL, also where it is stopped."""

    def join(self) -> None:
        """Waits until it is gone, and lets go of it."""


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started here never sees Ctrl-C: this process ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalMember:
    """A process of this host."""

    def __init__(self, environment: Mapping[str, str], session: str) -> None:
        spawn = get_context("spawn")
        mine, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(theirs, dict(environment), session), daemon=True
        )
        with _without_interrupts():
            self.process.start()
        theirs.close()
        self.pipe: Any = mine

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def ready(self, timeout_s: float) -> str:
        return ""

    def send(self, word: Word) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.join()
