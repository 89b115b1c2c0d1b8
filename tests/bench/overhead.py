"""What a run costs under elastic when nothing happens, next to a bare script with the same model, layout and batch.

Two nodes of one worker each (dp_shard=2) on the embedded cluster with the default cadences; before, between and after such runs
bare.py in two processes. Wall seconds (median) and CPU seconds (mean) per step over the same stretch of steps. CPU
seconds are those of all processes: driver, Ray's head and nodes, workers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figures
from bare_trial import run_bare
from figures import Window
from report import finish, options
from trial import Clock, Failed, Trial

MOST_S, ANOTHER_RUN = 300.0, 0.5  # another run is begun only in the first so much of the time
FIRST, LAST, STEPS = 15, 65, 75  # measured from the end of one step to that of another
BATCH = 8
JOB = {
    "name": "overhead", "steps": STEPS, "global_batch": BATCH, "seed": 1, "clip_grad_norm": 1.0, "eval_samples": 12,
    "layout": "dp_shard=2", "min_workers": 2, "durable_every": 0,
    "pools": [{"name": "owned", "market_type": "owned", "max_nodes": 2}],
}  # fmt: skip


def under_elastic(clock: Clock) -> Window:
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        trial = Trial(Path(folder), JOB, clock)
        kept: dict[int, tuple[str, float]] = {}
        cpu: list[tuple[float, dict[str, float]]] = []

        def done() -> bool:
            cpu.append((time.time(), trial.trees[-1].cpu_s(kept)))
            return bool(trial.steps) and trial.steps[-1][1] >= LAST

        try:
            trial.start()
            trial.until(done, f"step {LAST}")
        finally:
            left = trial.end()
    if left:
        raise Failed(f"{len(left)} processes did not end by themselves: {left}")
    generations = {generation for generation, _, _ in trial.steps}
    if len(generations) > 1:
        raise Failed(f"something happened: generations {sorted(generations)}")
    return figures.window([(step, at_s) for _, step, at_s in trial.steps], cpu, FIRST, LAST)


def under_bare(clock: Clock) -> Window:
    return run_bare([2], LAST + 1, BATCH, clock).window(FIRST, LAST)


def measure(clock: Clock, repeats: int) -> dict[str, Any]:
    runs: list[Window] = []
    bares = [under_bare(clock)]
    while len(runs) < repeats and (not runs or clock.spent < ANOTHER_RUN):
        runs.append(under_elastic(clock))
        bares.append(under_bare(clock))
    return {**figures.overhead(runs, bares), "processes_left": 0}


if __name__ == "__main__":
    given = options(__doc__, MOST_S)
    sys.exit(finish("overhead", given, lambda clock: measure(clock, given.repeats)))
