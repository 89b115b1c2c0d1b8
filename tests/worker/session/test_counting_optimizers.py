"""Optimizers that count in their groups, on the object or under a text of their state: the counts
go where the state goes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.places import PROGRAMS
from support.reference import train_alone
from support.worker.chain import job_of, pass_through
from support.worker.plans import live, plan
from support.worker.recovery import loss_curve_agrees, recover, start
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Layout, Resume, ShardStored, StepDone
from elastic.worker.checkpoint import checkpoint_writer

pytestmark = pytest.mark.slow
CHAIN = [Layout(dp_shard=3), Layout(pp=4), Layout(pp=2, tp=2), Layout(dp_replicate=2, dp_shard=2)]


def follows_the_chain(pool: Pool, folder: Path, program: str, steps: int) -> list[float]:
    """The losses of one process, which are those of the chain."""
    job = job_of(program, steps)
    done = pass_through(pool, job, folder, CHAIN, every=3)
    alone = train_alone(load_program(job["program"]), job, job["steps"])
    assert {e.generation for e in done} == {1, 2, 3, 4}
    assert [e.train_loss for e in done] == pytest.approx(alone, abs=1e-4)
    return alone


@pytest.mark.e2e
def test_counts_follow_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    alone = follows_the_chain(pool, tmp_path, "tiny_counting_steps.py", 4 * len(CHAIN))
    assert alone[-1] < alone[0] - 0.5


@pytest.mark.e2e
def test_weights_that_are_kept_follow_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    follows_the_chain(pool, tmp_path, "tiny_lookahead.py", 5 * len(CHAIN))


@pytest.mark.e2e
def test_a_loss_takes_the_counts_back(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_counting_steps.py", 14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    try:
        pool.kill(workers[3])
        second = recover(pool, first, Layout(pp=2), workers[:2], workers[:3])
        pool.wait(lambda: any(e.step >= 9 for e in pool.events(StepDone, 2)), "step 9")
        pool.enter(plan(3, Layout(dp_shard=3), workers[:3], 12, resume=live(second)))
        pool.quiesced(3, 3)
    finally:
        pool.revive()
    loss_curve_agrees(pool, job, resumed=second.resume.step)


@pytest.mark.e2e
def test_a_script_s_counts_go_through_a_loss_and_a_resume(pool: Pool, tmp_path: Path) -> None:
    """By peer replicas into the scripts that are left, and from storage into new ones."""
    job = job_of("tiny_counting_steps.py", 14) | {
        "script": str(PROGRAMS / "loop_counting_steps.py"), "args": [], "clip_grad_norm": None,
    }  # fmt: skip
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=3))
    try:
        pool.kill(workers[2])
        second = recover(pool, first, Layout(dp_shard=2), workers[:2], workers[:2], durable_every=2)

        def stored() -> int:
            """The first step that both have stored; how far the first three came is chance."""
            found = Counter(e.step for e in pool.events(ShardStored, 2))
            return min((step for step, n in found.items() if n == 2), default=0)

        pool.wait(lambda: stored() > 0, "a checkpoint")
    finally:
        pool.revive()
    losses = {e.step: e.train_loss for e in pool.events(StepDone)}
    storage = open_storage(str(tmp_path))
    step = stored()
    uri = checkpoint_writer.commit(storage, step, 2, world_size=2, epoch=1, meta={})
    workers = pool.open(job, tmp_path)  # forgets all that was held
    pool.enter(plan(3, Layout(dp_shard=3), workers, 12, resume=Resume("durable", step, uri=uri)))
    pool.quiesced(3, 3)
    losses |= {e.step: e.train_loss for e in pool.events(StepDone, 3)}
    alone = train_alone(load_program(job["program"]), job, job["steps"])
    assert set(range(1, 15)) - losses.keys() <= {second.resume.step}
    assert max(abs(loss - alone[step - 1]) for step, loss in losses.items()) < 1e-4
