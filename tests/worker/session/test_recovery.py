"""Loss of workers: survivors continue in the same processes from copies in memory, in another
layout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.reference import train_alone
from support.worker.chain import job_of
from support.worker.plans import from_copies, live, plan
from support.worker.recovery import digests_agree, loss_curve_agrees, newest_whole, recover, start
from support.worker.worker_pool import TIMEOUT_S, Pool

from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import (
    Abort,
    Box,
    CopyDamaged,
    CopyStored,
    Layout,
    PlanEntered,
    Quiesce,
    Quiesced,
    Resume,
    ShardStored,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.hosting.aggregate import CheckpointParts, Gather

pytestmark = pytest.mark.slow


@pytest.mark.whole  # test_nccl_like_runs.py bridges the same losses
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(dp_shard=4), Layout(dp_shard=3)),
        (Layout(pp=2, dp_shard=2), Layout(tp=2)),
        (Layout(dp_shard=2, tp=2), Layout(pp=2)),
    ],
    ids=str,
)
def test_kill_without_notice(pool: Pool, tmp_path: Path, before: Layout, after: Layout) -> None:
    job = job_of("tiny.py", steps=40)
    workers, first = start(pool, job, tmp_path, before)
    pids = pool.pids[1:]
    try:
        killed_at = time.monotonic()
        pool.kill(workers[0])  # rank 0: no rank is special
        pool.wait(lambda: pool.events(WorkerFailed, 1), "failure")
        seen_s = time.monotonic() - killed_at
        new = recover(pool, first, after, workers[1:], workers[1:])
        assert seen_s < 0.75 * TIMEOUT_S, "the group's own timeout"
        assert all(e.kind == "collective" for e in pool.events(WorkerFailed)), pool.events(
            WorkerFailed
        )
        copies = [e.copy.step for e in pool.events(CopyStored) if e.copy.generation == 1]
        assert new.resume.step >= max(copies), (
            "more was lost than since the newest copy that was acknowledged"
        )
        pool.quiesced(2, len(new.ranks))
        assert pool.pids[1:] == pids
        loss_curve_agrees(pool, job, resumed=new.resume.step)
    finally:
        pool.revive()


def test_what_is_left_on_one_node_goes_on_without_copies(pool: Pool, tmp_path: Path) -> None:
    """Nothing of the old copies is kept where no new ones are taken; their content is compared all
    the same."""
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4), per_node=2)
    try:
        pool.kill(workers[2])
        pool.kill(workers[3])
        pool.wait(lambda: len(pool.events(WorkerFailed, 1)) >= 2, "failures")
        recover(pool, first, Layout(dp_shard=2), workers[:2], workers[:2], peer_every=0)
        pool.quiesced(2, 2)
        parts = pool.digests(2)
        assert len(parts) == 2
        assert sum(p.before for p in parts) % 2**64 == sum(p.after for p in parts) % 2**64
        loss_curve_agrees(pool, job)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_stopped_process_is_ended_and_the_others_go_on(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=12)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    try:
        os.kill(pool.pids[2], signal.SIGSTOP)
        survivors = [w for i, w in enumerate(workers) if i != 2]
        pool.stuck(survivors)
        assert not pool.events(WorkerFailed), "a stopped peer must look like silence"
        # abort frees them though the peer still has its sockets
        recover(pool, first, Layout(dp_shard=3), survivors, survivors)
        pool.quiesced(2, 3)
        loss_curve_agrees(pool, job)
    finally:
        os.kill(pool.pids[2], signal.SIGCONT)
        pool.kill(workers[2])
        pool.processes[2].join()
        pool.revive()


@pytest.mark.whole
@pytest.mark.parametrize("told", [True, False], ids=["killed while all meet", "never told"])
def test_loss_during_a_transition(pool: Pool, tmp_path: Path, told: bool) -> None:
    """The second generation cannot be entered: one of its workers is gone. The third comes from
    what the first left."""
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    try:
        second = plan(2, Layout(pp=2, tp=2), workers, 12, resume=live(first), peer_every=2)
        victim = workers[3]
        pool.enter(second, leave_out=() if told else (victim,))
        pool.kill(victim)
        survivors = workers[:3]
        pool.wait(
            lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(survivors),
            "the end of generation 1",
        )
        recover(pool, first, Layout(dp_shard=3), survivors, survivors)
        assert not pool.events(PlanEntered, 2)
        pool.quiesced(3, 3)
        loss_curve_agrees(pool, job)
    finally:
        pool.revive()


def test_holder_and_held_gone_together_leave_no_whole_copy(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=40)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    try:
        pool.kill(workers[1])
        pool.kill(workers[2])  # keeps the copy of workers[1]
        for worker in (workers[0], workers[3]):
            pool.order(worker, Abort(1))
        survivors = {workers[0], workers[3]}
        pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= survivors, "failure")
        with pytest.raises(AssertionError, match="no whole copy"):
            newest_whole(
                first, [e for e in pool.events(Quiesced, 1) if e.worker in survivors]
            )  # one of the gone may have left first
    finally:
        pool.revive()


@pytest.mark.e2e
def test_leaving_ranks_only_send_and_growth_brings_them_back(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=16)
    workers = pool.open(job, tmp_path)
    plans = [plan(1, Layout(dp_shard=4), workers, 12)]
    pool.enter(plans[0])
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    plans.append(plan(2, Layout(tp=2), workers[2:], 12, resume=live(plans[0])))
    pool.enter(plans[1])
    pool.wait(lambda: any(e.step >= 7 for e in pool.events(StepDone, 2)), "step 7")
    left = [e for e in pool.events(Quiesced, 2) if e.worker in workers[:2]]
    assert len(left) == 2
    assert all(e.holdings == () for e in left)
    plans.append(plan(3, Layout(dp_shard=2, tp=2), workers, 12, resume=live(plans[1])))
    pool.enter(plans[2])
    pool.quiesced(3, 4)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, 17)), (
        "a notice or growth costs no step"
    )
    loss_curve_agrees(pool, job)


@pytest.mark.whole  # test_nccl_like_runs.py has replicas stand in
def test_replicas_are_copies_too(pool: Pool, tmp_path: Path) -> None:
    """With dp_replicate the survivors hold every box live: no peer replica is needed and no step is
    lost."""
    job = job_of("tiny.py", steps=12)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_replicate=2, dp_shard=2), workers, 12)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    try:
        pool.kill(workers[1])
        survivors = [w for w in workers if w != workers[1]]
        pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(survivors), "failure")
        at = {q.step for q in pool.events(Quiesced, 1)}
        assert len(at) == 1, f"the survivors stand at different steps: {at}"
        holdings = tuple(
            h for q in pool.events(Quiesced, 1) for h in q.holdings if h.kind == "live"
        )
        assert {h.rank for h in holdings} == {0, 2, 3}
        pool.stores[1] = None
        pool.enter(
            plan(
                2, Layout(dp_shard=3), survivors, 12, resume=from_copies(first, at.pop(), holdings)
            )
        )
        pool.quiesced(2, 3)
        checked = digests_agree(pool, 2)
        assert checked
        loss_curve_agrees(pool, job)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_durable_copy_into_another_layout(pool: Pool, tmp_path: Path) -> None:
    """Everyone is gone: new sessions resume from storage in another layout, bit for bit what was
    stored."""
    job = job_of("tiny.py", steps=12)
    storage = open_storage(str(tmp_path))
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(pp=2, dp_shard=2), workers, 12, durable_every=4)
    uris = []

    def commit(parts: CheckpointParts) -> None:
        digest = sum(part.digest for part in parts.stored.values()) % (1 << 64)
        uris.append(
            checkpoint_writer.commit(
                storage,
                parts.step,
                1,
                world_size=len(parts.plan.ranks),
                epoch=1,
                meta={"digest": str(digest)},
            )
        )

    gather = Gather(commit, lambda node: 1)
    gather.expect(first)
    pool.enter(first)
    pool.wait(lambda: sum(e.step == 4 for e in pool.events(ShardStored)) == 4, "a checkpoint")
    for part in [e for e in pool.events(ShardStored) if e.step == 4]:
        gather.add(WorkerId("", 0), part)
    pool.order(workers[0], Quiesce(1, save=False))
    pool.quiesced(1, 4)
    assert uris
    workers = pool.open(job, tmp_path)
    pool.enter(plan(2, Layout(dp_shard=3), workers, 12, resume=Resume("durable", 4, uri=uris[0])))
    assert pool.entered(2).step == 4
    pool.quiesced(2, 3)
    assert digests_agree(pool, 2)
    alone = train_alone(load_program(job["program"]), job, 12)
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(alone[4:], abs=1e-4)


def test_a_damaged_checkpoint_is_told_by_its_uri(pool: Pool, tmp_path: Path) -> None:
    """So that the policy goes back to the one before."""
    storage = open_storage(str(tmp_path))
    checkpoint_writer.write_shard(
        storage, 4, 1, rank=0, items=[(Box("w", (0,), (3,), "float32"), torch.zeros(3))]
    )
    uri = checkpoint_writer.commit(storage, 4, 1, world_size=1, epoch=1, meta={})
    (Path(uri) / "__0_0.distcp").unlink()
    workers = pool.open(job_of("tiny.py", steps=12), tmp_path, n=2)
    pool.enter(plan(1, Layout(dp_shard=2), workers, 12, resume=Resume("durable", 4, uri=uri)))
    pool.wait(lambda: pool.events(WorkerFailed), "failure")
    assert {e.kind for e in pool.events(WorkerFailed)} == {"infrastructure"}
    damaged = [e for _, _, e in pool.log if isinstance(e, CopyDamaged)]
    assert damaged[0].uri == uri and "__0_0.distcp: missing" in damaged[0].reason
    pool.wait(lambda: len({e.worker for e in pool.events(Quiesced)}) == 2, "failure")


def test_checkpoint_of_another_model_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    box = Box("model.other.weight", (0,), (3,), "float32")
    checkpoint_writer.write_shard(storage, 4, 1, rank=0, items=[(box, torch.zeros(3))])
    uri = checkpoint_writer.commit(storage, 4, 1, world_size=1, epoch=1, meta={})
    workers = pool.open(job_of("tiny.py", steps=12), tmp_path, n=2)
    pool.enter(plan(1, Layout(dp_shard=2), workers, 12, resume=Resume("durable", 4, uri=uri)))
    pool.wait(lambda: pool.events(WorkerFailed), "failure")
    assert {e.kind for e in pool.events(WorkerFailed)} == {"program"}
    assert "model.embed.weight" in pool.events(WorkerFailed)[0].error
    pool.wait(lambda: len({e.worker for e in pool.events(Quiesced)}) == 2, "failure")
