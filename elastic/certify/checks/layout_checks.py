"""Every layout that fits: a few steps each in one set of warm processes, with the losses of one
process; group creation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import N_BLOCKS, all_layouts, job_of, plan_of
from elastic.certify.harness.worker_pool import WorkerPool
from elastic.certify.tasks import Task
from elastic.scenarios.check import Bound, Check, failed, judge, not_run
from elastic.scenarios.limit import Failed, Limit, OutOfTime
from elastic.scenarios.one_process import losses, program_file, worst_difference
from elastic.types import Layout, PlanEntered, StepDone

STEPS = 4
LOSS = Bound(
    "worst_loss_difference",
    "tests/worker/session/test_chain.py holds 1e-4 (absolute, float32) over 30 steps: sums in "
    "another order",
    most=1e-4,
)
LATE_STORE_S, MESH_64_S, TIMES = 0.7, 10.5, 3.0


def groups_bound(n: int) -> Bound:
    """DESIGN, section 6: 0.7 s where ranks connect before the store listens; a full gloo mesh of 64
    ranks took 10.5 s, and grows with the square of the ranks."""
    most_s = TIMES * (LATE_STORE_S + MESH_64_S * (n / 64) ** 2)
    return Bound(
        "median_s",
        f"{TIMES:g} x what was seen on gloo: 0.7 s for a late store, 10.5 s x (ranks / 64)^2 "
        "for the mesh",
        most_s,
    )


def name_of(layout: Layout) -> str:
    return f"layout {layout}"


def task(lab: Lab) -> Task:
    found = all_layouts(lab.place.ranks)
    return Task(
        (*map(name_of, found), "groups"),
        partial(_work, lab, found),
        least_s=12.0,
        weight=3.0,
        where=lab.place.where,
    )


def _work(lab: Lab, found: list[Layout], limit: Limit) -> Iterator[Check]:
    job = job_of("layouts", program_file("small"), STEPS)
    alone = losses("small", job, STEPS, limit=limit)
    groups_s: list[float] = []
    try:
        left = list(found)
        # a layout that fails takes its processes with it; the others continue in new ones
        while left:
            try:
                with lab.worker_pool(limit) as worker_pool:
                    worker_pool.open(job, lab.run_folder())
                    for number in range(1, len(left) + 1):
                        check, took_s = _one(worker_pool, number, left[0], alone=alone)
                        left.pop(0)
                        groups_s.append(took_s)
                        yield check
            except Failed as error:
                yield failed(name_of(left.pop(0)), error)
    except OutOfTime:
        if groups_s:
            yield _groups(groups_s, lab.place.ranks)
        raise
    yield (
        _groups(groups_s, lab.place.ranks)
        if groups_s
        else not_run("groups", "no layout was entered")
    )


def _one(
    worker_pool: WorkerPool, number: int, layout: Layout, *, alone: list[float]
) -> tuple[Check, float]:
    """A fresh generation of its own."""
    plan = plan_of(number, layout, worker_pool.workers, n_blocks=N_BLOCKS)
    worker_pool.enter(plan)
    worker_pool.left(plan, plan.ranks)
    steps = worker_pool.events(StepDone, number)
    if [step.step for step in steps] != list(range(1, STEPS + 1)):
        raise Failed(f"{layout}: steps {[step.step for step in steps]} were done, not 1 to {STEPS}")
    entered = worker_pool.events(PlanEntered, number)[0]
    figures = {
        "worst_loss_difference": worst_difference({s.step: s.train_loss for s in steps}, alone),
        "step_s": min(step.step_time_s for step in steps), "groups_s": entered.phases_s["groups"],
    }  # fmt: skip
    return judge(name_of(layout), figures, [LOSS]), entered.phases_s["groups"]


def _groups(groups_s: list[float], n: int) -> Check:
    figures = {"median_s": median(groups_s), "most_s": max(groups_s), "generations": len(groups_s)}
    return judge("groups", figures, [groups_bound(n)])
