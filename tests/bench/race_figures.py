"""From the steps that a contender finished, and the nodes it had, to figures. No clock, no process,
no Ray.

useful_wall = useful seconds / wall seconds. Wall: from the launch (without_first_start: from the
end of the first step) to the end of the last step. Useful: for each step that counts (of one that
was trained again only the last time), what a step of the group that did it takes undisturbed: the
contender's own median for that number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

# within a group a gap of more than so many ordinary steps is a standstill; what is shorter is a
# slow step
STILL = 3.0
FIRST = 2  # steps of a group that are not ordinary ones


@dataclass(frozen=True)
class Done:
    """A step that all workers of a group have finished."""

    group: int
    world: int
    step: int
    at_s: float
    train_loss: float


@dataclass(frozen=True)
class Race:
    """What is known of a contender. `nodes`: (at_s, how many stand since then); `events`: (at_s,
    what)."""

    name: str
    launched_s: float
    until_s: float  # the end of the last step; of one that did not finish, when that was seen
    steps: tuple[Done, ...]
    nodes: tuple[tuple[float, int], ...]
    events: tuple[tuple[float, str], ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return self.steps[0].at_s


def finished(lines: Iterable[str]) -> tuple[Done, ...]:
    """`lines`: one of JSON per worker and step, as peer.Marks writes them; the last worker ends a
    step."""
    ends: dict[tuple[int, int, int], dict[int, tuple[float, float]]] = {}
    for mark in map(json.loads, lines):
        ends.setdefault((mark["group"], mark["world"], mark["step"]), {})[mark["rank"]] = (
            mark["at_s"],
            mark["loss"],
        )
    whole = [(key, of) for key, of in ends.items() if len(of) == key[1]]
    done = [Done(*key, max(at_s for at_s, _ in of.values()), of[0][1]) for key, of in whole]
    return tuple(sorted(done, key=lambda d: d.at_s))


def counted(steps: Sequence[Done]) -> list[Done]:
    """Of a step that was trained again the last time, in order of the steps."""
    return sorted({done.step: done for done in steps}.values(), key=lambda d: d.step)


def pace(steps: Sequence[Done]) -> dict[int, float]:
    """Workers -> seconds of an undisturbed step: the median within groups of that size, their first
    steps left out."""
    times: dict[int, list[float]] = {}
    for group in dict.fromkeys(done.group for done in steps):
        own = [done for done in steps if done.group == group]
        for before, after in pairwise(own[FIRST - 1 :]):
            times.setdefault(own[0].world, []).append(after.at_s - before.at_s)
    known = {world: median(values) for world, values in times.items()}
    if not known:
        raise ValueError("no group has finished more than two steps")
    nearest = {
        world: min(known, key=lambda k: abs(k - world)) for world in {done.world for done in steps}
    }
    return {world: known[near] * near / world for world, near in nearest.items()}


def still_s(before: Done, after: Done, step_s: Mapping[int, float]) -> float:
    """Seconds between two steps in which none was being done; 0 = the later one was only slow."""
    gap_s, one_s = after.at_s - before.at_s, step_s[after.world]
    return max(0.0, gap_s - one_s) if after.group != before.group or gap_s > STILL * one_s else 0.0


def idle_s(steps: Sequence[Done], step_s: Mapping[int, float]) -> float:
    """Seconds after the first step in which no step was being done."""
    return sum(still_s(before, after, step_s) for before, after in pairwise(steps))


def node_seconds(nodes: Sequence[tuple[float, int]], until_s: float) -> float:
    ends = [*(at_s for at_s, _ in nodes[1:]), until_s]
    return sum(n * max(0.0, min(end, until_s) - at_s) for (at_s, n), end in zip(nodes, ends))


def figures(race: Race, usd_per_node_h: float) -> dict[str, Any]:
    """Named by the contender: elastic_useful_wall and so on."""
    step_s = pace(race.steps)
    kept = counted(race.steps)
    useful_s = sum(step_s[done.world] for done in kept)
    useful_node_s = sum(step_s[done.world] * done.world for done in kept)
    paid_s = node_seconds(race.nodes, race.until_s)
    first_step_s = step_s[kept[0].world]
    values = {
        "useful_wall": useful_s / (race.until_s - race.launched_s),
        "useful_wall_without_first_start": (useful_s - first_step_s)
        / (race.until_s - race.first_s),
        "useful_of_paid": useful_node_s / paid_s,
        "wall_s": race.until_s - race.launched_s,
        "first_start_s": race.first_s - race.launched_s,
        "idle_s": idle_s(race.steps, step_s) + race.until_s - race.steps[-1].at_s,
        "steps_redone": len(race.steps) - len(kept),
        "steps": kept[-1].step,
        "usd": paid_s * usd_per_node_h / 3600,
        "final_loss": sum(done.train_loss for done in kept[-20:]) / len(kept[-20:]),
        "last_step_loss": kept[-1].train_loss,
    }
    shown = {name: round(value, 4) for name, value in values.items()}
    return {f"{race.name}_{name}": value for name, value in shown.items()} | {
        f"{race.name}_step_s": {world: round(value, 4) for world, value in sorted(step_s.items())}
    }


def groups(race: Race) -> list[tuple[float, int]]:
    """(at_s, workers that train since then): 0 from the last step of a group until the first one of
    the next has begun."""
    step_s = pace(race.steps)
    found: list[tuple[float, int]] = [
        (race.launched_s, 0),
        (race.first_s - step_s[race.steps[0].world], race.steps[0].world),
    ]
    for before, after in pairwise(race.steps):
        still = still_s(before, after, step_s)
        if still:
            found.append((before.at_s, 0))
            found.append((before.at_s + still, after.world))
        elif after.world != before.world:
            found.append((before.at_s, after.world))
    return [*found, (race.until_s, 0)]


ROWS = (
    ("useful wall time", "useful_wall", "{:.3f}"), ("the same without the first start",
    "useful_wall_without_first_start", "{:.3f}"), ("useful of the paid node-seconds",
    "useful_of_paid", "{:.3f}"), ("wall clock, s", "wall_s", "{:.0f}"), ("first start, s",
    "first_start_s", "{:.1f}"), ("idle after it, s", "idle_s", "{:.1f}"), ("steps trained again",
    "steps_redone", "{}"), ("dollars", "usd", "{:.3f}"), ("loss, mean of the last 20 steps",
    "final_loss", "{:.4f}"),
)  # fmt: skip
TITLES = {
    "elastic": "elastic", "script": "elastic, script restarted", "ray_train": "Ray Train 2.60",
    "torchrun": "torchrun",
}  # fmt: skip


def table(found: Mapping[str, Any], contenders: Sequence[str]) -> list[str]:
    """A table in Markdown; a contender that could not be measured has dashes."""
    lines = [
        "| | " + " | ".join(TITLES[name] for name in contenders) + " |",
        "|---|" + "---|" * len(contenders),
    ]
    for title, name, shape in ROWS:
        cells = [
            shape.format(found[key]) if (key := f"{who}_{name}") in found else "-"
            for who in contenders
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines
