"""From the lines that Ray Train's workers write about their steps to figures. No clock, no process,
no Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

WORLDS = {"kill": (4, 3), "notice": (4, 3), "growth": (3, 4)}  # workers before and after
SAVE_EVERY = 10  # steps from one checkpoint to the next
STEPS, PIDS = "steps.jsonl", "workers.jsonl"  # what the workers write
ORDINARY_STEPS = 20  # of the old group, the last ones: what a step takes


@dataclass(frozen=True)
class Length:
    """`worlds`: workers before and after each cause; `settle_steps`: before it; `resize_s`: how
    often Ray Train looks whether there are more nodes, None = its default (60 s)."""

    worlds: Mapping[str, tuple[int, int]]
    settle_steps: int
    resize_s: float | None = None


WHOLE = Length(WORLDS, 25)  # two checkpoints and a half
SMOKE = Length({"kill": (2, 1), "notice": (2, 1), "growth": (1, 2)}, 12, 1.0)


@dataclass(frozen=True)
class Done:
    """A step that all workers of a group have finished. `group`: when the group began (epoch ns, as
    its rank 0 says)."""

    group: int
    world: int
    step: int
    at_s: float


@dataclass(frozen=True)
class Change:
    """From one worker group to the next one. Seconds from the event to the end of the next group's
    first step; seconds without a finished step before it, less an ordinary step; steps that are
    done a second time."""

    answer_s: float
    still_s: float
    step_s: float
    steps_lost: int


def finished(lines: Iterable[str]) -> list[Done]:
    """`lines`: one of JSON per worker and step, {"group", "rank", "world", "step", "at_s"}; the
    last worker ends a step."""
    ends: dict[tuple[int, int, int], dict[int, float]] = {}
    for mark in map(json.loads, lines):
        ends.setdefault((mark["group"], mark["world"], mark["step"]), {})[mark["rank"]] = mark[
            "at_s"
        ]
    done = [Done(*key, max(of.values())) for key, of in ends.items() if len(of) == key[1]]
    return sorted(done, key=lambda d: d.at_s)


def first_after(steps: Sequence[Done], event_s: float, world: int) -> Done | None:
    """The first step of a group of `world` that has finished none before the event."""
    old = {d.group for d in steps if d.at_s <= event_s}
    return next(
        (d for d in steps if d.at_s > event_s and d.world == world and d.group not in old), None
    )


def change(steps: Sequence[Done], event_s: float, world: int) -> Change:
    """To the first group of `world` workers after the event. Raises ValueError when there is none,
    or nothing before it."""
    new = first_after(steps, event_s, world)
    if new is None:
        raise ValueError(f"no step of {world} workers after {event_s}")
    before = [d for d in steps if d.at_s < new.at_s]
    if not before:
        raise ValueError(f"no step before {new.at_s}")
    last = [d.at_s for d in before if d.group == before[-1].group][-ORDINARY_STEPS - 1 :]
    step_s = median([b - a for a, b in pairwise(last)] or [0.0])
    lost = max(d.step for d in before) - new.step + 1
    return Change(new.at_s - event_s, new.at_s - before[-1].at_s - step_s, step_s, lost)


def figures(cause: str, found: Change) -> dict[str, Any]:
    """Seconds as they are published: after a loss all that passes, else only while nothing is
    trained."""
    values = {
        "kill": {"loss_s": found.answer_s, "loss_steps_lost": found.steps_lost},
        "notice": {
            "notice_idle_s": found.still_s, "notice_to_step_s": found.answer_s,
            "notice_steps_lost": found.steps_lost,
        }, "growth": {"growth_s": found.still_s, "growth_to_step_s": found.answer_s,
        "growth_steps_lost": found.steps_lost},
    }[cause]  # fmt: skip
    named = {**values, f"{cause}_step_s": found.step_s}
    return {f"ray_train_{name}": round(value, 3) for name, value in named.items()}
