"""Behind the steps: what is left out, what fails with its numbers, and who writes for whom."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from support.worker.plans import plan as plan_of

from elastic.errors import StateLost
from elastic.reshard.rank_boxes import boxes, owned_boxes, state_specs
from elastic.storage import LocalStorage, open_storage
from elastic.types import (
    CopyFailed,
    DigestChecked,
    DigestPart,
    Event,
    Job,
    Layout,
    ModelProfile,
    OptimizerSpec,
    Plan,
    Progress,
    ShardStored,
    TensorSpec,
    WorkerId,
)
from elastic.types.orders import Rendezvous
from elastic.worker.checkpoint import (
    checkpoint_format,
    checkpoint_index,
    checkpoint_saver,
    checkpoint_writer,
)
from elastic.worker.checkpoint.checkpoint_saver import Saving, Snapshot
from elastic.worker.checkpoint.disk_space import MARGIN_BYTES, OVERHEAD, NoRoom, check_space
from elastic.worker.hosting.aggregate import LATE_LEAST_S, OPEN_COPIES, CheckpointParts, Gather
from elastic.worker.hosting.checkpoint_orders import write_late_parts
from elastic.worker.session.takeover import tell_digests
from elastic.worker.session.workplace import EnterOrder
from elastic.worker.state.content_digest import digest
from elastic.worker.state.host_copy import Tensors
from elastic.worker.state.train_state import Held

MODEL = ModelProfile(
    4, 0, (TensorSpec("w", (8, 3), "float32", block=0),), (OptimizerSpec(("exp_avg",), ("step",)),)
)
ME = WorkerId("a", 0)


def tensors_of(plan: Plan, rank: int, value: float = 1.0) -> Tensors:
    mine = boxes(MODEL, plan.layout, plan.layers, rank)
    return {
        box.fqn: (box, torch.full(box.sizes, value, dtype=getattr(torch, box.dtype)))
        for box in mine
    }


class Rank:
    """A worker's saving without its worker."""

    def __init__(self, root: Path, plan: Plan, rank: int, **job: Any) -> None:
        self.told: list[Event] = []
        self.news = threading.Condition()
        self.plan, self.rank, self.step = plan, rank, 0
        self.storage = open_storage(root)
        self.place: Any = SimpleNamespace(
            me=ME,
            storage=self.storage,
            profile=MODEL,
            job=Job(**job),
            held=[],
            at_phase=lambda phase, step: None,
            report=self.report,
        )
        self.saving = Saving(self.place)

    def report(self, event: Event) -> None:
        with self.news:
            self.told.append(event)
            self.news.notify_all()

    def snapshot(self) -> Tensors:
        return tensors_of(self.plan, self.rank)

    def save(self, step: int, **how: Any) -> None:
        self.step = step
        self.saving.save(self.plan, self, **how)  # type: ignore[arg-type]

    def finish(self, n: int) -> list[Event]:
        """As `wait`, and the thread is free again."""
        found = self.wait(n)
        assert self.saving.writing is not None
        self.saving.writing.result(120)
        return found

    def wait(self, n: int) -> list[Event]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.told) >= n, 120), self.told
            return self.told[:n]


def four(layout: Layout | None = None) -> Plan:
    return plan_of(1, layout or Layout(dp_shard=2), [WorkerId(name, 0) for name in "abcd"], 8)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing a shard waits for the event."""
    go, real = threading.Event(), checkpoint_writer.write_shard

    def waits(*arguments: Any, **named: Any) -> int:
        assert go.wait(120)
        return real(*arguments, **named)

    monkeypatch.setattr(checkpoint_saver.checkpoint_writer, "write_shard", waits)
    yield go
    go.set()


def test_without_a_driver_the_lowest_rank_commits_once_all_have_written(tmp_path: Path) -> None:
    """It waits for the others; they commit nothing."""
    plan = plan_of(1, Layout(dp_shard=2), [WorkerId(name, 0) for name in "ab"], 8)
    ranks = [Rank(tmp_path, plan, rank) for rank in range(2)]
    assert ranks[0].saving.commit_alone(3, 60) is None, "nothing was saved"
    ranks[0].save(5)
    ranks[0].finish(1)
    with pytest.raises(StateLost, match=r"rank-1\.json: missing"):
        ranks[0].saving.commit_alone(3, 0.0)
    ranks[1].save(5)
    assert ranks[1].saving.commit_alone(3, 60) is None
    uri = ranks[0].saving.commit_alone(3, 60)
    (found,) = checkpoint_index.find(ranks[0].storage)
    assert (found.uri, found.step, found.epoch) == (uri, 5, 3) and found.meta["orphan"]


def test_a_copy_that_comes_too_early_is_left_out(tmp_path: Path, slow: threading.Event) -> None:
    on = Rank(tmp_path, four(), 0)
    on.save(10)
    on.save(20)
    skipped = CopyFailed(1, 20, "the copy of step 10 is still being written", skipped=True, rank=0)
    assert on.wait(1) == [skipped]
    slow.set()
    stored = on.wait(2)[1]
    assert isinstance(stored, ShardStored) and stored.step == 10


def test_parts_stand_with_the_epoch_that_ordered_their_generation(tmp_path: Path) -> None:
    """Also those that are written for another rank."""
    ranks = [Rank(tmp_path, four(Layout(dp_replicate=2)), rank) for rank in range(2)]
    for on in ranks:
        on.saving.entered(1, 7)
        on.saving.entered(2, 8)  # nothing of it is written yet
    ranks[0].save(10)
    (stored,) = ranks[0].finish(1)
    ranks[0].saving.write_for(ranks[0].plan, 10, 1)
    (_, other) = ranks[0].wait(2)
    assert isinstance(stored, ShardStored) and isinstance(other, ShardStored)
    assert (stored.ordered, other.ordered, other.rank) == (7, 7, 1)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert folder.name == "step-00000010.g0001.e0007"


def test_who_hears_of_no_driver_saves_nothing_that_nobody_would_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, now_s = Rank(tmp_path, four(), 0), [1000.0]
    monkeypatch.setattr(checkpoint_saver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    on.saving.heard_at_s = 1000.0
    now_s[0] += checkpoint_saver.UNHEARD_S + 1
    on.save(10)
    why = "no driver was heard of for 31 s"
    assert on.wait(1) == [CopyFailed(1, 10, why, skipped=True, rank=0)]
    assert not (tmp_path / "checkpoints").exists()
    on.save(20, must=True)  # as it leaves
    assert isinstance(on.finish(2)[1], ShardStored)
    on.saving.heard_at_s = now_s[0]
    on.save(30)
    assert isinstance(on.finish(3)[2], ShardStored)


def test_who_writes_for_minutes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on, clock = Rank(tmp_path, four(Layout()), 0), count(1000.0, 61.0)
    monkeypatch.setattr(checkpoint_saver, "time", SimpleNamespace(monotonic=clock.__next__))
    on.save(10, must=True)
    on.finish(1)
    *said, stored = on.told
    assert isinstance(stored, ShardStored)
    n_tensors = len(state_specs(MODEL))
    assert said == [Progress(ME, 1, "saving")] * n_tensors, "as each takes more than a minute"


def test_that_ranks_write_is_passed_on_seldom_however_many_they_are() -> None:
    gather, at = gathering(lambda parts: None), (0.0, 1.0, 29.0, 31.0, 60.0, 62.0)
    for phase in ("saving", "loading"):
        said = Progress(ME, 1, phase)
        assert [len(gather.add(ME, said, at_s)) for at_s in at] == [1, 0, 0, 1, 0, 1]


def test_a_copy_that_must_be_is_written_after_the_one_before(
    tmp_path: Path, slow: threading.Event
) -> None:
    on = Rank(tmp_path, four(), 0)
    on.save(10)
    on.save(20, must=True)
    slow.set()
    assert [(type(e), e.step) for e in on.wait(2)] == [(ShardStored, 10), (ShardStored, 20)]  # type: ignore[attr-defined]


def test_the_host_copy_is_given_back(tmp_path: Path, slow: threading.Event) -> None:
    class Counted(Snapshot):
        released = 0

        def release(self) -> None:
            self.released += 1

    on = Rank(tmp_path, four(), 0)
    first, early = Counted(on.snapshot()), Counted(on.snapshot())
    on.save(10, copy=first)
    on.save(20, copy=early)
    assert (first.released, early.released) == (0, 1)
    slow.set()
    on.wait(2)
    assert on.saving.writing is not None
    on.saving.writing.result(120)
    assert first.released == 1


def test_a_disk_without_room_is_seen_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = Rank(tmp_path, four(), 0)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 60 << 20)
    on.save(10)
    failed = on.wait(1)[0]
    assert isinstance(failed, CopyFailed) and "rank 0: " in failed.reason
    assert "0.06 GB are free, the copy of step 10 needs 0.07 GB" in failed.reason
    assert on.storage.list() == []


def test_what_another_rank_is_writing_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole checkpoint fits; half of it is there already, under a temporary name."""
    storage, half = LocalStorage(tmp_path), 50 << 20
    free_bytes = [int(2 * half * OVERHEAD) + MARGIN_BYTES + 1]
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: free_bytes[0])
    check_space(storage, (10, 1), (half, 2 * half))
    with storage.create("checkpoints/step-00000010.g0001/__0_0.distcp"):
        free_bytes[0] -= half
        check_space(storage, (10, 1), (half, 2 * half))
        with pytest.raises(NoRoom):  # of another one no rank has asked
            check_space(storage, (20, 1), (half, 2 * half))


def test_a_disk_that_runs_full_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint stays, nothing of the new one does, and the next one is written
    again."""
    on = Rank(tmp_path, four(Layout()), 0)
    on.save(10)
    on.finish(1)
    uri = checkpoint_writer.commit(on.storage, 10, 1, world_size=1, epoch=1, meta={})
    real = LocalStorage.create

    @contextmanager
    def full(self: LocalStorage, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        with real(self, key, if_absent) as file:
            yield file
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path(key)))

    monkeypatch.setattr(LocalStorage, "create", full)
    on.save(20)
    failed = on.finish(2)[1]
    assert isinstance(failed, CopyFailed) and failed.step == 20
    assert (
        failed.reason.startswith("rank 0: No space left on device: ")
        and "step-00000020" in failed.reason
    )
    monkeypatch.undo()
    assert [
        path.name for path in (tmp_path / "checkpoints" / "step-00000020.g0001").iterdir()
    ] == []
    assert checkpoint_index.verify(uri) == [] and [
        found.step for found in checkpoint_index.find(on.storage)
    ] == [10]
    on.save(30)
    assert isinstance(on.wait(3)[2], ShardStored)


def test_an_error_that_nobody_has_foreseen_is_told_with_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what nobody writes any more is waited for."""

    def fails(*arguments: Any, **named: Any) -> int:
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    on = Rank(tmp_path, four(Layout()), 0)
    monkeypatch.setattr(checkpoint_saver.checkpoint_writer, "write_shard", fails)
    on.save(10)
    why = "rank 0: RuntimeError: CUDA error: an illegal memory access"
    assert on.wait(1) == [CopyFailed(1, 10, why, rank=0)]


@pytest.mark.parametrize(
    ("quota_gb", "stored", "held", "advice"),
    [
        (10e-6, [10, 20], "2 copies hold", "; raise it, or lower keep_last"),
        (4e-6, [10], "1 copy holds", "; raise it"),
    ],
)
def test_a_quota_is_kept(
    tmp_path: Path, quota_gb: float, stored: list[int], held: str, advice: str
) -> None:
    plan = four(Layout())
    on = Rank(tmp_path, plan, 0, storage_quota_gb=quota_gb)
    for n, step in enumerate(stored, 1):
        on.save(step)
        assert isinstance(on.finish(n)[-1], ShardStored)
        checkpoint_writer.commit(on.storage, step, 1, world_size=1, epoch=1, meta={})
    on.save(30)
    failed = on.wait(len(stored) + 1)[-1]
    assert isinstance(failed, CopyFailed)
    assert f"={quota_gb:g}: {held} 0.00 GB, the copy of step 30 needs" in failed.reason
    assert failed.reason.endswith(advice)
    assert [found.step for found in checkpoint_index.find(on.storage)] == stored[::-1]


# ------------------------------------------------------------------------------- writing for others


def test_a_replica_writes_the_part_of_a_writer_that_is_gone(tmp_path: Path) -> None:
    plan = four(Layout(dp_replicate=2, dp_shard=2))
    ranks = [Rank(tmp_path, plan, rank) for rank in range(4)]
    for on in ranks[1:]:
        on.save(10)
        on.wait(1)
    folder = tmp_path / "checkpoints" / "step-00000010.g0001"
    with pytest.raises(checkpoint_format.Damaged, match=r"rank-0\.json: missing"):
        checkpoint_writer.commit(ranks[1].storage, 10, 1, world_size=4, epoch=1, meta={})
    ranks[2].saving.write_for(plan, 10, 0)  # rank 2 holds what rank 0 owns
    stored = ranks[2].wait(2)[1]
    assert isinstance(stored, ShardStored) and stored.rank == 0 and stored.n_bytes > 0
    before = (folder / "__0_0.distcp").read_bytes()
    ranks[0].save(10)  # it was only slow
    ranks[0].wait(1)
    assert (folder / "__0_0.distcp").read_bytes() == before
    assert (
        checkpoint_index.verify(
            checkpoint_writer.commit(ranks[1].storage, 10, 1, world_size=4, epoch=1, meta={})
        )
        == []
    )


def test_a_partner_writes_from_its_peer_copy(tmp_path: Path) -> None:
    plan = four()
    on = Rank(tmp_path, plan, 1)
    on.place.held = [Held(1, 0, 10, "peer", plan.layout, plan.layers, tensors_of(plan, 0, 7.0))]
    on.saving.write_for(plan, 10, 0)
    stored = on.wait(1)[0]
    assert isinstance(stored, ShardStored) and (stored.rank, stored.step) == (0, 10)
    on.save(10)
    on.wait(2)
    checkpoint = checkpoint_index.open_checkpoint(
        checkpoint_writer.commit(on.storage, 10, 1, world_size=2, epoch=1, meta={})
    )
    for box in owned_boxes(MODEL, plan.layout, plan.layers, 0):
        assert bool((checkpoint.read(box) == 7).all())


def test_who_does_not_hold_the_boxes_says_so(tmp_path: Path) -> None:
    on = Rank(tmp_path, four(), 1)
    on.saving.write_for(four(), 10, 0)
    failed = on.wait(1)[0]
    assert (
        isinstance(failed, CopyFailed)
        and "a/0 holds no boxes of rank 0 of generation 1 at step 10" in failed.reason
    )


def test_a_replica_that_has_gone_on_does_not_write_an_older_step_from_what_it_has_now(
    tmp_path: Path,
) -> None:
    plan = four(Layout(dp_replicate=2, dp_shard=2))
    on = Rank(tmp_path, plan, 2)
    on.save(11)
    on.wait(1)
    on.saving.write_for(plan, 10, 0)
    failed = on.wait(2)[1]
    assert (
        isinstance(failed, CopyFailed)
        and "holds no boxes of rank 0 of generation 1 at step 10" in failed.reason
    )


# ---------------------------------------------------------------------------------------- adding up


def part(rank: int, step: int = 10, seconds: float = 1.0) -> ShardStored:
    return ShardStored(1, step, rank, 100, seconds)


def gathering(complete: Callable[[CheckpointParts], None]) -> Gather:
    gather = Gather(complete, lambda node_id: 1)
    gather.expect(four(Layout(dp_shard=4)))
    return gather


def test_a_copy_is_complete_with_its_last_part() -> None:
    done: list[CheckpointParts] = []
    gather = gathering(done.append)
    for rank in (0, 1, 1, 3, 2, 2):
        assert gather.add(ME, part(rank)) == []
    assert [sorted(parts.stored) for parts in done] == [[0, 1, 2, 3]]


def test_parts_that_are_late_are_named_twice_at_most() -> None:
    gather = gathering(lambda parts: None)
    for rank in (0, 1, 3):
        gather.add(ME, part(rank, seconds=20.0), at_s=100.0)
    assert gather.late(150.0) == []
    assert [rank for _, rank in gather.late(161.0)] == [2]
    assert gather.late(170.0) == []
    assert [parts.asked for parts, _ in gather.late(230.0)] == [{2: 2}]
    assert gather.late(1000.0) == []
    assert LATE_LEAST_S < 60.0


def test_nobody_is_asked_for_parts_of_a_copy_that_a_later_generation_has_made_whole() -> None:
    done: list[CheckpointParts] = []
    gather = gathering(done.append)
    gather.add(ME, part(0))
    assert [rank for _, rank in gather.late(100.0)] == [1, 2, 3]
    gather.expect(replace(four(Layout(dp_shard=4)), generation=part(0).generation + 1))
    for rank in range(4):
        gather.add(ME, replace(part(rank), generation=part(0).generation + 1))
    assert len(done) == 1 and gather.late(1000.0) == []


@pytest.mark.parametrize("step", [9, 10])
def test_a_late_part_of_an_aborted_generation_leaves_what_the_next_one_writes_alone(
    step: int,
) -> None:
    done: list[CheckpointParts] = []
    gather = gathering(done.append)
    for rank in range(3):
        gather.add(ME, part(rank))
    gather.expect(replace(four(Layout(dp_shard=4)), generation=2))
    told = [gather.add(ME, replace(part(rank, step), generation=2)) for rank in range(3)]
    told.append(gather.add(ME, part(3)))
    told.append(gather.add(ME, replace(part(3, step), generation=2)))
    assert told == [[]] * 5
    assert [(parts.plan.generation, parts.step) for parts in done] == [(1, 10), (2, step)]


def test_a_copy_fails_once_and_its_parts_are_forgotten() -> None:
    gather = gathering(lambda parts: pytest.fail("it is not whole"))
    for rank in range(3):
        gather.add(ME, part(rank))
    failed = CopyFailed(1, 10, "rank 3: no room")
    assert gather.add(ME, failed) == [failed]
    assert gather.add(ME, CopyFailed(1, 10, "rank 2: no room")) == []
    assert gather.add(ME, part(3)) == []
    assert gather.late(1e9) == []


def test_who_was_asked_in_vain_fails_no_copy() -> None:
    done: list[CheckpointParts] = []
    gather = gathering(done.append)
    for rank in range(3):
        gather.add(ME, part(rank))
    write_late_parts(gather.late(100.0), [ME], lambda worker, order: None)
    assert gather.add(ME, CopyFailed(1, 10, "a/0 holds no boxes of rank 3", rank=3)) == []
    gather.add(ME, part(3))
    assert len(done) == 1


def test_a_part_that_is_late_and_that_its_rank_cannot_store_fails_the_copy() -> None:
    """Nobody else holds its boxes, so nobody was ordered to write them."""
    gather = gathering(lambda parts: pytest.fail("it is not whole"))
    for rank in range(3):
        gather.add(ME, part(rank))
    assert [rank for _, rank in gather.late(11.0)] == [3]
    failed = CopyFailed(1, 10, "rank 3: no room", rank=3)
    assert gather.add(WorkerId("d", 0), failed) == [failed]
    assert gather.add(WorkerId("d", 0), failed) == []


def test_it_fails_only_once_nobody_writes_it_any_more() -> None:
    """Rank 2 holds what rank 3 does."""
    plan, sent = four(Layout(dp_replicate=2, dp_shard=2)), list[WorkerId]()
    gather = Gather(lambda parts: None, lambda node_id: 1)
    gather.expect(plan)
    for rank in (0, 1, 2):
        gather.add(plan.ranks[rank], part(rank))
    write_late_parts(gather.late(100.0), plan.ranks, lambda worker, order: sent.append(worker))
    (other,) = sent
    failed = CopyFailed(1, 10, "rank 3: no room", rank=3)
    assert gather.add(plan.ranks[3], failed) == []
    assert gather.add(other, replace(failed, reason="rank 3: no room there either")) == [failed]


def test_a_part_that_comes_twice_begins_no_other_copy() -> None:
    done: list[CheckpointParts] = []
    gather = gathering(done.append)
    for rank in (0, 1, 2, 3, 3):
        gather.add(ME, part(rank))
    assert len(done) == 1 and gather.late(1000.0) == []


def test_parts_of_old_copies_are_let_go_and_each_is_said_to_have_failed() -> None:
    gather, told = gathering(lambda parts: None), list[Event]()
    for step in range(10, 10 + 3 * OPEN_COPIES):
        told += gather.add(ME, part(0, step))
    assert len(gather._copies) == OPEN_COPIES
    why = "ranks 1, 2, 3 never reported a stored part"
    assert told == [CopyFailed(1, step, why, rank=1) for step in range(10, 10 + 2 * OPEN_COPIES)]


def test_an_unfinished_copy_of_an_older_step_fails_with_the_next_one_that_is_whole() -> None:
    gather = gathering(lambda parts: None)
    for rank in (0, 1, 2):
        gather.add(ME, part(rank))
        assert gather.add(ME, part(rank, 20)) == []
    why = "rank 3 never reported a stored part"
    assert gather.add(ME, part(3, 20)) == [CopyFailed(1, 10, why, rank=3)]


# ------------------------------------------------------------------------- is the content the same?


def test_content_is_compared_once_all_have_told_their_part() -> None:
    for after, equal in ((5, True), (6, False)):
        gather = Gather(lambda parts: None, lambda node: 1)
        parts = [
            DigestPart(3, i, 3, before, new, 10)
            for i, (before, new) in enumerate(((2, None), (1, 1), (0, after - 3)))
        ]
        assert [gather.add(ME, part) for part in parts[:2]] == [[], []]
        assert gather.add(ME, parts[2]) == [DigestChecked(3, equal, 30)]


def test_what_replicas_have_read_from_storage_counts_once() -> None:
    """The digest that was stored has each element once, however many ranks hold it."""
    plan = plan_of(2, Layout(dp_replicate=2), [WorkerId(name, 0) for name in "ab"], 8)
    told: list[DigestPart] = []
    place: Any = SimpleNamespace(profile=MODEL, report=told.append)
    whole = tensors_of(plan, 0)
    stored = digest(whole, {spec.fqn: spec.shape for spec in state_specs(MODEL)}, whole)
    for rank in range(2):
        order = EnterOrder(plan, rank, Rendezvous(plan.ranks, ("", 0)))
        read: Future[int | None] = Future()
        read.set_result(stored if rank == 0 else None)
        copy: Any = SimpleNamespace(wait=partial(tensors_of, plan, rank), release=lambda: None)
        tell_digests(place, order, read, gave=False, after=copy)
    gather = Gather(lambda parts: None, lambda node: 1)
    assert [event for part in told for event in gather.add(ME, part)] == [
        DigestChecked(2, True, sum(p.n_bytes for p in told))
    ]
    assert [part.before for part in told] == [stored, None] and sum(p.n_bytes for p in told) == sum(
        box.n_bytes for box, _ in whole.values()
    )
