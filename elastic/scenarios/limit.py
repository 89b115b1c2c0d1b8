"""Until when something may take, and how it ends otherwise."""

from __future__ import annotations

import time
from dataclasses import dataclass


class Failed(Exception):
    """What was tried could not be carried to its end: the message says what happened instead."""


class OutOfTime(Exception):
    """Its share of the minutes is spent. Neither pass nor fail."""


@dataclass(frozen=True)
class Limit:
    """On the monotonic clock."""

    end_s: float

    @classmethod
    def after(cls, seconds: float) -> Limit:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def look(self, what: str) -> None:
        """Raises OutOfTime."""
        if self.left_s <= 0:
            raise OutOfTime(f"aborted at '{what}': its share of the minutes was spent")
