"""Ranks of unequal speed: throughput over the sum of their speeds, with shares and stages that follow what is measured, and
beside it with equal ones.

Whole runs on the embedded cluster, nodes of one worker. Each unit of work (a sample through a block, there and back) takes a
known time on each rank, by a drill that sleeps; the sleeping is most of a step, so that the cores of this machine do not count.
1_1_2, 1_2_3_4, 1_1_1_025: shares of a plain sharded layout. stages_1_2: a pipeline of two stages. change: four equal ranks, of
which one becomes twice as slow. jitter: speeds that vary by +-10 % from step to step, which nothing must follow. odd: five and
seven ranks, all used, next to four.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from report import finish, options
from trial import Clock, Failed, Trial

from elastic.ledger.journal import Line
from elastic.types import DrillAsked, EnterPlan, Plan, SetShares, SharesSet, StepDone

PARTS = ("1_1_2", "1_2_3_4", "1_1_1_025", "stages_1_2", "change", "odd", "jitter")
MOST_S = 2400.0
PROGRAM, BLOCKS = Path(__file__).resolve().parent / "unequal_job" / "program.py", 3
UNIT_S = 0.05  # of a sample through a block on the fastest rank
WARM, MEASURED, CHANGE_AT = 10, 8, 12  # steps
JITTER, JITTER_MIN = 0.1, 10.0
POSSIBLE = 0.9
SPEEDS = {  # of each rank, and the global batch
    "1_1_2": ((0.5, 0.5, 1.0), 32),
    "1_2_3_4": ((0.25, 0.5, 0.75, 1.0), 40),
    "1_1_1_025": ((1.0, 1.0, 1.0, 0.25), 78),
    "stages_1_2": ((0.5, 1.0), 48),
}


def job(n: int, batch: int, drill: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    pool = {"name": "owned", "gpus_per_node": 1, "min_nodes": n, "max_nodes": n}
    return {
        "name": "unequal", "program": str(PROGRAM), "steps": 100_000, "global_batch": batch, "seed": 1,
        "layout": {n: f"dp_shard={n}"}, "min_workers": n, "peer_every": 0, "durable_every": 0, "check_numbers_every": 0,
        "pools": [pool], "drill": list(drill), **more,
    }  # fmt: skip


def slow(rank: int, speed: float, at_step: int = 1, **more: Any) -> dict[str, Any]:
    return {"at_step": at_step, "slow": f"rank:{rank}", "factor": 1 / speed, "unit_s": UNIT_S, **more}


def ideal_s(batch: int, speeds: Sequence[float]) -> float:
    """Of a step, where every rank works all the time."""
    return batch * BLOCKS * UNIT_S / sum(speeds)


def events(lines: Sequence[Line], kind: type) -> Iterator[Any]:
    return (event for line in lines for _, event in line.events if isinstance(event, kind))


def plans(lines: Sequence[Line]) -> list[Plan]:
    return [a.plan for line in lines if line.decision for a in line.decision.actions if isinstance(a, EnterPlan)]


def step_s(lines: Sequence[Line]) -> float:
    """Median of the newest MEASURED steps."""
    return median([done.step_time_s for done in events(lines, StepDone)][-MEASURED:])


def moved(lines: Sequence[Line]) -> int:
    """Steps after the last change of shares or of the generation, from the first step on that trains with it."""
    steps = [(done.generation, done.step) for done in events(lines, StepDone)]
    since = max([0, *(set_.from_step for set_ in events(lines, SharesSet) if set_.generation == steps[-1][0])])
    return sum(generation == steps[-1][0] and step > since for generation, step in steps)


def settled(trial: Trial, least: int) -> list[Line]:
    """Waits until nothing was moved for so many steps after the warm-up."""
    trial.until(lambda: len(trial.steps) >= WARM and moved(trial.lines()) >= least, f"{least} steps in a row without a move")
    return trial.lines()


def run(clock: Clock, what: dict[str, Any], least: int) -> list[Line]:
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), what, clock)
        trial.start()
        try:
            return settled(trial, least)
        finally:
            trial.end()


# ------------------------------------------------------------------------------------------------ the best static split


def splits(total: int, n: int) -> Iterator[tuple[int, ...]]:
    """All ways to deal `total` out in `n` parts of at least one."""
    for cuts in combinations(range(1, total), n - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def busy_s(samples: Sequence[int], speeds: Sequence[float]) -> float:
    """Of a step of a plainly sharded layout."""
    return max(n * BLOCKS * UNIT_S / speed for n, speed in zip(samples, speeds, strict=True))


def piped_s(layers: Sequence[int], batch: int, speeds: Sequence[float]) -> float:
    """Of a step of a pipeline with one sample per microbatch."""
    each = [n * UNIT_S / speed for n, speed in zip(layers, speeds, strict=True)]
    return (batch - 1) * max(each) + sum(each)


# ------------------------------------------------------------------------------------------------ parts


def shared(clock: Clock, speeds: Sequence[float], batch: int) -> dict[str, Any]:
    drill = [slow(rank, speed) for rank, speed in enumerate(speeds)]
    n, ideal = len(speeds), ideal_s(batch, speeds)
    lines = run(clock, job(n, batch, drill), WARM + MEASURED)
    equal = run(clock, job(n, batch, drill, rebalance=False), WARM + MEASURED)
    samples = ([set_.samples for set_ in events(lines, SharesSet)] or [plans(lines)[-1].samples])[-1]
    best = min(splits(batch, n), key=lambda split: busy_s(split, speeds))
    return {
        "of_sum": round(ideal / step_s(lines), 3), "equal_of_sum": round(ideal / step_s(equal), 3), "samples": samples,
        "best_static": best, "over_best_static": round(busy_s(samples, speeds) / busy_s(best, speeds) - 1, 3),
        "step_s": round(step_s(lines), 4), "moves": len(list(events(lines, SharesSet))), "generations": len(plans(lines)),
    }  # fmt: skip


def staged(clock: Clock, speeds: Sequence[float], batch: int) -> dict[str, Any]:
    drill = [slow(rank, speed) for rank, speed in enumerate(speeds)]
    layout = {2: "pp=2,microbatch_size=1"}
    lines = run(clock, job(2, batch, drill, layout=layout), 2 * MEASURED)
    equal = run(clock, job(2, batch, drill, layout=layout, rebalance=False), 2 * MEASURED)
    ideal, newest = ideal_s(batch, speeds), plans(lines)[-1]
    by_node = dict(zip(plans(lines)[0].nodes, speeds, strict=True))
    now = [by_node[node] for node in newest.nodes]
    best = min(splits(BLOCKS, 2), key=lambda split: piped_s(split, batch, now))
    return {
        "of_sum": round(ideal / step_s(lines), 3), "equal_of_sum": round(ideal / step_s(equal), 3), "layers": newest.layers,
        "best_static": best, "over_best_static": round(piped_s(newest.layers, batch, now) / piped_s(best, batch, now) - 1, 3),
        "best_static_of_sum": round(ideal / piped_s(best, batch, now), 3), "step_s": round(step_s(lines), 4),
        "generations": len(plans(lines)),
    }  # fmt: skip


def changed(clock: Clock) -> dict[str, Any]:
    """One of four equal ranks becomes twice as slow."""
    batch, factors = 56, (1.0, 0.5, 1.0, 1.0)  # 16, 8, 16 and 16 samples fit these
    drill = [slow(rank, 1.0) for rank in range(4)] + [slow(1, 0.5, at_step=CHANGE_AT)]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), job(4, batch, drill), clock)
        trial.start()
        try:
            trial.until(lambda: bool(trial.steps) and any(True for _ in events(trial.lines(), SharesSet)), "other shares")
            lines = settled(trial, MEASURED)
        finally:
            trial.end()
    began_s = [at_s for line in lines for at_s, event in line.events if isinstance(event, DrillAsked)][-1]
    ordered = [line for line in lines if line.decision and any(isinstance(a, SetShares) for a in line.decision.actions)]
    possible_s = ideal_s(batch, factors) / POSSIBLE
    done = [(at_s, event) for line in lines for at_s, event in line.events if isinstance(event, StepDone)]
    after = [(at_s, event) for at_s, event in done if at_s > began_s]
    back_s = next((at_s for at_s, event in after if event.step_time_s <= possible_s and at_s > ordered[0].at_s), None)
    if back_s is None or ordered[0].at_s < began_s:
        raise Failed(f"change: moved before it was slow, or never back: {[round(e.step_time_s, 3) for _, e in done]}")
    slow_s = max(event.step_time_s for _, event in after)
    return {
        "found_s": round(ordered[0].at_s - began_s, 2), "back_s": round(back_s - began_s, 2), "slow_step_s": round(slow_s, 3),
        "found_steps": sum(at_s <= ordered[0].at_s for at_s, _ in after),
        "of_possible": round(ideal_s(batch, factors) / step_s(lines), 3),
        "moves": len(ordered), "why": ordered[0].decision.reason if ordered[0].decision else "",
    }  # fmt: skip


def jittering(clock: Clock) -> dict[str, Any]:
    drill = [slow(rank, 1.0, jitter=JITTER) for rank in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), job(4, 16, drill), clock)
        trial.start()
        try:
            trial.until(lambda: bool(trial.steps), "the first step")
            until_s = trial.steps[0][2] + 60 * JITTER_MIN
            trial.until(lambda: trial.steps[-1][2] >= until_s, f"{JITTER_MIN:.0f} minutes of jitter")
            lines = trial.lines()
        finally:
            trial.end()
    minutes = (trial.steps[-1][2] - trial.steps[0][2]) / 60
    moves = len(list(events(lines, SharesSet))) + len(plans(lines)) - 1
    return {"minutes": round(minutes, 1), "steps": len(trial.steps), "moves": moves}


def odd(clock: Clock) -> dict[str, Any]:
    """Five and seven equal ranks under `auto`, next to four: all used, with the same losses."""
    found: dict[str, Any] = {}
    for n, batch in ((5, 40), (7, 84)):
        lines = {k: run(clock, job(k, batch, [slow(r, 1.0) for r in range(k)], layout="auto"), WARM + MEASURED) for k in (n, 4)}
        losses = {k: {done.step: done.train_loss for done in events(found_, StepDone)} for k, found_ in lines.items()}
        common = sorted(losses[n].keys() & losses[4].keys())
        newest = plans(lines[n])[-1]
        found[str(n)] = {
            "layout": str(newest.layout), "samples": newest.samples, "used": len(newest.ranks),
            "throughput_over_four": round(step_s(lines[4]) / step_s(lines[n]), 3),
            "of_sum": round(ideal_s(batch, [1.0] * n) / step_s(lines[n]), 3),
            "steps_compared": len(common), "loss_differs_by": max(abs(losses[n][s] - losses[4][s]) for s in common),
        }  # fmt: skip
    return found


def measure(parts: Sequence[str], clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        if part == "stages_1_2":
            found[part] = staged(clock, *SPEEDS[part])
        elif part in SPEEDS:
            found[part] = shared(clock, *SPEEDS[part])
        else:
            found[part] = {"change": changed, "jitter": jittering, "odd": odd}[part](clock)
    return {**found, **summary(found)}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """What is compared with the baselines."""
    out: dict[str, float] = {}
    split = [found[name] for name in SPEEDS if name in found]
    if split:
        out["least_of_sum"] = min(part["of_sum"] for part in split)
        out["most_over_best"] = max(part["over_best_static"] for part in split)
    if "change" in found:
        out |= {key: found["change"][key] for key in ("found_s", "back_s")}
    return out | ({"jitter_moves": found["jitter"]["moves"]} if "jitter" in found else {})


def main() -> int:
    given = options(__doc__, MOST_S, parts=PARTS)
    return finish("unequal", given, lambda clock: measure(given.parts, clock))


if __name__ == "__main__":
    sys.exit(main())
