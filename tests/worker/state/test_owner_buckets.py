"""Tensors that are stepped at owners go there and back in buckets: nothing of the result hangs on
their size, and a rank that dies within one costs no more than the steps since the last copy."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import train_alone
from support.worker.chain import job_of
from support.worker.faulty_pool import FaultyPool
from support.worker.host_reads import HostReads
from support.worker.made_up_cuda import make_up
from support.worker.nccl_like_pool import NcclLikePool
from support.worker.owner_steps import gradients, stepping
from support.worker.plans import from_copies, plan
from support.worker.ranks import on_ranks
from support.worker.recovery import digests_agree, newest_whole

from elastic.program import load_program
from elastic.types import Abort, CopyStored, Job, Layout, Quiesced, StepDone, WorkerFailed
from elastic.worker.program.job_program import with_job
from elastic.worker.state import owner_update
from elastic.worker.state.owner_update import OwnerUpdate

MUON = {"path": "muon+adamw", "lr": 4e-3, "weight_decay": 0.1, "no_decay": ["*norm*"]}
SMALL, LARGE = 16 << 10, 32 << 20
STEPS, DIES_IN, LATE_S = 9, 4, 0.003


def whole_bytes(update: OwnerUpdate) -> int:
    """Of tensors and gradients that are here whole, at this moment."""
    each = update.wholes.values()
    return sum(one.nbytes + (one.nbytes if one.grad is not None else 0) for one in each)


def steps(rank: int, n: int, store: tuple[str, int]) -> list[dict[str, Any]]:
    """What two steps give, and how much they hold on the way, by the size of the buckets."""
    plain, most, found = OwnerUpdate._begun, [0], []

    def begun(update: OwnerUpdate, *args: Any) -> Any:
        most.append(whole_bytes(update))
        return plain(update, *args)

    OwnerUpdate._begun = begun  # type: ignore[method-assign]
    job = Job(steps=2, global_batch=12, optimizer=MUON)
    with stepping(
        load_program(PROGRAMS / "tiny_bare.py"), job, Layout(dp_shard=n), rank, store
    ) as s:
        for size in (LARGE, SMALL):
            owner_update.BUCKET_BYTES, most[:] = size, [0]
            s.step = 0
            s.fill_fresh(7)
            s.owner_update.__dict__.pop("buckets", None)
            for step in range(2):
                s.apply(dict(gradients(s, step)), 0.5)
            found.append({
                "tensors": {fqn: tensor.numpy().tobytes() for fqn, (_, tensor) in s.tensors.items()},
                "buckets": len(s.owner_update.buckets), "most": max(most),
                "tensor": max(one.whole_bytes for one in s.owner_update.stepped),
                "left": whole_bytes(s.owner_update),
            })  # fmt: skip
    return found


@pytest.mark.slow
def test_small_buckets_give_the_same_bits_in_less_memory() -> None:
    for large, small in on_ranks(steps, 2):
        assert large["buckets"] == 1 and small["buckets"] > 4
        assert large["tensors"] == small["tensors"]
        assert 0 < small["most"] <= SMALL + small["tensor"]
        assert small["left"] == large["left"] == 0


def reads(rank: int, n: int, store: tuple[str, int]) -> tuple[list[str], int]:
    """Where a step waits for the device in its updates at owners, and of how many buckets this rank
    has something to read."""
    owner_update.BUCKET_BYTES = SMALL
    job = Job(steps=2, global_batch=12, optimizer=MUON)
    with stepping(
        load_program(PROGRAMS / "tiny_bare.py"), job, Layout(dp_shard=n), rank, store
    ) as s:
        s.fill_fresh(7)
        s.apply(dict(gradients(s, 0)), 0.5)
        with HostReads([]) as seen:  # what comes lies on the device
            s.apply(dict(gradients(s, 1)), 0.5)
        got = [bucket.to_owners.got for bucket in s.owner_update.buckets]
        return (
            [line for line in seen.take() if line.startswith(".tolist() at owner_update")],
            sum(any(letter.pieces for letter in letters) for letters in got),
        )


@pytest.mark.e2e
def test_the_host_reads_once_of_a_bucket_and_not_what_comes_back() -> None:
    for seen, n_buckets in on_ranks(reads, 2):
        assert n_buckets > 1 and len(seen) == n_buckets, seen


def test_exchanges_are_believed_when_the_device_has_ended_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, waited = make_up(monkeypatch), []
    groups = SimpleNamespace(
        pretended=False, device=torch.device("cuda", 1),
        check=lambda: waited.append([device for device, _, _ in cuda.of("host waits")]),
    )  # fmt: skip
    OwnerUpdate._check(SimpleNamespace(n=2, groups=groups))  # type: ignore[arg-type]
    assert waited == [[1]]


def aborted(*_: Any) -> None:
    raise ConnectionAbortedError


def test_a_rank_can_rehearse_its_buckets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of which a rank gets something and sends nothing."""
    monkeypatch.setattr(owner_update, "BUCKET_BYTES", SMALL)
    job, layout = Job(steps=2, global_batch=12, optimizer=MUON), Layout(dp_replicate=2, dp_shard=2)
    with stepping(load_program(PROGRAMS / "tiny_bare.py"), job, layout, 1) as state:
        state.apply({fqn: torch.ones_like(p) for fqn, p in state.local.items()}, 1.0)
        assert len(state.owner_update.buckets) > 4 and state.step == 1 and not state.dirty
        for name, dirty in (("_fill", False), ("_take", True)):
            with monkeypatch.context() as broken, pytest.raises(ConnectionAbortedError):
                broken.setattr(OwnerUpdate, name, aborted)
                state.apply({fqn: torch.ones_like(p) for fqn, p in state.local.items()}, 1.0)
            assert state.dirty == dirty, "from the first bucket's step on it is that of no step"


def small_buckets() -> None:
    """In a worker's process."""
    owner_update.BUCKET_BYTES = SMALL


def dies_in_a_bucket() -> None:
    """In a worker's process: at the fourth exchange behind the first of a step, when buckets have
    been stepped and others have not."""
    step, begun, n = OwnerUpdate.step, OwnerUpdate._begun, Counter[str]()

    def counted(update: OwnerUpdate, *args: Any) -> None:
        n["steps"] += 1
        step(update, *args)

    def dies(update: OwnerUpdate, *args: Any) -> Any:
        n["exchanges"] += n["steps"] == DIES_IN
        if n["exchanges"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return begun(update, *args)

    OwnerUpdate.step, OwnerUpdate._begun = counted, dies  # type: ignore[method-assign]


@pytest.fixture(params=[NcclLikePool, FaultyPool], ids=["nccl_like", "gloo"])
def pool(request: pytest.FixtureRequest) -> Iterator[FaultyPool]:
    made = request.param(4)
    yield made
    made.close()


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.sampled(1)
def test_a_rank_that_dies_within_a_bucket(pool: FaultyPool, tmp_path: Path) -> None:
    job = job_of("tiny_bare.py", STEPS) | {"optimizer": MUON}
    workers = pool.open(job, tmp_path)
    for worker in workers:
        pool.patch(worker, small_buckets)
        if isinstance(pool, NcclLikePool):
            pool.call(worker, "late", LATE_S)
    pool.patch(workers[1], dies_in_a_bucket)
    first = plan(1, Layout(dp_replicate=2, dp_shard=2), workers, 12, peer_every=1, alone=True)
    pool.enter(first)
    pool.wait(lambda: pool.gone() == [workers[1]], "the death")
    others = [worker for worker in workers if worker != workers[1]]
    for worker in others:
        pool.order(worker, Abort(1))
    pool.stores[1] = None
    pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(others), "failure")
    left = [e for e in pool.events(Quiesced, 1) if e.worker in others]
    step, holdings = newest_whole(first, left)
    assert max(e.copy.step for e in pool.events(CopyStored)) <= step < DIES_IN
    second = plan(2, Layout(dp_shard=3), others, 12, resume=from_copies(first, step, holdings))
    pool.enter(second)
    pool.quiesced(2, 3)
    assert digests_agree(pool, 2)
    assert {e.kind for e in pool.events(WorkerFailed)} <= {"collective"}
    done = {e.step: e.train_loss for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    bare = load_program(PROGRAMS / "tiny_bare.py")
    program = with_job(bare, Job(steps=STEPS, global_batch=12, optimizer=MUON, seed=job["seed"]))
    assert [done[step] for step in range(1, STEPS + 1)] == pytest.approx(
        train_alone(program, job, STEPS), abs=1e-4
    )
