"""Promise 4: whatever collective of a step breaks, the survivors agree on a whole step and resume
from it.

A worker dies by SIGKILL at each collective of a step in turn; the policy itself decides what the
survivors do; the state of the run's end is compared with a plain trainer's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import job_of
from support.worker.faults import Fault
from support.worker.faulty_pool import FaultyPool
from support.worker.policy_driver import (
    AT,
    LAYOUTS,
    PEER_EVERY,
    PIPELINE,
    REPLICAS,
    SHARDS,
    STEPS,
    TENSOR,
    Driver,
)

from elastic.config.optimization import Guards, NotFinite
from elastic.data.order import sample_ids
from elastic.types import (
    CopyStored,
    EnterPlan,
    GuardTripped,
    Layout,
    Plan,
    Quiesced,
    RollForward,
    StepDone,
    WorkerFailed,
)
from elastic.worker.program.commit import Commit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[FaultyPool]:
    pool = FaultyPool(4)
    yield pool
    pool.close()


def broken(
    pool: FaultyPool,
    run: Path,
    layout: Layout,
    faults: dict[int, Fault],
    peer_every: int = PEER_EVERY,
) -> tuple[Driver, Plan]:
    """A run whose fifth step breaks by `faults` (rank -> fault), finished by the policy; and the
    plan that it continued with."""
    driver = Driver(pool, job_of("tiny.py", STEPS), run, layout, peer_every)
    for rank, fault in faults.items():
        pool.arm(driver.workers[rank], fault)
    driver.run()
    consistent(driver)
    driver.check_end()
    (entered,) = [order.plan for order in driver.orders(EnterPlan)]
    return driver, entered


def consistent(driver: Driver) -> None:
    """The survivors' live steps differ by one commit at most, and who is behind has the gradients
    of what the others have."""
    left = [q for q in driver.told(Quiesced) if q.generation == 1]
    first = {q.worker: q for q in reversed(left) if any(h.kind == "live" for h in q.holdings)}
    steps = {q.worker: next(h.step for h in q.holdings if h.kind == "live") for q in first.values()}
    assert (
        set(steps.values()) <= {AT, AT + 1, AT + 2}
        and max(steps.values()) - min(steps.values()) <= 1
    ), steps
    for worker, step in steps.items():
        if step < max(steps.values()):
            assert first[worker].pending_step == step + 1, "it must be able to catch up"
            assert any(q.commit for other, q in first.items() if steps[other] == step + 1)


def collectives(pool: FaultyPool, run: Path, layout: Layout, rank: int) -> list[str]:
    """Names of a step's collectives on that rank."""
    driver = Driver(pool, job_of("tiny.py", AT + 2), run / "list", layout, PEER_EVERY)
    path = run / f"names-{rank}.json"
    pool.arm(driver.workers[rank], Fault("list", AT, -1, path=str(path)))
    driver.run()
    return list(json.loads(path.read_text()))


# -------------------------------------------------------------------------------- the commit itself


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.whole)])
def test_replicas_roll_forward_to_the_step_that_somebody_has(
    pool: FaultyPool, tmp_path: Path, victim: int
) -> None:
    """The victim dies with its commit done, two more never hear of it; the fourth has it: no step
    is lost."""
    deaf = [rank for rank in (1, 2, 3, 0) if rank != victim][:2]
    faults = {rank: Fault("deaf", AT, "commit") for rank in deaf} | {
        victim: Fault("after", AT, "commit")
    }
    driver, entered = broken(pool, tmp_path, REPLICAS, faults, peer_every=0)
    (order,) = driver.orders(RollForward)
    assert (order.generation, order.step) == (1, AT + 1) and Commit.of(order.commit).tokens > 0
    assert (entered.resume.source, entered.resume.step) == ("peer", AT + 1)
    assert len({h.worker for h in entered.resume.holdings}) == 3
    assert [e.step for e in driver.told(StepDone)] in (
        [*range(1, STEPS + 1)],
        [s for s in range(1, STEPS + 1) if s != AT + 1],
    )


@pytest.mark.whole  # policy/copies/test_forward.py decides it
def test_without_replicas_a_step_that_a_dead_rank_took_with_it_is_given_up(
    pool: FaultyPool, tmp_path: Path
) -> None:
    faults = {1: Fault("deaf", AT, "commit"), 0: Fault("after", AT, "commit")}
    driver, entered = broken(pool, tmp_path, SHARDS, faults)
    assert not driver.orders(RollForward)
    assert entered.resume.source == "peer" and entered.resume.step in (AT - 2, AT)


@pytest.mark.e2e
def test_nobody_is_gone_and_one_rank_missed_the_commit(pool: FaultyPool, tmp_path: Path) -> None:
    """Without replicas too: all gradients are there, so the step is made whole."""
    driver, entered = broken(pool, tmp_path, SHARDS, {1: Fault("deaf", AT, "commit")}, peer_every=0)
    assert [order.step for order in driver.orders(RollForward)] == [AT + 1]
    assert entered.resume.step == AT + 1 and len(entered.ranks) == 3
    assert {e.kind for e in driver.told(WorkerFailed)} == {"collective"}


@pytest.mark.whole  # policy/copies/test_forward.py decides it
def test_a_commit_that_nobody_has_rolls_nothing_forward(pool: FaultyPool, tmp_path: Path) -> None:
    driver, entered = broken(
        pool, tmp_path, REPLICAS, {2: Fault("before", AT, "commit")}, peer_every=0
    )
    assert not driver.orders(RollForward)
    assert entered.resume.step == AT and {h.kind for h in entered.resume.holdings} == {"live"}
    pending = {q.pending_step for q in driver.told(Quiesced) if q.generation == 1}
    assert pending == {AT + 1}


# ---------------------------------------------------------------------------- numbers that are none


@pytest.mark.parametrize(
    ("layout", "at"), [(PIPELINE, 3), pytest.param(SHARDS, 7, marks=pytest.mark.whole)], ids=str
)
def test_a_sample_without_a_number_rolls_back_once_and_is_named(
    pool: FaultyPool, tmp_path: Path, layout: Layout, at: int
) -> None:
    """`at`: where sample 77 stands among the twelve of the step after AT ones."""
    seed = next(seed for seed in range(100_000) if sample_ids(512, 12, seed, step=AT)[at] == 77)
    driver = Driver(
        pool, job_of("tiny_nan.py", STEPS) | {"seed": seed}, tmp_path, layout, PEER_EVERY
    )
    with pytest.raises(AssertionError, match="again, after one roll-back"):
        driver.run()
    (order,) = [order.plan for order in driver.orders(EnterPlan)]
    assert order.cause == "rollback" and order.resume.step < AT
    d = at // driver.first.samples[0]
    rank = d if layout.pp == 1 else layout.dp_shard + d  # the last stage knows the loss
    share = sample_ids(512, 12, seed, step=AT)[sum(driver.first.samples[:d]) :][
        : driver.first.samples[d]
    ]
    named = (
        f"the loss of rank {rank} on node{rank}/0 is not finite; its samples: "
        f"{', '.join(map(str, share))}"
    )
    assert (
        f"step {AT + 1}: train_loss nan, gradient norm nan: {named}" in driver.decisions[0].reason
    )
    assert f"step {AT + 1}: " in driver.state.outcome_reason and "77" in driver.state.outcome_reason
    assert "\n" not in driver.state.outcome_reason
    failed = {(e.kind, e.step) for e in driver.told(WorkerFailed)}
    assert failed == {("not_finite", AT + 1)}, "all ranks say the same"


@pytest.mark.e2e
def test_a_step_that_is_skipped_is_skipped_by_those_that_roll_forward_to_it(
    pool: FaultyPool, tmp_path: Path
) -> None:
    """Two ranks never hear of the commit of the step with the bad sample; the third has left that
    step out."""
    seed = next(seed for seed in range(100_000) if sample_ids(512, 12, seed, step=AT)[5] == 77)
    job = job_of("tiny_nan.py", STEPS) | {
        "seed": seed,
        "guards": Guards(not_finite=NotFinite(do="skip")).model_dump(),
    }
    driver = Driver(pool, job, tmp_path, SHARDS, 0)
    driver.skipped = (AT + 1,)
    for rank in (0, 2):
        pool.arm(driver.workers[rank], Fault("deaf", AT, "commit"))
    driver.run()
    (order,) = driver.orders(RollForward)
    assert order.step == AT + 1 and math.isnan(Commit.of(order.commit).loss_sum)
    assert not [e.step for e in driver.told(StepDone) if e.skipped and e.step != AT + 1]
    assert driver.state.rollbacks == 0 and driver.state.n_skipped == 1
    said = driver.told(GuardTripped)  # by every rank that lives; the first word counts
    assert {(e.step, e.do) for e in said} == {(AT + 1, "skip")} and all(
        77 in e.samples for e in said
    )
    driver.check_end()


@pytest.mark.e2e
def test_a_step_that_was_rolled_back_for_may_be_skipped_the_second_time(
    pool: FaultyPool, tmp_path: Path
) -> None:
    seed = next(seed for seed in range(100_000) if sample_ids(512, 12, seed, step=AT)[7] == 77)
    job = job_of("tiny_nan.py", STEPS) | {
        "seed": seed,
        "guards": Guards(not_finite=NotFinite(again="skip")).model_dump(),
    }
    driver = Driver(pool, job, tmp_path, TENSOR, PEER_EVERY)
    driver.skipped = (AT + 1,)
    driver.run()
    (order,) = [order.plan for order in driver.orders(EnterPlan)]
    assert (order.cause, order.rolled_back) == (
        "rollback",
        (("not_finite", AT + 1),),
    ) and order.resume.step < AT
    tripped = {(e.generation, e.do): e for e in driver.told(GuardTripped)}
    assert set(tripped) == {(1, "rollback"), (2, "skip")}
    last = tripped[2, "skip"]
    assert (last.rank, last.worker, last.step) == (2, order.ranks[2], AT + 1) and 77 in last.samples
    assert "again, after one roll-back: the step is skipped" in last.reason and "77" in last.reason
    assert driver.state.n_skipped == 1
    driver.check_end()


# --------------------------------------------------------------------------------- every collective

# layout, victim, how far into the step
SOME = [(PIPELINE, 0, 0.4), (SHARDS, 2, 0.2), (TENSOR, 3, 0.7)]


@pytest.mark.whole  # session/test_nccl_like_runs.py has a rank die within a step
@pytest.mark.parametrize(("layout", "victim", "share"), SOME, ids=str)
def test_a_kill_inside_a_step(
    pool: FaultyPool, tmp_path: Path, layout: Layout, victim: int, share: float
) -> None:
    names = collectives(pool, tmp_path, layout, victim)
    assert names.count("commit") == 1 and len(names) >= 10
    _, entered = broken(
        pool, tmp_path / "run", layout, {victim: Fault("before", AT, round(share * len(names)))}
    )
    assert 0 < entered.resume.step <= AT and entered.resume.source == "peer"


def test_a_kill_while_a_copy_is_on_its_way(pool: FaultyPool, tmp_path: Path) -> None:
    driver, entered = broken(pool, tmp_path, SHARDS, {1: Fault("after", AT - 1, "copy")})
    assert entered.resume.source == "peer" and entered.resume.step < AT + 1
    assert driver.told(CopyStored)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_kill_at_every_collective(
    pool: FaultyPool, tmp_path: Path, layout: Layout, kind: Any
) -> None:
    victim = layout.world_size - 1
    names = collectives(pool, tmp_path, layout, victim)
    for at, name in enumerate(names):
        for peer_every in (PEER_EVERY,) if layout is not REPLICAS else (0, PEER_EVERY):
            where = tmp_path / f"{at}-{peer_every}"
            _, entered = broken(pool, where, layout, {victim: Fault(kind, AT, at)}, peer_every)
            if layout is REPLICAS:
                least = AT if name != "commit" or kind == "before" else AT + 1
                assert entered.resume.step >= least, (
                    f"{kind} {name} ({at}): a replica had step {least}"
                )
            assert entered.resume.step >= AT - PEER_EVERY, f"{kind} {name} ({at})"


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_kill_in_the_middle_of_a_commit(pool: FaultyPool, tmp_path: Path, layout: Layout) -> None:
    """At a time of its own within the all-reduce: what each rank has heard by then is left to
    chance."""
    for k, delay_s in enumerate((0.0, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3)):
        fault = Fault("soon", AT, "commit", delay_s)
        _, entered = broken(pool, tmp_path / str(k), layout, {k % layout.world_size: fault})
        assert entered.resume.step >= AT - PEER_EVERY
