"""A script that enters elastic.loop, in warm processes: the losses of one process, whatever happens
to the workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.reference import train_alone
from support.worker.chain import job_of
from support.worker.loop_case import loop_job
from support.worker.plans import live, plan
from support.worker.recovery import loss_curve_agrees, recover, start
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Box, Layout, Quiesce, Resume, ShardStored, StepDone, WorkerFailed
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.program.extra_state import decode


@pytest.mark.e2e
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp_shard=3), Layout(dp_replicate=2, dp_shard=2), Layout(tp=2)],
    ids=str,
)
def test_same_losses_as_one_process(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    job = loop_job(steps=8)
    workers = pool.open(job, tmp_path)
    pool.enter(plan(1, layout, workers, job["global_batch"]))
    pool.quiesced(1, layout.world_size)
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_loader_processes_read_the_dataset_of_a_script(pool: Pool, tmp_path: Path) -> None:
    """Copies of the workers, through a change of these."""
    job = loop_job(steps=12) | {"data": {"loader_workers": 2}}
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=2), workers, 12)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 4 for e in pool.events(StepDone)), "step 4")
    pool.enter(plan(2, Layout(dp_shard=3), workers, 12, resume=live(first)))
    pool.quiesced(2, 3)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, 13))
    loss_curve_agrees(pool, job)


@pytest.mark.whole
def test_a_model_of_transformers_keeps_its_losses(pool: Pool, tmp_path: Path) -> None:
    """Tied embeddings, cut by the model's own plan: fully sharded, tensor parallel, on one worker,
    sharded both ways."""
    job = job_of("hf_tiny.py", steps=12)
    workers = pool.open(job, tmp_path)
    plans: list[Any] = []
    for i, layout in enumerate(
        (Layout(dp_shard=3), Layout(tp=2), Layout(), Layout(dp_shard=2, tp=2))
    ):
        more = {"resume": live(plans[-1])} if plans else {}
        plans.append(plan(i + 1, layout, workers, 12, **more))
        pool.enter(plans[-1])
        pool.wait(
            lambda i=i: any(e.step >= 3 * i + 3 for e in pool.events(StepDone)), f"step {3 * i + 3}"
        )  # type: ignore[misc]
    pool.quiesced(4, 4)
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_live_moves(pool: Pool, tmp_path: Path) -> None:
    """Workers leave and come back; one that comes back runs the same script on."""
    job = loop_job(steps=16)
    workers = pool.open(job, tmp_path)
    plans = [plan(1, Layout(dp_shard=4), workers, 12)]
    pool.enter(plans[0])
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    plans.append(plan(2, Layout(tp=2), workers[2:], 12, resume=live(plans[0])))
    pool.enter(plans[1])
    pool.wait(lambda: any(e.step >= 7 for e in pool.events(StepDone, 2)), "step 7")
    plans.append(plan(3, Layout(dp_shard=2, tp=2), workers, 12, resume=live(plans[1])))
    pool.enter(plans[2])
    pool.quiesced(3, 4)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, 17)), (
        "a notice or growth costs no step"
    )
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_a_stopped_peer_does_not_hold_the_loop(pool: Pool, tmp_path: Path) -> None:
    """The script's thread hangs in a collective of its body; abort frees it."""
    job = loop_job(steps=12)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    try:
        os.kill(pool.pids[2], signal.SIGSTOP)
        survivors = [w for i, w in enumerate(workers) if i != 2]
        pool.stuck(survivors)
        assert not pool.events(WorkerFailed), "a stopped peer must look like silence"
        recover(pool, first, Layout(dp_shard=3), survivors, survivors)
        pool.quiesced(2, 3)
        loss_curve_agrees(pool, job)
    finally:
        os.kill(pool.pids[2], signal.SIGCONT)
        pool.kill(workers[2])
        pool.revive()


@pytest.mark.e2e
def test_extra_state_of_a_program_travels(pool: Pool, tmp_path: Path) -> None:
    """Live to a worker that comes later, by peer replicas after a loss, and into the checkpoint."""
    job = job_of("tiny_counted.py", steps=12)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=2))
    second = plan(
        2, Layout(dp_shard=3), workers[:1] + workers[2:], 12, resume=live(first), peer_every=2
    )
    try:
        pool.enter(second)
        pool.wait(lambda: any(e.step >= 6 for e in pool.events(StepDone, 2)), "step 6")
        pool.kill(workers[2])
        survivors = [workers[0], workers[3], workers[1]]
        third = recover(pool, second, Layout(dp_shard=2), survivors, survivors)
        pool.quiesced(3, 2)
        pool.wait(lambda: sum(e.step == 12 for e in pool.events(ShardStored)) == 2, "the last copy")
        uri = checkpoint_writer.commit(
            open_storage(str(tmp_path)), 12, third.generation, world_size=2, epoch=1, meta={}
        )
        checkpoint = checkpoint_index.open_checkpoint(uri)
        shape, dtype = checkpoint.tensors["extra.counted"]
        state = decode("counted", checkpoint.read(Box("extra.counted", (0,), shape, dtype)))
        assert state["n"] == 12 and state["last"].tolist() == [12, 11, 10]
        loss_curve_agrees(pool, job)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_from_a_durable_copy_in_new_processes(pool: Pool, tmp_path: Path) -> None:
    """The script runs from its top; model, moments, learning rates and schedule come from storage,
    into another layout."""
    job = loop_job(steps=12)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=2, tp=2), workers, 12, durable_every=4)
    pool.enter(first)
    pool.wait(lambda: sum(e.step == 4 for e in pool.events(ShardStored)) == 4, "a checkpoint")
    pool.order(workers[0], Quiesce(1, save=False))
    pool.quiesced(1, 4)
    uri = checkpoint_writer.commit(
        open_storage(str(tmp_path)), 4, 1, world_size=4, epoch=1, meta={}
    )
    pool.open(job, tmp_path)  # forgets all that was held
    pool.enter(plan(2, Layout(dp_shard=3), workers, 12, resume=Resume("durable", 4, uri=uri)))
    assert pool.entered(2).step == 4
    pool.quiesced(2, 3)
    alone = train_alone(load_program(job["program"]), job, 12)
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(alone[4:], abs=1e-4)
