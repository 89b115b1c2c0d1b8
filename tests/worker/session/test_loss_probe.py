"""Promise 12 at transitions: the loss of one sample is the same in the layout before and the one
after, or no step is made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from support.reference import build, collate, count_tokens, output_of, train_alone
from support.worker.chain import job_of
from support.worker.plans import from_copies, live, plan
from support.worker.worker_pool import Pool

from elastic.policy.copies.recovery import covered
from elastic.program import load_program
from elastic.types import (
    Layout,
    Plan,
    PlanEntered,
    Probed,
    Quiesced,
    Resume,
    StepDone,
    WorkerFailed,
    agree,
)
from elastic.types.orders import InjectFault
from elastic.worker.session.loss_probe import LayoutDiffers, Probe

pytestmark = pytest.mark.slow
SHARDS, PAIR = Layout(dp_shard=4), Layout(dp_shard=2)
OTHERS = [Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2), Layout(tp=2), Layout(dp_shard=3)]


def begun(pool: Pool, job: dict, run: Path, layout: Layout = SHARDS) -> Plan:
    workers = pool.open(job, run, n=layout.world_size)
    first = plan(1, layout, workers, job["global_batch"])
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 2 for e in pool.events(StepDone)), "step 2")
    return first


def probed(pool: Pool, generation: int) -> list[Probed]:
    return pool.events(Probed, generation)


def test_the_first_probe_is_the_loss_of_one_process(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=3)
    begun(pool, job, tmp_path, PAIR)
    pool.quiesced(1, 2)
    program = load_program(job["program"])
    model, batch = build(program, job["seed"]).eval(), collate(program.dataset(), [0])
    with torch.no_grad():
        alone = float(program.loss(output_of(program, model, batch), batch)) / count_tokens(
            program, batch
        )
    (entry,) = probed(pool, 1)
    assert (entry.step, entry.expected) == (0, None)
    assert entry.loss == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_each_side_of_a_transition_says_the_same(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    job = job_of("tiny.py", steps=9)
    first = begun(pool, job, tmp_path)
    second = plan(2, layout, list(first.ranks), 12, resume=live(first))
    began_s = time.monotonic()
    pool.enter(second)
    pool.entered(2)
    pool.wait(lambda: any(e.step == 9 for e in pool.events(StepDone)), "the last step")
    boundary, entry = probed(pool, 1)[-1], probed(pool, 2)[0]
    assert boundary.step == entry.step > 0 and boundary.expected is None
    assert entry.expected == boundary.loss
    assert agree(entry.loss, boundary.loss, 1e-5)
    assert len({e.step for e in pool.events(StepDone)}) == 9
    assert 0 < entry.seconds < time.monotonic() - began_s


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", OTHERS[:3], ids=str)
def test_a_layout_that_computes_something_else_makes_no_step(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    """Every rank says so, those that leave too; the old boxes are still there, and a layout that is
    right resumes from them."""
    job = job_of("tiny.py", steps=10)
    first = begun(pool, job, tmp_path)
    for worker in first.ranks:
        pool.order(worker, InjectFault("layout"))
    wrong = plan(2, layout, list(first.ranks), 12, resume=live(first))
    pool.enter(wrong)
    pool.wait(lambda: len({e.worker for e in pool.events(Quiesced, 2)}) == 4, "all have left", 60.0)
    failed = pool.events(WorkerFailed)
    assert {(e.kind, e.generation) for e in failed} == {("layout", 2)} and {
        e.worker for e in failed
    } == set(first.ranks)
    step = probed(pool, 1)[-1].step
    assert {e.step for e in failed} == {step} and len({e.error for e in failed}) == 1
    assert (
        f"layout {layout} computes another function than the one before: after step {step}"
        in failed[0].error
    )
    assert not pool.events(PlanEntered, 2) and not pool.events(StepDone, 2)
    held = [
        h
        for e in pool.events(Quiesced, 2)
        for h in e.holdings
        if h.generation == 1 and h.step == step
    ]
    assert covered(first, held)

    right = plan(
        3, Layout(dp_shard=3), list(first.ranks), 12, resume=from_copies(first, step, tuple(held))
    )
    pool.enter(right)
    pool.entered(3)
    pool.wait(lambda: any(e.step == 10 for e in pool.events(StepDone)), "the last step")
    assert probed(pool, 3)[0].expected == probed(pool, 1)[-1].loss
    alone = train_alone(load_program(job["program"]), job, 10)
    losses = {e.step: e.train_loss for e in pool.events(StepDone)}
    assert max(abs(losses[step] - loss) for step, loss in enumerate(alone, 1)) < 1e-4


def test_what_the_driver_knows_counts_where_no_worker_does(pool: Pool, tmp_path: Path) -> None:
    """As after a start from storage: here with a number that is wrong."""
    job = job_of("tiny.py", steps=3)
    first = begun(pool, job, tmp_path, PAIR)
    pool.quiesced(1, 2)
    workers = pool.open(job, tmp_path, n=2)
    second = plan(2, Layout(tp=2), workers, 12, resume=Resume("fresh"), probe=1.0)
    pool.enter(second)
    pool.entered(2)  # a fresh state has no past
    pool.quiesced(2, 2)
    assert not pool.events(WorkerFailed) and probed(pool, 2)[0].expected is None
    assert first.layout != second.layout


def _forget_steps() -> None:
    """The boundary's loss is taken from an older step."""
    plain = Probe._remember

    def remember(self: Probe, step: int, loss: float) -> None:
        plain(self, step, self.place.probes.get(0, (0, loss))[1])

    Probe.plain_remember = plain  # type: ignore[attr-defined]
    Probe._remember = remember  # type: ignore[method-assign]


def _forget_no_more() -> None:
    Probe._remember = Probe.plain_remember  # type: ignore[method-assign, attr-defined]


def test_a_loss_of_another_step_is_found(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=10)
    workers = pool.open(job, tmp_path, n=3)
    for worker in workers:
        pool.patch(worker, _forget_steps)
    first = plan(1, PAIR, workers, 12)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 2 for e in pool.events(StepDone)), "step 2")
    pool.enter(plan(2, Layout(dp_shard=3), workers, 12, resume=live(first)))
    pool.wait(lambda: len({e.worker for e in pool.events(Quiesced, 2)}) == 3, "all have left")
    for worker in workers:
        pool.patch(worker, _forget_no_more)
    assert {e.kind for e in pool.events(WorkerFailed)} == {"layout"} and not pool.events(
        StepDone, 2
    )


def test_the_error_can_be_sent() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(LayoutDiffers("other", 7)))
    assert (str(error), error.step) == ("other", 7)
