"""A journal's lines on their way from the driver to a thread that may be slow: what waits for a
disk or a library never holds the driver up. They are taken in batches: the driver wakes nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from elastic.errors import ElasticError
from elastic.ledger.journal import MERGE_S, Line

log = logging.getLogger(__name__)

CLOSE_MOST_S = 10.0
WAITING_MOST = 20_000  # lines, hours of a run
WRITTEN_S = 2 * MERGE_S  # after which what was heard is in the journal


class HeardLines:
    """`follow` runs in the thread, calls `take` until that is False, and then ends: `close` waits
    `close_most_s` for that. `read`: the journal that the lines are of: where more come than may
    wait, they are taken from there."""

    def __init__(
        self,
        follow: Callable[[], None],
        name: str,
        close_most_s: float = CLOSE_MOST_S,
        *,
        read: Callable[[], Iterable[Line]] = tuple,
    ) -> None:
        self._close_most_s, self._read = close_most_s, read
        # with the number of entries of the journal before each
        self._lines: deque[tuple[int, Line]] = deque()
        self._n_heard = self._n_taken = 0  # entries
        self._closed = threading.Event()
        self._next_s = 0.0
        self._before: Sequence[Line] = ()
        self._epoch = self._epoch_heard = 0
        self._thread = threading.Thread(target=follow, name=name, daemon=True)

    def start(self, before: Sequence[Line] = (), epoch: int = 0) -> None:
        """`before`: the newest lines of earlier drivers; `epoch`: this driver's."""
        self._before, self._epoch = before, epoch
        self._thread.start()

    def hear(self, line: Line) -> None:
        begin, self._epoch_heard = self._n_heard, line.epoch
        if len(self._lines) < WAITING_MOST:
            self._lines.append((begin, line))
        self._n_heard = begin + n_entries(line)

    def close(self) -> None:
        """No more lines will come."""
        self._closed.set()
        self._thread.join(self._close_most_s)

    def take(self, every_s: float, take: Callable[[Line], object]) -> bool:
        """Gives `take` what has come since the last call, which is so long ago where more may come.
        False: no more will."""
        self._closed.wait(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + every_s
        more, n_heard = not self._closed.is_set(), self._n_heard
        while self._lines:
            begin, line = self._lines.popleft()
            if begin > self._n_taken:
                self._take_missing(take)
            self._give(begin, line, take)
        if n_heard > self._n_taken and not self._take_missing(take):
            self._n_taken = n_heard
        return more

    def _take_missing(self, take: Callable[[Line], object]) -> bool:
        """From the journal, up to its end. It merges lines, and has each event. False: it had
        none."""
        n_before = self._n_taken
        self._lines.clear()  # when that has been waited for, they are all there
        self._closed.wait(WRITTEN_S)
        n = 0
        for line in self._journal():
            if line.epoch == self._epoch_heard:
                self._give(n, line, take)
                n += n_entries(line)
        return self._n_taken > n_before

    def _journal(self) -> Iterator[Line]:
        try:
            yield from self._read()
        except (ElasticError, OSError) as error:
            log.warning("%s: lines of the journal are missing (%s)", self._thread.name, error)

    def _give(self, begin: int, line: Line, take: Callable[[Line], object]) -> None:
        """What of the line was not taken yet. `begin`: entries of the journal before it."""
        n, n_known = n_entries(line), self._n_taken - begin
        if 0 < n_known >= n:
            return
        take(line if n_known <= 0 else replace(line, events=line.events[n_known:]))
        self._n_taken = begin + n


def n_entries(line: Line) -> int:
    """Of a line as it is heard and as it is written the same: decisions to do nothing are merged
    away."""
    return len(line.events) + bool(line.decision is not None and line.decision.actions)
