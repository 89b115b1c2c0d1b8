"""Entering takes long: others wait for the one that reads, whatever the timeout of their groups,
and an abort ends the reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker import nccl_like, worker_pool
from support.worker.chain import job_of
from support.worker.nccl_like_pool import NcclLikePool
from support.worker.peer_recovery import begin
from support.worker.plans import live, plan
from support.worker.recovery import digests_agree, loss_curve_agrees, recover
from support.worker.worker_pool import Pool

from elastic.storage import open_storage
from elastic.types import Abort, Layout, Quiesced, Resume, ShardStored, WorkerFailed, WorkerId
from elastic.worker.checkpoint import checkpoint_reader, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_reader import Checkpoint
from elastic.worker.state.train_state import TrainState

pytestmark = pytest.mark.e2e
SHORT_S = 5.0  # of the groups
LATE_S = 8.0
READ_S = 0.2  # of each of some hundred reads


# ------------------------------------------------------------------------------------- in a worker


def _slowly(tick: Callable[[], object]) -> None:
    ends_s = time.monotonic() + LATE_S
    while time.monotonic() < ends_s:
        tick()
        time.sleep(0.1)  # sleeps: a slow read


def fill_late() -> None:
    plain = Checkpoint.fill

    def fill(checkpoint: Checkpoint, items: Any) -> int:
        Checkpoint.fill = plain  # type: ignore[method-assign]
        _slowly(checkpoint.tick)
        return plain(checkpoint, items)

    Checkpoint.fill = fill  # type: ignore[method-assign]


def read_frozen_late() -> None:
    plain = TrainState.read_frozen

    def read_frozen(state: TrainState, tick: Any) -> None:
        TrainState.read_frozen = plain  # type: ignore[method-assign]
        _slowly(tick)
        plain(state, tick)

    TrainState.read_frozen = read_frozen  # type: ignore[method-assign]


def read_slowly() -> None:
    """Each blob by itself."""
    checkpoint_reader.SMALL_BYTES, plain = 0, Checkpoint._read

    def read(checkpoint: Checkpoint, *args: Any, **named: Any) -> int:
        time.sleep(READ_S)  # sleeps: a slow read
        return plain(checkpoint, *args, **named)

    checkpoint_reader.plain_read, Checkpoint._read = plain, read  # type: ignore[attr-defined,method-assign]


def read_as_before() -> None:
    checkpoint_reader.SMALL_BYTES = 256 << 10
    Checkpoint._read = checkpoint_reader.plain_read  # type: ignore[attr-defined,method-assign]


# --------------------------------------------------------------------------------------- the tests


def stored(pool: Pool, job: dict[str, Any], run: Path) -> tuple[list[WorkerId], Resume]:
    """New sessions of two workers, and a checkpoint of those before."""
    workers = pool.open(job | {"steps": 4}, run, n=2)  # that of the last step must be
    pool.enter(plan(1, Layout(dp_shard=2), workers, 12))
    pool.wait(lambda: sum(e.step == 4 for e in pool.events(ShardStored)) == 2, "a checkpoint")
    pool.quiesced(1, 2)
    uri = checkpoint_writer.commit(open_storage(str(run)), 4, 1, world_size=2, epoch=1, meta={})
    return pool.open(job, run, n=2), Resume("durable", 4, uri=uri)


def test_an_abort_ends_a_slow_read(pool: Pool, tmp_path: Path) -> None:
    workers, resume = stored(pool, job_of("tiny.py", steps=6), tmp_path)
    for worker in workers:
        pool.patch(worker, read_slowly)
    try:
        pool.enter(plan(2, Layout(dp_shard=2), workers, 12, resume=resume))
        reads = [beat.progress for _ in range(10) for beat in [_loading(pool, workers[0])]]
        assert reads == sorted(reads) and reads[0] < reads[-1], "it makes progress"
        asked_s = time.monotonic()
        for worker in workers:
            pool.order(worker, Abort(2))
        pool.quiesced(2, 2)
        left = [s for s, _, event in pool.log if isinstance(event, Quiesced)]
        assert max(left) - asked_s < READ_S + 3.0, "reading it all takes 20 s"
        assert not pool.events(WorkerFailed)
    finally:
        for worker in workers:
            pool.patch(worker, read_as_before)


def _loading(pool: Pool, worker: WorkerId) -> Any:
    """What it says of itself READ_S later, once it reads."""
    time.sleep(READ_S)  # sleeps: another read is done
    found: list[Any] = []

    def loads() -> bool:
        found[:] = pool.beats([worker]).values()
        return bool(found[0].phase == "loading")

    pool.wait(loads, "reading")
    return found[0]


def test_others_wait_for_whom_storage_is_slow(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("tiny.py", steps=6)
    workers, resume = stored(pool, job, tmp_path)
    monkeypatch.setattr(worker_pool, "TIMEOUT_S", SHORT_S)
    pool.patch(workers[1], fill_late)
    pool.enter(plan(2, Layout(dp_shard=2), workers, 12, resume=resume))
    assert pool.entered(2).step == 4
    pool.quiesced(2, 2)
    assert not pool.events(WorkerFailed)


def test_who_only_sends_waits_for_whom_reads_frozen_weights(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("tiny.py", steps=200)
    workers = pool.open(job, tmp_path, n=3)
    first = plan(1, Layout(dp_shard=2), workers, 12)
    pool.enter(first)
    pool.entered(1)
    monkeypatch.setattr(worker_pool, "TIMEOUT_S", SHORT_S)
    pool.patch(workers[2], read_frozen_late)
    pool.enter(plan(2, Layout(dp_shard=2), workers[1:], 12, resume=live(first)))
    pool.entered(2)
    assert digests_agree(pool, 2)
    assert not pool.events(WorkerFailed)


# ------------------------------------------------------------------------------------ after a loss


@pytest.fixture
def nccl_pool() -> Iterator[NcclLikePool]:
    pool = NcclLikePool(4)
    yield pool
    pool.close()


def test_messages_of_a_move_begin_when_all_have_come(
    nccl_pool: NcclLikePool, tmp_path: Path
) -> None:
    """NCCL connects a pair of ranks in the call of its first message, and waits there for the other
    no longer than a bound."""
    assert nccl_like.SET_UP_S < LATE_S
    pool, job = nccl_pool, job_of("tiny.py", steps=16)
    first = begin(pool, job, tmp_path, Layout(dp_shard=3))
    workers = pool.workers
    pool.patch(workers[3], read_frozen_late)
    pool.kill(workers[1])
    staying = [workers[0], workers[2]]
    second = recover(pool, first, Layout(dp_shard=3), [*staying, workers[3]], staying)
    pool.quiesced(2, 3)
    assert digests_agree(pool, 2)
    loss_curve_agrees(pool, job, resumed=second.resume.step)
    assert {e.kind for e in pool.events(WorkerFailed)} <= {"collective"}
    assert not pool.events(WorkerFailed, 2)
