"""The thread beside the loop that commits, removes and cleans up, over storage that is slower than
the orders come."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cluster.stage import plan
from support.waiting import until

from elastic.storage import open_storage
from elastic.types import Box, CopyFailed, CopyRemoved, CopyStored, ShardStored, WorkerId
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_format import SAMPLES
from elastic.worker.hosting.aggregate import CheckpointParts
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter

PLAN = plan(1, [WorkerId("a", 0)])


class SlowStorage:
    """Stands in for durable.* : each call is written down; the first commit waits until it is let
    go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, object]] = []
        self.go, self.busy = threading.Event(), threading.Event()
        monkeypatch.setattr(
            checkpoint_index,
            "remove_copy",
            lambda storage, uri, epoch: self.calls.append(("remove", uri)),
        )
        monkeypatch.setattr(
            checkpoint_index,
            "clean",
            lambda storage, epoch, below, *, ordered, spared: (
                self.calls.append(("clean", below)) or []
            ),
        )

    def commit(self, parts: CheckpointParts, digest: int) -> str:
        self.busy.set()
        assert self.go.wait(60)
        self.calls.append(("commit", parts.step))
        return f"step-{parts.step}"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStorage:
    return SlowStorage(monkeypatch)


def parts(step: int) -> CheckpointParts:
    return CheckpointParts(PLAN, step, {0: ShardStored(1, step, 0, 8, 0.1, 0.0, 1)})


def test_commits_go_first_the_newest_before_the_others_and_cleaning_is_done_once(
    tmp_path: Path, slow: SlowStorage
) -> None:
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=slow.commit)
    copies.clean()
    copies.commit(parts(5))
    assert slow.busy.wait(60)  # from here on all that is ordered waits
    copies.remove("step-1")
    copies.commit(parts(10))
    copies.remove("step-2")
    copies.commit(parts(15))
    slow.go.set()
    copies.close()
    commits = [("commit", 5), ("commit", 15), ("commit", 10)]
    assert slow.calls == [
        ("clean", None),
        *commits,
        ("remove", "step-1"),
        ("remove", "step-2"),
        ("clean", (15, 1)),
    ]
    assert [event.copy.step for event in copies.news() if isinstance(event, CopyStored)] == [
        5,
        15,
        10,
    ]


def test_a_commit_that_does_not_come_back_is_said_once_and_may_still_be_done(
    tmp_path: Path, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=slow.commit)
    copies.commit(parts(5))
    assert slow.busy.wait(10.0)
    copies.commit(parts(10))
    assert copies.news() == []
    monkeypatch.setattr("elastic.worker.hosting.checkpoint_orders.OVERDUE_S", 0.0)
    (failed,) = copies.news()
    assert isinstance(failed, CopyFailed) and (failed.generation, failed.step) == (1, 10)
    assert failed.reason == f"not committed: {tmp_path} has not answered for 0 s"
    assert copies.news() == []
    slow.go.set()
    copies.close()
    assert [event.copy.step for event in copies.news() if isinstance(event, CopyStored)] == [5, 10]


def test_what_nobody_thought_of_is_a_copy_that_failed_and_the_next_one_is_stored(
    tmp_path: Path, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.go.set()
    asked: list[int] = []

    def odd(parts: CheckpointParts, digest: int) -> str:
        asked.append(parts.step)
        if parts.step == 5:
            raise ZeroDivisionError("odd")
        return slow.commit(parts, digest)

    def odder(*_: object) -> None:
        raise ZeroDivisionError("odder")

    monkeypatch.setattr(checkpoint_index, "clean", odder)
    monkeypatch.setattr(checkpoint_index, "remove_copy", odder)
    monkeypatch.setattr("elastic.worker.hosting.checkpoint_orders.REMOVE_WAIT_S", 0.0)
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=odd)
    copies.clean()
    copies.remove("step-1")
    copies.commit(parts(5))
    copies.close()
    found = copies.news()
    assert [(e.step, e.reason) for e in found if isinstance(e, CopyFailed)] == [
        (5, "not committed: ZeroDivisionError: odd")
    ]
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=odd)
    copies.clean()
    copies.commit(parts(6))
    copies.close()
    assert [e.copy.step for e in copies.news() if isinstance(e, CopyStored)] == [6]


@pytest.mark.parametrize("idle", [False, True])
def test_what_could_not_be_removed_is_after_the_next_commit_or_when_idle(
    tmp_path: Path, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Else it would count for the quota, and nobody would remember it."""
    monkeypatch.setattr("elastic.worker.hosting.checkpoint_orders.REMOVE_WAIT_S", 0.0)
    slow.go.set()
    tries: list[str] = []

    def refuse(storage: object, uri: str, epoch: int) -> None:
        tries.append(uri)
        if len(tries) <= 3:
            raise OSError("storage is away")

    monkeypatch.setattr(checkpoint_index, "remove_copy", refuse)
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=slow.commit)
    if idle:  # no copy is begun where the quota is used up
        monkeypatch.setattr("elastic.worker.hosting.checkpoint_orders.REMOVE_AGAIN_S", 0.01)
    copies.remove("step-1")
    until(lambda: len(tries) >= 3, "three tries")
    if not idle:
        copies.commit(parts(5))
    until(lambda: len(tries) == 4, "another one")
    copies.close()
    assert tries == ["step-1"] * 4
    assert [event.uri for event in copies.news() if isinstance(event, CopyRemoved)] == ["step-1"]


def test_closing_waits_a_bounded_time_and_holds_no_exit_up(
    tmp_path: Path, slow: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.worker.hosting.checkpoint_orders.CLOSE_MOST_S", 0.1)
    copies = CheckpointCommitter(open_storage(str(tmp_path)), 1, {}, write=slow.commit)
    copies.commit(parts(5))
    assert slow.busy.wait(10.0)
    copies.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "durable-copies"]
    assert thread.daemon
    slow.go.set()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_slow_commit_leaves_alone_what_a_newer_generation_is_saving(tmp_path: Path) -> None:
    """It has gone back to an older step."""
    storage = open_storage(tmp_path)
    items = [(Box("w", (0,), (4,), "float32"), torch.arange(4.0))]
    for step, generation in ((150, 2), (160, 4), (200, 3)):
        checkpoint_writer.write_shard(storage, step, generation, rank=0, items=items, ordered=1)
    copies = CheckpointCommitter(storage, 1, {})
    shard = ShardStored(3, 200, 0, 8, 0.1, ordered=1)
    copies.commit(CheckpointParts(replace(PLAN, generation=3), 200, {0: shard}))
    copies.close()
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert there == ["step-00000160.g0004.e0001", "step-00000200.g0003.e0001"]


def test_a_marker_says_which_samples_its_steps_were_trained_on(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for step in (5, 6):
        checkpoint_writer.write_shard(
            storage, step, 1, rank=0, items=[(Box("w", (0,), (4,), "float32"), torch.arange(4.0))]
        )
    copies = CheckpointCommitter(storage, 1, {}, digests={5: "0123456789abcdef"})
    found = []
    for step in (5, 6):  # of step 6 the loop knows none
        copies.commit(parts(step))
        stored = copies._news.get(timeout=60)
        assert isinstance(stored, CopyStored)
        found.append((stored.copy.samples, checkpoint_index.find(storage)[0].meta.get(SAMPLES)))
    copies.close()
    assert found == [("0123456789abcdef", "0123456789abcdef"), ("", None)]
