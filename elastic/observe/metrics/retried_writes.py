"""Writes of one kind, in their order: what a full disk refuses waits here, and is tried again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

AGAIN_S = 60.0  # between two attempts of what has failed
WAITING_MOST = 20_000  # rows


class RetriedWrites(Generic[T]):
    """`opened`: makes what is written to; `failed`: called with why a write has failed, once until
    one succeeds. A write that is tried again may have been done in part. Of more rows than may wait
    the oldest are left out."""

    def __init__(self, opened: Callable[[], T], failed: Callable[[Exception], object]) -> None:
        self.made: T | None = None
        self._opened, self._failed = opened, failed
        self._waiting: deque[tuple[Callable[[T], object], int]] = deque()
        self._n_rows = 0
        self._again_s, self._said = 0.0, False

    def put(self, write: Callable[[T], object], n_rows: int = 1) -> None:
        self._waiting.append((write, n_rows))
        self._n_rows += n_rows
        while self._n_rows > WAITING_MOST and len(self._waiting) > 1:
            self._n_rows -= self._waiting.popleft()[1]
        self.attempt()

    def attempt(self, now: bool = False) -> None:
        """What waits, where it is due; `now`: in any case."""
        if not now and time.monotonic() < self._again_s:
            return
        try:
            if self.made is None:
                self.made = self._opened()
            while self._waiting:
                write, n_rows = self._waiting[0]
                write(self.made)
                self._waiting.popleft()
                self._n_rows -= n_rows
        except (OSError, ValueError) as error:
            self._again_s = time.monotonic() + AGAIN_S
            if not self._said:
                self._said = True
                self._failed(error)
        else:
            self._again_s, self._said = 0.0, False
