"""A sticky CUDA error, made up: nothing on the device is offered, what is in host memory is served,
the others continue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.chain import job_of
from support.worker.plans import from_copies, live, plan
from support.worker.recovery import loss_curve_agrees, newest_whole, recover, start
from support.worker.worker_pool import Pool

from elastic.types import (
    Abort,
    Layout,
    ModelProfile,
    Plan,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import InjectFault
from elastic.worker.process.fault_injection import MADE_UP
from elastic.worker.session.generation import Generation
from elastic.worker.state.host_copy import Flat
from elastic.worker.state.peer_replicas import PeerReplicas

VICTIM = 1


def failed(pool: Pool, generation: int) -> WorkerFailed:
    """The report of the lost device."""
    pool.wait(
        lambda: any(e.kind == "device" for e in pool.events(WorkerFailed)),
        "the report of the device",
    )
    (found,) = [e for e in pool.events(WorkerFailed) if e.kind == "device"]
    assert (
        found.worker == pool.workers[VICTIM]
        and found.generation == generation
        and found.error == MADE_UP
    )
    assert {e.kind for e in pool.events(WorkerFailed)} <= {"device", "collective"}
    return found


def only_host_copies(pool: Pool, generation: int) -> None:
    said = [e for e in pool.events(Quiesced, generation) if e.worker == pool.workers[VICTIM]]
    assert said and all(e.pending_step == -1 for e in said)
    held = [h for e in said for h in e.holdings]
    assert held and {h.kind for h in held} == {"peer"}, held


@pytest.mark.e2e
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "host_copy"])
def test_the_others_go_on_without_it_wherever_it_fails(
    pool: Pool, tmp_path: Path, place: str
) -> None:
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    pids = pool.pids
    pool.order(workers[VICTIM], InjectFault("device_error", place=place))
    step = failed(pool, 1).step
    others = [worker for worker in workers if worker != workers[VICTIM]]
    new = recover(pool, first, Layout(dp_shard=3), others, workers)
    assert 2 <= new.resume.step < step
    only_host_copies(pool, 1)
    pool.quiesced(2, 3)
    assert pool.pids == pids
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_a_device_that_fails_in_a_move(pool: Pool, tmp_path: Path) -> None:
    """It takes part in the next generation, which is not entered: the third comes from copies of
    the first."""
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    pool.order(workers[VICTIM], InjectFault("device_error", place="move"))
    pool.enter(plan(2, Layout(tp=2, dp_shard=2), workers, 12, resume=live(first), peer_every=2))
    assert failed(pool, 2).step == 0
    others = [worker for worker in workers if worker != workers[VICTIM]]
    for worker in workers:
        pool.order(worker, Abort(2))
    pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 2)} >= set(workers), "their reports")
    only_host_copies(pool, 2)
    step, holdings = newest_whole(
        first, [*{e.worker: e for e in pool.events(Quiesced, 2)}.values()]
    )
    pool.enter(
        plan(
            3,
            Layout(dp_shard=3),
            others,
            12,
            resume=from_copies(first, step, holdings),
            peer_every=2,
        )
    )
    pool.quiesced(3, 3)
    loss_curve_agrees(pool, job)


@pytest.mark.e2e
def test_what_it_keeps_for_a_worker_that_is_gone_too_comes_from_it(
    pool: Pool, tmp_path: Path
) -> None:
    job = job_of("tiny.py", steps=14)
    workers, first = start(pool, job, tmp_path, Layout(dp_shard=4))
    gone = kept_by(first, VICTIM)
    try:
        pool.order(workers[VICTIM], InjectFault("device_error"))
        failed(pool, 1)
        pool.kill(gone)
        there = [worker for worker in workers if worker != gone]
        others = [worker for worker in there if worker != workers[VICTIM]]
        new = recover(pool, first, Layout(dp_shard=2), others, there)
        rank = first.ranks.index(gone)
        assert {h.worker for h in new.resume.holdings if h.rank == rank} == {workers[VICTIM]}
        pool.quiesced(2, 2)
        assert max(e.step for e in pool.events(StepDone)) == 14
        loss_curve_agrees(pool, job, resumed=new.resume.step)
    finally:
        pool.revive()


def test_of_a_lost_device_only_what_lies_in_host_memory_is_taken_along() -> None:
    """The copy in flight was stored: what came from others counts, its own part would be waited for
    on the device. Gradients whose commit was not seen are on the device."""
    host, device, moved = (
        SimpleNamespace(kind=kind, on_host=there)
        for kind, there in (("peer", False), ("live", False), ("live", True))
    )
    copies = PeerReplicas.__new__(PeerReplicas)
    copies.plan = plan(1, Layout(dp_shard=2), [WorkerId("a", 0), WorkerId("b", 0)], 12)
    lease: Any = SimpleNamespace(buffer=torch.empty(0, dtype=torch.uint8))
    copies.flight = SimpleNamespace(stored=True, step=4, own=None, incoming={1: lease})  # type: ignore[assignment]
    copies.kept, copies._flat, copies.alone = {1: []}, {1: Flat([])}, False
    generation = Generation.__new__(Generation)
    generation.state, generation.device_lost = None, False
    generation.copies = SimpleNamespace(replicas=copies)  # type: ignore[assignment]
    generation.place = SimpleNamespace(  # type: ignore[assignment]
        held=[device, host, moved], lose_device=lambda: None, profile=ModelProfile(4, 0, ())
    )
    generation.stepper = SimpleNamespace(pending=SimpleNamespace(step=5))  # type: ignore[assignment]
    assert generation.pending_step == 5
    generation.lose_device()
    generation.take_along()
    assert generation.place.held[:2] == [host, moved] and generation.pending_step == -1
    (received,) = generation.place.held[2:]
    assert (received.kind, received.rank, received.step) == ("peer", 1, 4)


def kept_by(first: Plan, keeper: int) -> WorkerId:
    return first.ranks[
        next(rank for rank, keepers in enumerate(first.copies_to) if keeper in keepers)
    ]
