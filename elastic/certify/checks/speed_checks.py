"""Step time beside a bare script: the same model, batch and ranks in a plain torch loop, before and
after ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median

from elastic.certify.checks.fault_checks import MANY, leave
from elastic.certify.checks.move_checks import LARGE_BLOCKS
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import job_of, plan_of
from elastic.certify.harness.place import Place
from elastic.certify.reference import bare_runs
from elastic.certify.tasks import Task
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Limit
from elastic.scenarios.one_process import program_file
from elastic.types import Layout

STEPS, WARM = 10, 2
RATIO = Bound(
    "step_time_ratio",
    "tests/bench/baselines.json: 1.05 on a quiet machine, times 1.5 for one that is not",
    most=1.58,
)


def task(lab: Lab) -> Task:
    return Task(
        ("step time",), partial(_work, lab), least_s=25.0, weight=1.5, where=lab.place.where
    )


def alone_on_gpu(place: Place) -> Place:
    """Ranks that share one GPU would measure how they share it: one rank then."""
    return replace(place, ranks=1) if place.shared else place


def _work(lab: Lab, limit: Limit) -> Iterator[Check]:
    place = alone_on_gpu(lab.place)
    lab.make_room()
    before = bare_runs.train(place, STEPS, limit)
    with lab.worker_pool(limit) as worker_pool:
        worker_pool.open(job_of("steps", program_file("large"), MANY), lab.run_folder())
        plan = plan_of(1, Layout(dp_shard=place.ranks), worker_pool.workers, n_blocks=LARGE_BLOCKS)
        worker_pool.enter(plan)
        steps = worker_pool.stepped(plan, STEPS)
        leave(worker_pool, plan)
    lab.drop()  # its processes take no time from the second bare run
    after = bare_runs.train(place, STEPS, limit)
    ours = median(step.step_time_s for step in steps[WARM:STEPS])
    bare = [median(times[WARM:]) for times in (before, after)]
    figures = {
        "step_time_ratio": ours / (sum(bare) / 2), "step_s": ours, "bare_s": sum(bare) / 2,
        "bare_drift": max(bare) / min(bare), "ranks": place.ranks,
    }  # fmt: skip
    yield judge("step time", figures, [RATIO])
