"""Losses of one and of two failure domains at once, with real processes: the run goes on from host memory in another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import from_copies, plan
from reference import train_alone
from test_chain import job_of
from test_recovery import digests_agree, loss_curve_agrees
from worker_pool import Pool

from elastic.policy.recovery import covered
from elastic.program import load_program
from elastic.types import CopyStored, DigestPart, Holding, Layout, Plan, Quiesced, ShardStored, StepDone, WorkerId

pytestmark = pytest.mark.slow


def begin(pool: Pool, job: dict[str, Any], run: Path, layout: Layout, per_node: int = 1, **more: Any) -> Plan:
    workers = pool.open(job, run, per_node)
    first = plan(1, layout, workers, job["global_batch"], peer_every=2, **more)
    pool.enter(first)
    pool.wait(lambda: any(e.copy.step >= 2 for e in pool.events(CopyStored)), "a peer copy")
    return first


def recover(pool: Pool, old: Plan, layout: Layout, lost: list[WorkerId]) -> Plan:
    """Kills `lost` and the store of the driver's side; enters generation 2 from the newest step that the others hold."""
    for worker in lost:
        pool.kill(worker)
    pool.stores[1] = None
    survivors = [worker for worker in old.ranks if worker not in lost]
    for worker in survivors:
        pool.call(worker, "abort", 1)
    pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(survivors), "survivors")
    newest: dict[WorkerId, Quiesced] = {e.worker: e for e in pool.events(Quiesced) if e.worker in survivors}
    held: list[Holding] = [h for q in newest.values() for h in q.holdings if h.generation == 1]
    step = max((s for s in {h.step for h in held} if covered(old, [h for h in held if h.step == s])), default=-1)
    assert step >= 0, f"no whole copy among {held}"
    acknowledged = max(e.copy.step for e in pool.events(CopyStored) if e.copy.kind == "peer")
    assert step >= acknowledged, "what was acknowledged is there whatever was lost"
    resume = from_copies(old, step, tuple(h for h in held if h.step == step))
    new = plan(2, layout, survivors, 12, resume=resume, peer_every=2)
    pool.enter(new)
    pool.entered(2)
    return new


def goes_on(pool: Pool, job: dict[str, Any], new: Plan) -> None:
    """To the last step, on the loss curve, with the content that was held, without a byte from storage."""
    pool.wait(lambda: len(pool.events(DigestPart, 2)) >= len(new.ranks), "digests")
    assert digests_agree(pool, 2)
    left = pool.quiesced(2, len(new.ranks))
    alone = train_alone(load_program(job["program"]), job, job["steps"])
    last = {e.step: e.train_loss for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    untold = set(range(1, job["steps"] + 1)) - set(last)
    assert untold <= {new.resume.step}, "rank 0 may be gone before it has told of the step that all others hold"
    assert max(abs(loss - alone[step - 1]) for step, loss in last.items()) < 1e-4
    assert new.resume.source == "peer"
    assert not [e for e in pool.events(ShardStored) if e.step < job["steps"]]
    if any(e.copy.generation == 2 for e in pool.events(CopyStored)):
        assert {h.generation for q in left for h in q.holdings} == {2}, "what the generation before held is let go"


@pytest.mark.parametrize("lost", [(0, 1), (1, 3)], ids=str)
def test_two_nodes_at_once_with_two_copies(pool: Pool, tmp_path: Path, lost: tuple[int, int]) -> None:
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(dp_shard=4), n_copies=2)
    assert {len(kept) for kept in first.copies_to} == {2}
    try:
        new = recover(pool, first, Layout(tp=2), [first.ranks[i] for i in lost])
        goes_on(pool, job, new)
    finally:
        pool.revive()


def test_a_node_of_two_workers_with_rank_0_among_them(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(pp=2, dp_shard=2), per_node=2)
    try:
        new = recover(pool, first, Layout(dp_shard=2), [w for w in first.ranks if w.node_id == "node0"])
        goes_on(pool, job, new)
    finally:
        pool.revive()


def test_replicas_on_another_node_need_no_copies_on_the_wire(pool: Pool, tmp_path: Path) -> None:
    """Every box has its replica on the other node: own host copies only, and a whole step after the loss of either."""
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(dp_replicate=2, dp_shard=2), per_node=2)
    assert first.copies_to == ((), (), (), ())
    try:
        new = recover(pool, first, Layout(dp_shard=2), [w for w in first.ranks if w.node_id == "node0"])
        goes_on(pool, job, new)
    finally:
        pool.revive()


def test_one_buffer_keeps_a_whole_copy_between_flights(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=16)
    workers = pool.open(job, tmp_path)
    first = replace(plan(1, Layout(dp_shard=3), workers, 12, peer_every=5), copy_buffers=1)
    pool.enter(first)
    pool.wait(lambda: any(e.copy.step >= 5 for e in pool.events(CopyStored)), "a peer copy")
    pool.quiesced(1, 3)
    assert [e.copy.step for e in pool.events(CopyStored) if e.copy.kind == "peer"] == [0, 5, 10]
    loss_curve_agrees(pool, job)


def test_another_cadence_reaches_all_ranks_at_the_same_step(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_slow.py", steps=24)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=4), workers, 12, peer_every=6)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 7 for e in pool.events(StepDone)), "step 7")
    for worker in workers:
        pool.call(worker, "set_cadence", 1, 2, 0)
    pool.quiesced(1, 4)
    stored = [e for e in pool.events(CopyStored) if e.copy.kind == "peer"]
    gaps = [b.copy.step - a.copy.step for a, b in zip(stored, stored[1:], strict=False)]
    assert gaps[0] == 6 and gaps[-3:] == [2, 2, 2], f"copies of steps {[e.copy.step for e in stored]}"
    assert all(e.seconds > 0 for e in stored)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, 25))
