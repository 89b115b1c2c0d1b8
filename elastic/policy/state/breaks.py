"""A generation that broke in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`redone`: steps before `step` were done in that generation; `nodes`: it had."""

    generation: int
    step: int
    redone: bool
    nodes: frozenset[str]
