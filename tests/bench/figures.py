"""The arithmetic of the benches: from journals to figures. No clock, no process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from random import Random
from statistics import median
from typing import Any

from elastic.ledger.journal import Line
from elastic.observe.accounting.transitions import PHASES, Transition
from elastic.types import (
    DTYPE_BYTES,
    DriverStarted,
    EnterPlan,
    NodePrepared,
    PlanEntered,
    StepDone,
    TensorSpec,
)

# of what each drill leads to
NAMES = {"kill": "loss", "notice": "notice", "add": "growth", "hang": "hang"}
AROUND = 20  # steps
TRAINING = ("notice", "growth")  # whose `quiesce` is spent training: it is no part of the pause


@dataclass(frozen=True)
class Spread:
    """Repeats of one measurement."""

    values: tuple[float, ...]

    @property
    def middle(self) -> float | None:
        return round(median(self.values), 4) if self.values else None

    def plain(self) -> dict[str, float | int]:
        if not self.values:
            return {"n": 0}
        return {
            "min": round(min(self.values), 4),
            "max": round(max(self.values), 4),
            "n": len(self.values),
        }


@dataclass(frozen=True)
class Drill:
    """What was asked for, and when it was carried out."""

    kind: str
    at_s: float


@dataclass(frozen=True)
class ColdRestart:
    """Everything killed and started again, in seconds from the kill to the end of the first
    step."""

    seconds: float
    steps_lost: int
    phases_s: Mapping[str, float]


@dataclass(frozen=True)
class Changes:
    """What bare torch needs for a change of group in warm processes: groups, model, first step,
    less an ordinary step."""

    shrink_s: tuple[float, ...] = ()
    grow_s: tuple[float, ...] = ()


# --------------------------------------------------------------------------------- from the journal


def answers(
    drills: Sequence[Drill], transitions: Sequence[Transition]
) -> dict[str, list[Transition]]:
    """The transition that each drill led to: the next one after it that reached a step. Those that
    were overtaken have no pause of their own: it is a part of the one that overtook them. Growth
    also comes from a node that is back after a hang."""
    found: dict[str, list[Transition]] = {name: [] for name in NAMES.values()}
    reached = [t for t in transitions if t.phases_s.get("first_step", 0.0) > 0]
    for drill in drills:
        if drill.kind != "add":
            found[NAMES[drill.kind]] += [t for t in reached if t.at_s > drill.at_s][:1]
    found["growth"] = [
        t
        for t in reached
        if t.cause == "growth" and not any(t in others for others in found.values())
    ]
    return found


def cold_restart(lines: Sequence[Line], killed_at_s: float) -> ColdRestart:
    """Of the first driver that started after the kill. Raises ValueError when it has not finished a
    step."""
    before = [
        e.step
        for line in lines
        for at_s, e in line.events
        if isinstance(e, StepDone) and at_s <= killed_at_s
    ]
    marks: dict[str, float] = {}
    resumed = 0
    for at_s, event in (
        (at_s, e) for line in lines for at_s, e in line.events if at_s > killed_at_s
    ):
        if isinstance(event, DriverStarted):
            marks.setdefault("driver", at_s)
        elif isinstance(event, NodePrepared) and "entered" not in marks:
            marks["prepared"] = at_s
        elif isinstance(event, PlanEntered) and "entered" not in marks:
            marks["entered"], resumed = at_s, event.step
        elif isinstance(event, StepDone):
            marks["step"] = at_s
            break
    if "step" not in marks:
        raise ValueError(f"no step after {killed_at_s}")
    names, times = ["driver", "prepared", "entered", "step"], [killed_at_s]
    times += [marks.get(name, times[-1]) for name in names]
    phases_s = {
        name: round(max(0.0, later - sooner), 4)
        for name, (sooner, later) in zip(names, pairwise(times))
    }
    return ColdRestart(
        round(marks["step"] - killed_at_s, 4), max(before, default=0) - resumed, phases_s
    )


@dataclass(frozen=True)
class Pace:
    """Every step that was finished, in order: generation, step, when; and how many ranks each
    generation has. `around`: steps before an event and after it that its excess looks at."""

    steps: tuple[tuple[int, int, float], ...]
    worlds: Mapping[int, int]
    around: int = AROUND

    def window(self, began_s: float, generation: int) -> tuple[int, int] | None:
        """Indices of the step that ended `around` steps before `began_s` and of as many steps into
        `generation`; None where other transitions lie in between or steps are missing."""
        ended = sum(1 for _, _, at_s in self.steps if at_s <= began_s) - 1
        own = [i for i, (g, _, _) in enumerate(self.steps) if g == generation]
        first, last = ended - self.around, own[self.around - 1] if len(own) >= self.around else -1
        if first < 0 or last < 0 or len({g for g, _, _ in self.steps[first : ended + 1]}) != 1:
            return None
        return first, last

    def ordinary_s(self, windows: Sequence[tuple[int, int]]) -> dict[int, float]:
        """Per number of ranks, the mean time of a step of a running generation that lies in none of
        the windows."""
        found: dict[int, list[float]] = {}
        for i, ((g, _, before_s), (h, _, at_s)) in enumerate(pairwise(self.steps)):
            if g == h and not any(first <= i < last for first, last in windows):
                found.setdefault(self.worlds[g], []).append(at_s - before_s)
        return {world: sum(times) / len(times) for world, times in found.items()}

    def excess_s(self, first: int, last: int, ordinary_s: Mapping[int, float]) -> float | None:
        """Wall seconds between two steps, less what the progress between them costs at the capacity
        that there was for it."""
        old, new = self.steps[first][0], self.steps[last][0]
        resumed = next(step for generation, step, _ in self.steps if generation == new) - 1
        worlds = self.worlds[old], self.worlds[new]
        if not all(world in ordinary_s for world in worlds):
            return None
        before, after = resumed - self.steps[first][1], self.steps[last][1] - resumed
        wall_s = self.steps[last][2] - self.steps[first][2]
        return wall_s - before * ordinary_s[worlds[0]] - after * ordinary_s[worlds[1]]


def pace(lines: Iterable[Line], around: int = AROUND) -> Pace:
    steps, worlds = [], {}
    for line in lines:
        steps += [
            (e.generation, e.step, at_s) for at_s, e in line.events if isinstance(e, StepDone)
        ]
        for action in line.decision.actions if line.decision else ():
            if isinstance(action, EnterPlan):
                worlds[action.plan.generation] = len(action.plan.ranks)
    return Pace(tuple(steps), worlds, around)


def excesses(
    run: Pace, asked: Sequence[Drill], found: Mapping[str, Sequence[Transition]]
) -> dict[str, list[float]]:
    """Per cause, the excess of each transition; an event begins with the newest drill before its
    transition."""
    windows = {}
    for name, transitions in found.items():
        kinds = [kind for kind, leads_to in NAMES.items() if leads_to == name]
        for transition in transitions:
            began = [
                drill.at_s
                for drill in asked
                if drill.kind in kinds and drill.at_s < transition.at_s
            ]
            window = run.window(began[-1], transition.generation) if began else None
            if window is not None:
                windows[name, transition.generation] = window
    ordinary_s = run.ordinary_s(list(windows.values()))
    out: dict[str, list[float]] = {name: [] for name in found}
    for (name, _), (first, last) in windows.items():
        seconds = run.excess_s(first, last, ordinary_s)
        if seconds is not None:
            out[name].append(seconds)
    return out


def n_bytes(spec: TensorSpec) -> int:
    """Of one logical tensor."""
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Intercept and slope of the least-squares line; None for fewer than two different x."""
    xs = [x for x, _ in points]
    if len(set(xs)) < 2:
        return None
    mean_x, mean_y = sum(xs) / len(xs), sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x in xs)
    return mean_y - slope * mean_x, slope


def gaps(lines: Iterable[Line]) -> dict[int, float]:
    """Per generation, from the end of the last step before it to the end of its own first one."""
    steps = [
        (at_s, e.generation) for line in lines for at_s, e in line.events if isinstance(e, StepDone)
    ]
    return {new: at_s - before_s for (before_s, old), (at_s, new) in pairwise(steps) if new > old}


# ------------------------------------------------------------------------------------------ figures


def phases(name: str, found: Sequence[Transition], gaps: Mapping[int, float]) -> dict[str, float]:
    """Median of each phase. `rest`: what of the time without a finished step lies in none of them
    (mostly the step that was aborted); `ordinary_step`: what is taken off, so that all add up to
    the pause (each a median: nearly)."""
    counted = [phase for phase in PHASES if not (phase == "quiesce" and name in TRAINING)]
    out = {phase: median(t.phases_s.get(phase, 0.0) for t in found) for phase in counted}
    if known := [(t, gaps[t.generation]) for t in found if t.generation in gaps]:
        out["rest"] = median(
            gap_s - sum(t.phases_s.get(phase, 0.0) for phase in counted) for t, gap_s in known
        )
        out["ordinary_step"] = median(t.pause_s - gap_s for t, gap_s in known)
    return {phase: round(seconds, 4) for phase, seconds in out.items()}


@dataclass(frozen=True)
class Found:
    """What a run with drills showed. `transitions`: see `answers`; `excess_s`: see `excesses`."""

    transitions: Mapping[str, Sequence[Transition]]
    gaps: Mapping[int, float]
    excess_s: Mapping[str, Sequence[float]]


def recovery(run: Found, colds: Sequence[ColdRestart], bare: Changes) -> dict[str, Any]:
    """All figures of the drills but the load of the machine."""
    found, gaps = run.transitions, run.gaps
    pauses = {
        name: Spread(tuple(t.pause_s for t in transitions)) for name, transitions in found.items()
    }
    cold = Spread(tuple(c.seconds for c in colds))
    shrink, grow = Spread(bare.shrink_s), Spread(bare.grow_s)
    out: dict[str, Any] = {f"pause_{name}_s": spread.middle for name, spread in pauses.items()}
    excess = {name: Spread(tuple(values)) for name, values in run.excess_s.items()}
    for name, spread in excess.items():
        out[f"excess_{name}_s"] = spread.middle
    for name, floor in (("notice", shrink), ("growth", grow), ("loss", shrink)):
        out[f"pause_over_bare_{name}_s"] = less(pauses[name].middle, floor.middle)
    for name, transitions in found.items():
        out[f"steps_lost_{name}"] = max((t.steps_lost for t in transitions), default=None)
    out["cold_restart_s"] = cold.middle
    out["cold_restart_steps_lost"] = max((c.steps_lost for c in colds), default=None)
    for name, spread in pauses.items():
        out[f"{name}_vs_cold"] = ratio(spread.middle, cold.middle)
    out["contents_equal"] = all(t.digest_ok for transitions in found.values() for t in transitions)
    out["bare_shrink_s"], out["bare_grow_s"] = shrink.middle, grow.middle
    out["phases_s"] = {
        name: phases(name, transitions, gaps) for name, transitions in found.items() if transitions
    }
    out["phases_s"]["cold_restart"] = _cold_phases(colds)
    spreads = {f"pause_{name}_s": spread for name, spread in pauses.items()}
    spreads |= {f"excess_{name}_s": spread for name, spread in excess.items()}
    spreads |= {"cold_restart_s": cold, "bare_shrink_s": shrink, "bare_grow_s": grow}
    out["spread"] = {name: spread.plain() for name, spread in spreads.items()}
    return out


def device_bound(run: Found) -> dict[str, Any]:
    """Pauses and excess of the drills whose steps leave the host free."""
    pauses = {
        f"pause_{name}_s": Spread(tuple(t.pause_s for t in found))
        for name, found in run.transitions.items()
    }
    excess = {f"excess_{name}_s": Spread(tuple(values)) for name, values in run.excess_s.items()}
    spreads = {f"device_bound_{key}": spread for key, spread in {**pauses, **excess}.items()}
    out: dict[str, Any] = {key: spread.middle for key, spread in spreads.items()}
    out["device_bound_spread"] = {key: spread.plain() for key, spread in spreads.items()}
    return out


def _cold_phases(colds: Sequence[ColdRestart]) -> dict[str, float | None]:
    names = colds[0].phases_s if colds else {}
    return {name: Spread(tuple(c.phases_s[name] for c in colds)).middle for name in names}


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else round(value / base, 4)


def less(value: float | None, floor: float | None) -> float | None:
    return None if value is None or floor is None else round(value - floor, 4)


DRAWN = 2000  # bootstrap samples
# steps at the start of a block that are not counted: the one that was frozen, and the one that is
# told with it
SETTLES = 2


@dataclass(frozen=True)
class Block:
    """One stretch in which one contender ran alone. Seconds are per step: wall (mean and median),
    CPU per kind of process, and the named parts of the wall seconds that the contender itself
    tells."""

    mean_s: float
    median_s: float
    cpu_s: Mapping[str, float]
    parts_s: Mapping[str, float] = field(default_factory=dict)


def block(ends: Sequence[float], cpu_s: Mapping[str, float], active_s: float) -> Block | None:
    """`ends`: when each step of the block ended. `cpu_s`: CPU seconds of the `active_s` seconds in
    which nothing was frozen. None where fewer than two whole steps remain."""
    whole = ends[SETTLES - 1 :]
    times = [b - a for a, b in pairwise(whole)]
    if len(times) < 2:
        return None
    mean_s = (whole[-1] - whole[0]) / len(times)
    return Block(
        mean_s,
        median(times),
        {kind: seconds * mean_s / active_s for kind, seconds in cpu_s.items()},
    )


WATCHED = ("step_time_ratio", "median_step_time_ratio", "cpu_seconds_ratio")
TRAINERS = ("workers", "ray")  # kinds of processes that are neither the driver nor beside it


def overhead(pairs: Sequence[tuple[Block, Block]]) -> dict[str, Any]:
    """`pairs`: a block under elastic and a bare one, one right after the other. The ratios are
    those of the sums over all pairs; their intervals hold 95 % of the ratios of as many pairs drawn
    with replacement (percentile bootstrap)."""
    kinds = {
        "step_time_ratio": lambda b: b.mean_s,
        "median_step_time_ratio": lambda b: b.median_s,
        "cpu_seconds_ratio": lambda b: sum(b.cpu_s.values()),
    }
    out: dict[str, Any] = {"pairs": len(pairs)}
    for name, of in kinds.items():
        values = [(of(ours), of(bare)) for ours, bare in pairs]
        out[name], out[f"{name}_95"] = _ratio_of_sums(values), _interval(values)
    out["elastic_step_s"] = Spread(tuple(ours.mean_s for ours, _ in pairs)).middle
    out["bare_step_s"] = Spread(tuple(bare.mean_s for _, bare in pairs)).middle
    names = sorted({kind for ours, _ in pairs for kind in ours.cpu_s})
    out["elastic_cpu_parts_s"] = {
        k: Spread(tuple(ours.cpu_s.get(k, 0.0) for ours, _ in pairs)).middle for k in names
    }
    out["bare_cpu_s"] = Spread(tuple(sum(bare.cpu_s.values()) for _, bare in pairs)).middle
    names = sorted({part for ours, _ in pairs for part in ours.parts_s})
    out["elastic_parts_s"] = {
        k: Spread(tuple(ours.parts_s.get(k, 0.0) for ours, _ in pairs)).middle for k in names
    }
    return out


def beside(pairs: Sequence[tuple[Block, Block]], n_cores: int) -> dict[str, Any]:
    """What driver and observers compute in a step more than the driver of the run that nothing
    watches; and which share of the cores' time that is. It is told from the CPU seconds of a second:
    most of what they do comes by the clock, and steps of two blocks are not equally long."""
    if not pairs:
        return {"watchers_cpu_ms_per_step": None, "watchers_cpu_share": None}
    more = [_beside_training(ours) - _beside_training(base) for ours, base in pairs]
    step_s = median(base.mean_s for _, base in pairs)
    draw = Random(1)
    drawn = sorted(sum(draw.choices(more, k=len(more))) / len(more) for _ in range(DRAWN))
    bounds = [drawn[round(share * (DRAWN - 1))] for share in (0.025, 0.975)]
    mean = sum(more) / len(more)
    kinds = sorted({kind for pair in pairs for one in pair for kind in one.cpu_s} - {*TRAINERS})
    parts = {
        kind: sum(
            ours.cpu_s.get(kind, 0.0) / ours.mean_s - base.cpu_s.get(kind, 0.0) / base.mean_s
            for ours, base in pairs
        )
        for kind in kinds
    }
    return {
        "watchers_cpu_ms_per_step": round(1000 * mean * step_s, 3),
        "watchers_cpu_ms_per_s": {k: round(1000 * s / len(pairs), 3) for k, s in parts.items()},
        "watchers_cpu_ms_per_step_95": [round(1000 * one * step_s, 3) for one in bounds],
        "watchers_cpu_share": round(mean / n_cores, 5),
    }


def _beside_training(block: Block) -> float:
    """CPU seconds in a second."""
    spent = sum(seconds for kind, seconds in block.cpu_s.items() if kind not in TRAINERS)
    return spent / block.mean_s


def watched(
    rounds: Sequence[Mapping[str, Block]], n_cores: int, base: str = "nothing"
) -> dict[str, dict[str, Any]]:
    """Of each contender the median step, and of all but `base` the ratios to that in the same
    round, and what is computed beside the training."""
    names = dict.fromkeys(name for one in rounds for name in one)
    pairs = {
        name: [(one[name], one[base]) for one in rounds if {name, base} <= one.keys()]
        for name in names
    }
    found = {name: overhead(of) for name, of in pairs.items()}
    kept = ("pairs", *(f"{name}{more}" for name in WATCHED for more in ("", "_95")))
    return {
        name: {
            "step_s": Spread(tuple(one[name].median_s for one in rounds if name in one)).middle,
            **(
                {}
                if name == base
                else {key: of[key] for key in kept} | beside(pairs[name], n_cores)
            ),
        }
        for name, of in found.items()
    }


def _ratio_of_sums(values: Sequence[tuple[float, float]]) -> float | None:
    return ratio(sum(ours for ours, _ in values), sum(bare for _, bare in values))


def _interval(values: Sequence[tuple[float, float]]) -> list[float] | None:
    if not values:
        return None
    draw = Random(1)
    drawn = sorted(_ratio_of_sums(draw.choices(values, k=len(values))) or 0.0 for _ in range(DRAWN))
    return [drawn[round(0.025 * (DRAWN - 1))], drawn[round(0.975 * (DRAWN - 1))]]
