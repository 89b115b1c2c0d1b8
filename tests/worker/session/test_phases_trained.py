"""Phases of real workers, decided by the policy, against a plain loop that changes length and batch
at the same steps: losses, tokens, samples and the state at the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.worker.faults import Fault
from support.worker.faulty_pool import FaultyPool
from support.worker.phased import PhasedDriver, phased_job

from elastic.types import Layout, Plan

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
STEPS, BEGIN = 12, (4, 8)
FIRST = Layout(dp_shard=4)
LAYOUTS = [
    Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(dp_replicate=2, tp=2), Layout(pp=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2),
]  # fmt: skip
At = dict[int, Callable[[PhasedDriver], None]]


@pytest.fixture(scope="module")
def pool() -> Iterator[FaultyPool]:
    pool = FaultyPool(4)
    yield pool
    pool.close()


def notice(worker: int) -> Callable[[PhasedDriver], None]:
    return lambda driver: driver.notice(worker)


def around(boundary: int) -> dict[str, tuple[At, dict[int, Fault]]]:
    """Faults about a boundary: what happens once so many steps are done, and which worker breaks
    where."""
    last, first = boundary - 1, boundary
    return {
        "killed in the last step": ({}, {1: Fault("before", last, "commit")}),
        "killed behind its commit": ({}, {0: Fault("after", last, "commit")}),
        "killed in the first step": ({}, {2: Fault("before", first, "commit")}),
        "noticed in the last step": ({last: notice(3)}, {}),
        "noticed at the boundary": ({boundary: notice(0)}, {}),
        "noticed before": ({last - 1: notice(1)}, {}),
    }


CASES = [
    (boundary, name, layout)
    for i, boundary in enumerate(BEGIN)
    for k, name in enumerate(around(boundary))
    for layout in [LAYOUTS[(i + k) % len(LAYOUTS)]]
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("boundary", "name", "layout"), CASES, ids=str)
def test_a_fault_about_a_boundary(
    pool: FaultyPool, tmp_path: Path, boundary: int, name: str, layout: Layout
) -> None:
    at, faults = around(boundary)[name]
    second = LAYOUTS[(LAYOUTS.index(layout) + 2) % len(LAYOUTS)]
    layouts = [None, {"4": str(layout)}, {"4": str(second), "3": "dp_shard=3"}]
    driver = begun(pool, tmp_path, at=at, faults=faults, layouts=layouts)
    driver.run()
    driver.check()
    changes = [plan for plan in driver.plans if plan.cause == "phase"]
    assert {plan.phase for plan in changes} == {1, 2}
    assert all(plan.resume.source == "live" for plan in changes)


def begun(
    pool: FaultyPool, run: Path, *, at: At, faults: dict[int, Fault],
    layouts: list[dict[str, str] | None], begin: tuple[int, ...] = BEGIN, steps: int = STEPS,
) -> PhasedDriver:  # fmt: skip
    job = phased_job(run, begin, steps, layouts=[layout or "auto" for layout in layouts])
    driver = PhasedDriver(pool, job, run, FIRST, at)
    for worker, fault in faults.items():
        pool.arm(driver.workers[worker], fault)
    return driver


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(6))
def test_a_random_chain_with_two_faults(pool: FaultyPool, tmp_path: Path, seed: int) -> None:
    """Phases of random layouts, a kill about one boundary and a notice about the other."""
    chance = random.Random(seed)
    layouts = [{"4": str(chance.choice(LAYOUTS)), "2": "tp=2"} for _ in range(3)]
    kinds = [chance.choice(list(around(boundary).values())) for boundary in (6, 12)]
    at = {step: hook for hooks, _ in kinds for step, hook in hooks.items()}
    faults = {worker: fault for _, armed in kinds for worker, fault in armed.items()}
    driver = begun(pool, tmp_path, at=at, faults=faults, layouts=layouts, begin=(6, 12), steps=18)
    driver.run()
    driver.check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("left_at", [6, 4, 9])
def test_a_run_that_is_resumed_in_a_phase(pool: FaultyPool, tmp_path: Path, left_at: int) -> None:
    """Everybody is gone once a checkpoint of that step is stored; other workers go on from it."""
    job = phased_job(tmp_path, BEGIN, STEPS)
    first = PhasedDriver(pool, job, tmp_path, FIRST, copy_every=left_at)
    first.run_to_copy()
    second = first.again()
    second.run()
    second.check()
    plans: list[Plan] = second.plans
    assert (plans[0].resume.source, plans[0].resume.step) == ("durable", left_at)
    assert plans[0].phase == sum(left_at >= step for step in BEGIN)


def test_a_node_that_joins_comes_with_the_phase_or_after_it(
    pool: FaultyPool, tmp_path: Path
) -> None:
    at: At = {3: lambda driver: driver.joins()}
    job = phased_job(tmp_path, BEGIN, STEPS)
    driver = PhasedDriver(pool, job, tmp_path, Layout(dp_shard=3), at, spare=True)
    driver.run()
    driver.check()
    assert any(plan.layout.world_size == 4 for plan in driver.plans)
