"""A journal's lines on their way from the driver to a thread that may be slow: what waits for a
disk or a library never holds the driver up. They are taken in batches: the driver wakes nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from elastic.ledger.journal import Line

CLOSE_MOST_S = 10.0


class HeardLines:
    """`follow` runs in the thread, calls `take` until that is False, and then ends: `close` waits
    `close_most_s` for that."""

    def __init__(
        self, follow: Callable[[], None], name: str, close_most_s: float = CLOSE_MOST_S
    ) -> None:
        self._close_most_s = close_most_s
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._closed = threading.Event()
        self._next_s = 0.0
        self._before: Sequence[Line] = ()
        self._epoch = 0
        self._thread = threading.Thread(target=follow, name=name, daemon=True)

    def start(self, before: Sequence[Line] = (), epoch: int = 0) -> None:
        """`before`: the newest lines of earlier drivers; `epoch`: this driver's."""
        self._before, self._epoch = before, epoch
        self._thread.start()

    def hear(self, line: Line) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """No more lines will come."""
        self._lines.put(None)
        self._closed.set()
        self._thread.join(self._close_most_s)

    def take(self, every_s: float, take: Callable[[Line], object]) -> bool:
        """Gives `take` what has come since the last call, which is so long ago where more may come.
        False: no more will."""
        self._closed.wait(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + every_s
        while not self._lines.empty():
            line = self._lines.get()
            if line is None:
                return False
            take(line)
        return True
