"""A journal's lines on their way from the driver to a thread that may be slow: what waits for a
disk or a library never holds the driver up. They are taken in batches: the driver wakes nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from elastic.ledger.journal import Line


class HeardLines:
    """`follow` runs in the thread, reads `come` until that yields None, and then ends."""

    def __init__(self, follow: Callable[[], None], name: str) -> None:
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._closed = threading.Event()
        self._next_s = 0.0
        self._thread = threading.Thread(target=follow, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hear(self, line: Line) -> None:
        self._lines.put(line)

    def close(self, most_s: float) -> None:
        """No more lines will come; waits so long for the thread."""
        self._lines.put(None)
        self._closed.set()
        self._thread.join(most_s)

    def come(self, every_s: float) -> Iterator[Line | None]:
        """What has come since the last call, which is so long ago where more may come. None: no
        more will."""
        self._closed.wait(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + every_s
        try:
            while True:
                yield self._lines.get_nowait()
        except Empty:
            return
