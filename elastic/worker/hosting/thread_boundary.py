"""What a lasting background thread raises is logged, and the thread continues; what it has found is
taken from a queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ThreadBoundary:
    """Whatever one look raises is logged, once as long as it stays the same, and the thread
    continues with the next look."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what, self._said = log, what, ""

    def holds(self, look: Callable[[], object]) -> bool:
        """Looks once; False = it raised."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: ended, nobody would miss it until it is needed
            self.say(f"{type(error).__name__}: {error}")
            return False
        return True

    def say(self, text: str) -> None:
        """What went wrong, unless that was said just before."""
        if text != self._said:
            self._said = text
            self._log.warning("%s: %s; retried", self._what, text)


def waiting(news: SimpleQueue[T]) -> list[T]:
    """What a thread has put there and nobody has taken yet."""
    found = []
    while not news.empty():
        found.append(news.get())
    return found
