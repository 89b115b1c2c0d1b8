"""Ranks of unequal speed: throughput over the sum of their speeds, with shares and stages that
follow what is measured, and beside it with equal ones.

Whole runs on the embedded cluster, nodes of one worker. Each unit of work (a sample through a
block, there and back) takes a known time on each rank, by a drill that sleeps; the sleeping is most
of a step, so that the cores of this machine do not count. 1_1_2, 1_2_3_4, 1_1_1_025: shares of a
plain sharded layout. stages_1_2: a pipeline of two stages. change: four equal ranks, of which one
becomes twice as slow. jitter: speeds that vary by +-10 % from step to step, which nothing must
follow. odd: five and seven ranks, all used, next to four.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from report import finish, options
from trial import Clock, Failed, Trial, running

from elastic.ledger.journal import Line
from elastic.types import DrillAsked, EnterPlan, Plan, SetShares, SharesSet, StepDone

PARTS = ("1_1_2", "1_2_3_4", "1_1_1_025", "stages_1_2", "change", "odd", "jitter")
MOST_S = 2400.0
PROGRAM, BLOCKS = Path(__file__).resolve().parent / "unequal_job" / "program.py", 3
JITTER = 0.1
SPEEDS = {  # of each rank
    "1_1_2": (0.5, 0.5, 1.0), "1_2_3_4": (0.25, 0.5, 0.75, 1.0), "1_1_1_025": (1.0, 1.0, 1.0, 0.25),
    "stages_1_2": (0.5, 1.0),
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """`unit_s`: of a sample through a block on the fastest rank; `batches`: samples of a step;
    `odd`: ranks and samples of a step; `patience`: steps in which shares should begin to follow;
    `back`: the part of what is possible at which a step is as good as before; the others in
    steps."""

    unit_s: float
    batches: Mapping[str, int]
    odd: Mapping[int, int]
    jitter_min: float
    warm: int = 10
    measured: int = 8
    change_at: int = 12
    patience: int = 0
    back: float = 0.9


WHOLE = Size(
    0.05,
    {"1_1_2": 32, "1_2_3_4": 40, "1_1_1_025": 78, "stages_1_2": 48, "change": 56},
    {5: 40, 7: 84},
    10.0,
)
SMOKE = Size(
    0.01, {"1_1_2": 12, "1_2_3_4": 10, "1_1_1_025": 13, "stages_1_2": 8, "change": 28}, {5: 20},
    0.1, warm=5, measured=3, patience=40, back=0.6,
)  # fmt: skip


def job(n: int, batch: int, drill: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    pool = {"name": "owned", "gpus_per_node": 1, "min_nodes": n, "max_nodes": n}
    return {
        "name": "unequal", "program": str(PROGRAM), "steps": 100_000, "global_batch": batch,
        "seed": 1, "layout": {n: f"dp_shard={n}"}, "min_workers": n, "peer_every": 0,
        "durable_every": 0, "check_numbers_every": 0, "pools": [pool], "drill": list(drill), **more,
    }  # fmt: skip


def slow(rank: int, speed: float, unit_s: float, at_step: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "at_step": at_step,
        "slow": f"rank:{rank}",
        "factor": 1 / speed,
        "unit_s": unit_s,
        **more,
    }


def ideal_s(batch: int, speeds: Sequence[float], unit_s: float) -> float:
    """Of a step, where every rank works all the time."""
    return batch * BLOCKS * unit_s / sum(speeds)


def events(lines: Sequence[Line], kind: type) -> Iterator[Any]:
    return (event for line in lines for _, event in line.events if isinstance(event, kind))


def plans(lines: Sequence[Line]) -> list[Plan]:
    return [
        a.plan
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, EnterPlan)
    ]


def step_s(lines: Sequence[Line], n: int) -> float:
    """Median of the newest steps."""
    return median([done.step_time_s for done in events(lines, StepDone)][-n:])


def moved(lines: Sequence[Line]) -> int:
    """Steps after the last change of shares or of the generation, from the first step on that
    trains with it."""
    steps = [(done.generation, done.step) for done in events(lines, StepDone)]
    since = max(
        [
            0,
            *(
                set_.from_step
                for set_ in events(lines, SharesSet)
                if set_.generation == steps[-1][0]
            ),
        ]
    )
    return sum(generation == steps[-1][0] and step > since for generation, step in steps)


def settled(trial: Trial, warm: int, least: int) -> list[Line]:
    """Waits until nothing was moved for so many steps after the warm-up."""
    trial.until(
        lambda: len(trial.steps) >= warm and moved(trial.lines()) >= least,
        f"{least} steps in a row without a move",
    )
    return trial.lines()


def follows(trial: Trial) -> bool:
    return bool(trial.steps) and any(True for _ in events(trial.lines(), SharesSet))


def run(clock: Clock, what: dict[str, Any], warm: int, least: int) -> list[Line]:
    with running(what, clock) as trial:
        return settled(trial, warm, least)


# ---------------------------------------------------------------------------- the best static split


def splits(total: int, n: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal `total` out in `n` parts of at least one."""
    for cuts in combinations(range(1, total), n - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def busy_s(samples: Sequence[int], speeds: Sequence[float], unit_s: float) -> float:
    """Of a step of a plainly sharded layout."""
    return max(n * BLOCKS * unit_s / speed for n, speed in zip(samples, speeds, strict=True))


def piped_s(layers: Sequence[int], batch: int, speeds: Sequence[float], unit_s: float) -> float:
    """Of a step of a pipeline with one sample per microbatch."""
    each = [n * unit_s / speed for n, speed in zip(layers, speeds, strict=True)]
    return (batch - 1) * max(each) + sum(each)


# -------------------------------------------------------------------------------------------- parts


def shared(clock: Clock, size: Size, part: str) -> dict[str, Any]:
    speeds, batch = SPEEDS[part], size.batches[part]
    drill = [slow(rank, speed, size.unit_s) for rank, speed in enumerate(speeds)]
    n, ideal = len(speeds), ideal_s(batch, speeds, size.unit_s)
    least = size.warm + size.measured
    with running(job(n, batch, drill), clock) as trial:
        trial.until(lambda: len(trial.steps) >= size.patience or follows(trial), "other shares")
        lines = settled(trial, size.warm, least)
    equal = run(clock, job(n, batch, drill, rebalance=False), size.warm, least)
    samples = ([set_.samples for set_ in events(lines, SharesSet)] or [plans(lines)[-1].samples])[
        -1
    ]
    best = min(splits(batch, n), key=lambda split: busy_s(split, speeds, size.unit_s))
    over = busy_s(samples, speeds, size.unit_s) / busy_s(best, speeds, size.unit_s) - 1
    return {
        "of_sum": round(ideal / step_s(lines, size.measured), 3),
        "equal_of_sum": round(ideal / step_s(equal, size.measured), 3), "samples": samples,
        "all_dealt": sum(samples) == batch and min(samples) > 0 and len(samples) == n,
        "best_static": best, "over_best_static": round(over, 3), "step_s": round(step_s(lines,
        size.measured), 4), "moves": len(list(events(lines, SharesSet))),
        "generations": len(plans(lines)),
    }  # fmt: skip


def staged(clock: Clock, size: Size, part: str) -> dict[str, Any]:
    speeds, batch = SPEEDS[part], size.batches[part]
    drill = [slow(rank, speed, size.unit_s) for rank, speed in enumerate(speeds)]
    what = job(2, batch, drill, layout={2: "pp=2,microbatch_size=1"})
    lines = run(clock, what, size.warm, 2 * size.measured)
    equal = run(clock, what | {"rebalance": False}, size.warm, 2 * size.measured)
    ideal, newest = ideal_s(batch, speeds, size.unit_s), plans(lines)[-1]
    by_node = dict(zip(plans(lines)[0].nodes, speeds, strict=True))
    now = [by_node[node] for node in newest.nodes]
    best = min(splits(BLOCKS, 2), key=lambda split: piped_s(split, batch, now, size.unit_s))
    best_s = piped_s(best, batch, now, size.unit_s)
    return {
        "of_sum": round(ideal / step_s(lines, size.measured), 3),
        "equal_of_sum": round(ideal / step_s(equal, size.measured), 3), "layers": newest.layers,
        "all_dealt": sum(newest.layers) == BLOCKS and min(newest.layers) > 0, "best_static": best,
        "over_best_static": round(piped_s(newest.layers, batch, now, size.unit_s) / best_s - 1, 3),
        "best_static_of_sum": round(ideal / best_s, 3), "step_s": round(step_s(lines,
        size.measured), 4), "generations": len(plans(lines)),
    }  # fmt: skip


def changed(clock: Clock, size: Size, part: str) -> dict[str, Any]:
    """One of four equal ranks becomes twice as slow."""
    # of seven parts that fit these, 2, 1, 2 and 2
    batch, factors = size.batches[part], (1.0, 0.5, 1.0, 1.0)
    drill = [slow(rank, 1.0, size.unit_s) for rank in range(4)] + [
        slow(1, 0.5, size.unit_s, at_step=size.change_at)
    ]
    with running(job(4, batch, drill), clock) as trial:
        trial.until(lambda: follows(trial), "other shares")
        lines = settled(trial, size.warm, size.measured)
    began_s = [
        at_s for line in lines for at_s, event in line.events if isinstance(event, DrillAsked)
    ][-1]
    ordered = [
        line
        for line in lines
        if line.decision and any(isinstance(a, SetShares) for a in line.decision.actions)
    ]
    ideal = ideal_s(batch, factors, size.unit_s)
    done = [
        (at_s, event)
        for line in lines
        for at_s, event in line.events
        if isinstance(event, StepDone)
    ]
    after = [(at_s, event) for at_s, event in done if at_s > began_s]
    back = (
        at_s
        for at_s, event in after
        if event.step_time_s <= ideal / size.back and at_s > ordered[0].at_s
    )
    back_s = next(back, None)
    if back_s is None or ordered[0].at_s < began_s:
        raise Failed(
            "change: moved before it was slow, or never back: "
            f"{[round(e.step_time_s, 3) for _, e in done]}"
        )
    slow_s = max(event.step_time_s for _, event in after)
    return {
        "found_s": round(ordered[0].at_s - began_s, 2), "back_s": round(back_s - began_s, 2),
        "slow_step_s": round(slow_s, 3), "found_steps": sum(at_s <= ordered[0].at_s for at_s,
        _ in after), "of_possible": round(ideal / step_s(lines, size.measured), 3),
        "moves": len(ordered), "why": ordered[0].decision.reason if ordered[0].decision else "",
    }  # fmt: skip


def jittering(clock: Clock, size: Size, part: str) -> dict[str, Any]:
    drill = [slow(rank, 1.0, size.unit_s, jitter=JITTER) for rank in range(4)]
    with running(job(4, 16, drill), clock) as trial:
        trial.until(lambda: bool(trial.steps), "the first step")
        until_s = trial.steps[0][2] + 60 * size.jitter_min
        trial.until(lambda: trial.steps[-1][2] >= until_s, f"{size.jitter_min:g} minutes of {part}")
        lines = trial.lines()
    minutes = (trial.steps[-1][2] - trial.steps[0][2]) / 60
    moves = len(list(events(lines, SharesSet))) + len(plans(lines)) - 1
    return {"minutes": round(minutes, 1), "steps": len(trial.steps), "moves": moves}


def odd(clock: Clock, size: Size, part: str) -> dict[str, Any]:
    """Odd numbers of equal ranks under `auto`, next to four: all used, with the same losses."""
    found: dict[str, Any] = {}
    for n, batch in size.odd.items():
        lines = {}
        for k in (n, 4):
            what = job(k, batch, [slow(r, 1.0, size.unit_s) for r in range(k)], layout="auto")
            lines[k] = run(clock, what, size.warm, size.warm + size.measured)
        losses = {
            k: {done.step: done.train_loss for done in events(found_, StepDone)}
            for k, found_ in lines.items()
        }
        common = sorted(losses[n].keys() & losses[4].keys())
        newest, ours_s = plans(lines[n])[-1], step_s(lines[n], size.measured)
        found[str(n)] = {
            "layout": str(newest.layout), "samples": newest.samples, "used": len(newest.ranks),
            "all_dealt": sum(newest.samples) == batch and len(newest.ranks) == n,
            "throughput_over_four": round(step_s(lines[4], size.measured) / ours_s, 3),
            "of_sum": round(ideal_s(batch, [1.0] * n, size.unit_s) / ours_s, 3),
            "steps_compared": len(common),
            "loss_differs_by": max(abs(losses[n][s] - losses[4][s]) for s in common),
        }  # fmt: skip
    return found


def measure(parts: Sequence[str], clock: Clock, size: Size) -> dict[str, Any]:
    kinds = {"stages_1_2": staged, "change": changed, "jitter": jittering, "odd": odd}
    found = {part: kinds.get(part, shared)(clock, size, part) for part in parts}
    return {**found, **summary(found)}


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared with the baselines."""
    out: dict[str, Any] = {}
    split = [found[name] for name in SPEEDS if name in found]
    if split:
        out["least_of_sum"] = min(part["of_sum"] for part in split)
        out["most_over_best"] = max(part["over_best_static"] for part in split)
        out["all_dealt"] = all(part["all_dealt"] for part in split)
    if "change" in found:
        out |= {key: found["change"][key] for key in ("found_s", "back_s")}
    if "odd" in found:
        out["odd_all_dealt"] = all(part["all_dealt"] for part in found["odd"].values())
        out["odd_loss_differs_by"] = max(part["loss_differs_by"] for part in found["odd"].values())
    return out | ({"jitter_moves": found["jitter"]["moves"]} if "jitter" in found else {})


def main() -> int:
    given = options(__doc__, MOST_S, parts=PARTS, smoke_parts=("1_2_3_4",))
    return finish(
        "unequal", given, lambda clock: measure(given.parts, clock, SMOKE if given.smoke else WHOLE)
    )


if __name__ == "__main__":
    sys.exit(main())
