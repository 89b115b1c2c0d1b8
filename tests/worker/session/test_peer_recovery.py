"""Losses of one and of two failure domains at once, with real processes: the run resumes from host
memory in another layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.worker.chain import job_of
from support.worker.peer_recovery import begin, goes_on, recover
from support.worker.plans import plan
from support.worker.recovery import loss_curve_agrees
from support.worker.worker_pool import Pool

from elastic.types import CopyStored, Layout, SetCadence, StepDone

pytestmark = pytest.mark.slow


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", [(0, 1), (1, 3)], ids=str)
def test_two_nodes_at_once_with_two_copies(
    pool: Pool, tmp_path: Path, lost: tuple[int, int]
) -> None:
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(dp_shard=4), n_copies=2)
    assert {len(kept) for kept in first.copies_to} == {2}
    try:
        new = recover(pool, first, Layout(tp=2), [first.ranks[i] for i in lost])
        goes_on(pool, job, new)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_a_node_of_two_workers_with_rank_0_among_them(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(pp=2, dp_shard=2), per_node=2)
    try:
        new = recover(
            pool, first, Layout(dp_shard=2), [w for w in first.ranks if w.node_id == "node0"]
        )
        goes_on(pool, job, new)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_replicas_on_another_node_need_no_copies_on_the_wire(pool: Pool, tmp_path: Path) -> None:
    """Every box has its replica on the other node: own host copies only, and a whole step after the
    loss of either."""
    job = job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(dp_replicate=2, dp_shard=2), per_node=2)
    assert first.copies_to == ((), (), (), ())
    try:
        new = recover(
            pool, first, Layout(dp_shard=2), [w for w in first.ranks if w.node_id == "node0"]
        )
        goes_on(pool, job, new)
    finally:
        pool.revive()


@pytest.mark.e2e
def test_one_buffer_keeps_a_whole_copy_between_flights(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=16)
    workers = pool.open(job, tmp_path)
    first = replace(plan(1, Layout(dp_shard=3), workers, 12, peer_every=5), copy_buffers=1)
    pool.enter(first)
    pool.wait(lambda: any(e.copy.step >= 5 for e in pool.events(CopyStored)), "a peer replica")
    pool.quiesced(1, 3)
    assert [e.copy.step for e in pool.events(CopyStored) if e.copy.kind == "peer"] == [0, 5, 10]
    loss_curve_agrees(pool, job)


@pytest.mark.whole
def test_another_cadence_reaches_all_ranks_at_the_same_step(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_slow.py", steps=24)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=4), workers, 12, peer_every=6)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 7 for e in pool.events(StepDone)), "step 7")
    for worker in workers:
        pool.order(worker, SetCadence(1, 2, 0))
    pool.quiesced(1, 4)
    stored = [e for e in pool.events(CopyStored) if e.copy.kind == "peer"]
    gaps = [b.copy.step - a.copy.step for a, b in zip(stored, stored[1:], strict=False)]
    assert gaps[0] == 6 and gaps[-3:] == [2, 2, 2], (
        f"copies of steps {[e.copy.step for e in stored]}"
    )
    assert all(e.seconds > 0 for e in stored)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, 25))
