"""Generations that broke in a step, and those that could not read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`redone`: steps before `step` were done in that generation; `nodes`: it had."""

    generation: int
    step: int
    redone: bool
    nodes: frozenset[str]


@dataclass(frozen=True)
class ReadFailures:
    """Of what could not be read for no fault of the program, without progress since. `since_s`,
    `at_s`: when that was told first and last; `places`: the newest generations and nodes."""

    since_s: float
    at_s: float = 0.0
    places: tuple[tuple[int, str], ...] = ()
