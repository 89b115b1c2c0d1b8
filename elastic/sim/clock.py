"""Virtual time: a queue of what is going to happen, and the events that have."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from elastic.errors import InternalError
from elastic.types import Event


class Clock:
    """Nothing waits for real time: `poll` jumps to whatever comes next."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._out: list[Event] = []
        self._stopped_s: float | None = None

    def now_s(self) -> float:
        return self._now_s

    def poll(self, until_s: float | None) -> list[Event]:
        while not self._out and self._queue and self._stopped_s is None:
            if until_s is not None and self._queue[0][0] > until_s:
                break
            self._now_s = max(self._now_s, self._queue[0][0])
            while self._queue and self._queue[0][0] <= self._now_s:
                heapq.heappop(self._queue)[2]()
        if not self._out:
            if until_s is None:
                raise InternalError(
                    f"at {self._now_s:.1f} s nothing is under way and nobody wants to be woken: "
                    "the run hangs"
                )
            self._now_s = max(self._now_s, until_s)
        found, self._out = self._out, []
        return found

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (at_s, self._sequence, what))

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._at(self._now_s + delay_s, what)

    def _tell(self, event: Event, delay_s: float = 0.0) -> None:
        if delay_s:
            self._after(delay_s, lambda: self._say(event))
        else:
            self._say(event)

    def _say(self, event: Event) -> None:
        """From here on the driver may hear it."""
        self._out.append(event)
