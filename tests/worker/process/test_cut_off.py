"""A worker that a drill cuts off from its peers, or from storage: its generation breaks, the next
one waits for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.worker.chain import job_of
from support.worker.plans import from_copies, plan
from support.worker.recovery import loss_curve_agrees, newest_whole, recover, start
from support.worker.worker_pool import Pool

from elastic.types import (
    Abort,
    CopyFailed,
    Layout,
    PlanEntered,
    Quiesce,
    Quiesced,
    ShardStored,
    WorkerFailed,
)
from elastic.types.orders import Isolate

pytestmark = pytest.mark.e2e
FOR_S = 1.5


def test_its_generation_breaks_and_the_next_one_is_entered_when_it_is_back(
    pool: Pool, tmp_path: Path
) -> None:
    job = job_of("tiny.py", steps=40)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=2))
    pids = pool.pids
    cut_s = time.monotonic()
    pool.order(workers[1], Isolate(FOR_S, nodes=True))
    pool.wait(
        lambda: len(pool.events(WorkerFailed, 1)) == 2, "both sides of the connection that broke"
    )
    assert {e.kind for e in pool.events(WorkerFailed, 1)} == {"collective"}
    new = recover(pool, first, Layout(dp_shard=2), workers, workers)
    pool.wait(lambda: pool.events(PlanEntered, 2), "the generation that waits for it")
    assert time.monotonic() - cut_s >= FOR_S
    pool.quiesced(2, 2)
    assert pool.pids == pids
    loss_curve_agrees(pool, job, resumed=new.resume.step)


def test_an_abort_frees_who_waits_for_its_peers(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=2))
    pair = workers[:2]
    pool.order(pair[1], Isolate(3600.0, nodes=True))
    try:
        for worker in pair:
            pool.order(worker, Abort(1))
        pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(pair), "both")
        step, holdings = newest_whole(first, pool.events(Quiesced))
        pool.enter(
            plan(
                2,
                Layout(dp_shard=2),
                pair,
                12,
                resume=from_copies(first, step, holdings),
                peer_every=2,
            )
        )
        for worker in pair:
            pool.order(worker, Abort(2))
        pool.wait(lambda: pair[1] in {e.worker for e in pool.events(Quiesced, 2)}, "its answer")
        assert not pool.events(PlanEntered, 2)
    finally:
        pool.kill(pair[1])
        pool.revive()


def test_what_it_writes_fails_and_it_trains_on(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=100_000)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=2))
    pool.order(workers[1], Isolate(3600.0, storage=True))
    try:
        for worker in workers:
            pool.order(worker, Quiesce(1))
        pool.quiesced(1, 2)
        pool.wait(lambda: pool.events(CopyFailed) and pool.events(ShardStored), "the word of both")
        (failed,) = pool.events(CopyFailed)
        assert "made up by a drill" in failed.reason and [
            e.rank for e in pool.events(ShardStored)
        ] == [0]
        assert not pool.events(WorkerFailed)
    finally:
        pool.kill(workers[1])
        pool.revive()
