"""Chains of layouts, kills and hangs on a process group that behaves like NCCL's: the state
continues as on gloo, and nobody is lost but the one that died."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import check, job_of, pass_through
from support.worker.layout_case import Case
from support.worker.layout_case import check as check_case
from support.worker.layout_case import run as run_case
from support.worker.nccl_like_pool import NcclLikePool
from support.worker.peer_recovery import begin, goes_on
from support.worker.peer_recovery import recover as recover_from
from support.worker.plans import plan
from support.worker.recovery import digests_agree, loss_curve_agrees, recover, start
from support.worker.worker_pool import TIMEOUT_S

from elastic.types import Layout, Quiesced, StepDone, WorkerFailed

pytestmark = pytest.mark.e2e
# from the order to leave: 0.1 s on a machine at rest; half of the groups' own timeout
QUIESCED_S = TIMEOUT_S / 2


@pytest.fixture(scope="module")
def nccl_pool() -> Iterator[NcclLikePool]:
    pool = NcclLikePool(4)
    yield pool
    pool.close()


@pytest.fixture
def pool(nccl_pool: NcclLikePool) -> Iterator[NcclLikePool]:
    nccl_pool.revive()
    yield nccl_pool
    nccl_pool.revive()


# on gloo: test_chain.py; other layouts than before on this group: below, and test_nccl_like_faults.py
@pytest.mark.whole
def test_a_chain_of_layouts_follows_one_process(pool: NcclLikePool, tmp_path: Path) -> None:
    layouts = [
        Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2), Layout(pp=4),
        Layout(dp_replicate=2, dp_shard=2), Layout(cp=2, dp_shard=2), Layout(dp_shard=3),
    ]  # fmt: skip
    job = job_of("tiny.py", steps=2 * len(layouts) + 2)
    check(job, tmp_path, pass_through(pool, job, tmp_path, layouts, 2), 1e-4)
    assert not pool.events(WorkerFailed)


def test_tokens_go_to_their_experts(pool: NcclLikePool, tmp_path: Path) -> None:
    """The one layout whose collectives are of parts that differ in size."""
    case = Case("tiny_experts.py", "dp_shard=4,ep=2", 13)
    check_case(case, run_case(pool, case, tmp_path), 1e-5)
    assert not pool.events(WorkerFailed)


def left_quickly(pool: NcclLikePool, asked_s: float, survivors: list[Any]) -> None:
    at = {
        worker: s
        for s, worker, event in pool.log
        if isinstance(event, Quiesced) and event.generation == 1 and s >= asked_s
    }
    slow = {
        str(worker): at[worker] - asked_s
        for worker in survivors
        if worker in at and at[worker] - asked_s > QUIESCED_S
    }
    assert not slow


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(dp_shard=4), Layout(dp_shard=3)),
        (Layout(pp=2, dp_shard=2), Layout(tp=2)),
        (Layout(dp_shard=2, tp=2), Layout(pp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["kill", "hang"])
@pytest.mark.sampled(2)
def test_a_loss_is_bridged_by_those_that_are_left(
    pool: NcclLikePool, tmp_path: Path, before: Layout, after: Layout, how: str
) -> None:
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, before)
    pids = pool.pids[1:]
    lost = pool.processes[0]
    try:
        os.kill(pool.pids[0], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        pool.stuck(workers[1:])
        asked_s = time.monotonic()
        second = recover(pool, first, after, workers[1:], workers[1:])
        left_quickly(pool, asked_s, workers[1:])
        pool.quiesced(2, after.world_size)
        assert digests_agree(pool, 2)
        # of the copy that they have continued from nobody may have told
        loss_curve_agrees(pool, job, resumed=second.resume.step)
        assert pool.pids[1:] == pids and all(process.is_alive() for process in pool.processes[1:])
        assert {e.kind for e in pool.events(WorkerFailed)} <= {"collective"}
    finally:
        lost.kill()
        lost.join()


def test_replicas_stand_in_for_one_another(pool: NcclLikePool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=12)
    first = begin(pool, job, tmp_path, Layout(dp_replicate=2, dp_shard=2))
    goes_on(pool, job, recover_from(pool, first, Layout(dp_shard=3), [first.ranks[1]]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", range(0, 12, 3))
def test_a_rank_that_dies_within_a_step(pool: NcclLikePool, tmp_path: Path, at: int) -> None:
    """Before one of the collectives of a step; the others' kernels spin, and end with corrupted
    results when they are aborted."""
    job = job_of("tiny.py", steps=12)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=4), workers, job["global_batch"], peer_every=2)
    pool.call(workers[2], "dies_on_device", 5, at)
    pool.enter(first)
    pool.wait(lambda: pool.gone() == [workers[2]], "the death")
    survivors = [worker for worker in workers if worker != workers[2]]
    asked_s = time.monotonic()
    second = recover(pool, first, Layout(dp_shard=3), survivors, survivors)
    left_quickly(pool, asked_s, survivors)
    pool.quiesced(2, 3)
    assert digests_agree(pool, 2)
    loss_curve_agrees(pool, job, resumed=second.resume.step)
    assert max(e.step for e in pool.events(StepDone)) == 12
