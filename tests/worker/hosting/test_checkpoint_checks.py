"""Checkpoints are read back beside the run."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

from elastic.policy.copies.retention import removal
from elastic.policy.state.fold import fold
from elastic.policy.state.state import State
from elastic.storage import open_storage
from elastic.types import (
    Box,
    Copy,
    CopyDamaged,
    CopyReadBegun,
    CopyStored,
    CopyVerified,
    Decided,
    Event,
    Job,
    Layout,
    Plan,
    RemoveCopy,
    ShardStored,
    WorkerId,
)
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.hosting import checkpoint_checks
from elastic.worker.hosting.aggregate import CheckpointParts
from elastic.worker.hosting.checkpoint_checks import CopyChecks, Paced, ReadPace
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter
from elastic.worker.hosting.thread_boundary import waiting

PLAN = Plan(1, Layout(), (WorkerId("a", 0),), (8,), (4,))


def copy(step: int) -> Copy:
    return Copy(step, "durable", 1, Layout(), uri=f"u{step}", n_bytes=8)


class Storage:
    """Stands in for durable.verify: says which copy is read, and waits until it is let go."""

    def __init__(self) -> None:
        self.read, self.go = queue.SimpleQueue[str](), queue.SimpleQueue[list[str] | Exception]()
        self.news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.checks = CopyChecks(self.news.put, self.verify)

    def verify(self, uri: str, paced: Paced) -> list[str]:
        self.read.put(uri)
        said = self.go.get(timeout=60)
        if isinstance(said, Exception):
            raise said
        return said


def test_the_newest_is_next_and_what_is_wrong_is_said() -> None:
    on = Storage()
    on.checks.check(copy(5))
    assert on.read.get(timeout=60) == "u5"
    for step in (10, 15):
        on.checks.check(copy(step))
    on.go.put([])
    assert on.news.get(timeout=60) == CopyReadBegun("u5")
    assert on.news.get(timeout=60) == CopyVerified("u5", 8, pytest.approx(0, abs=60))
    assert on.read.get(timeout=60) == "u15"
    assert on.news.get(timeout=60) == CopyReadBegun("u15")
    on.go.put(["u15/__0_0.distcp: altered"])
    assert on.news.get(timeout=60) == CopyDamaged("u15", "u15/__0_0.distcp: altered")
    on.checks.close()


def test_one_that_was_removed_meanwhile_is_not_damaged_and_silent_storage_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_checks, "AGAIN_S", 0.01)
    on = Storage()
    on.checks.check(copy(5))
    assert on.read.get(timeout=60) == "u5"
    on.checks.removed("u5")
    on.checks.check(copy(10))
    on.go.put(["missing"])
    assert on.read.get(timeout=60) == "u10"
    on.go.put(TimeoutError("no answer"))
    assert on.read.get(timeout=60) == "u10"
    on.go.put([])
    begun = [on.news.get(timeout=60) for _ in range(2)]
    assert begun == [CopyReadBegun("u5"), CopyReadBegun("u10")], "that it is tried again is no news"
    event = on.news.get(timeout=60)
    assert isinstance(event, CopyVerified) and event.uri == "u10"
    on.checks.close()


def test_a_reading_that_lasts_three_checkpoints_comes_to_its_end() -> None:
    """The run keeps the last two: the copy that was read was removed each time before that was
    done."""
    on = Storage()
    job = Job.from_plain({"steps": 1000, "global_batch": 8, "keep_last": 2, "verify_copies": True})
    state = State(phase="running", run="r", job=job, plan=PLAN, generation=1)

    def heard(*events: Event) -> None:
        nonlocal state
        for event in events:
            state = fold(state, event, 0.0)
        decision = removal(state)
        for action in decision.actions:
            assert isinstance(action, RemoveCopy)
            on.checks.removed(action.uri)
        state = fold(state, Decided(decision), 0.0)

    for step in range(1, 10):
        heard(CopyStored(copy(step)))
        on.checks.check(copy(step))
        if step % 3 == 0:
            on.go.put([])
        if step == 1 or step % 3 == 0:
            assert on.read.get(timeout=60) == f"u{step}"
            heard(*waiting(on.news))
    on.checks.close()
    assert "u6" in state.verified
    assert [copy.step for copy in state.durable] == [9, 8, 6]


def test_reading_keeps_its_pace_and_ends_with_the_driver() -> None:
    now_s, waits = [100.0], list[float]()

    def wait(wait_s: float) -> bool:
        waits.append(wait_s)
        now_s[0] += wait_s
        return False

    pace = ReadPace(10.0, wait, lambda: now_s[0])
    for _ in range(4):
        pace.read(5)
    assert sum(waits) == pytest.approx(2.0)
    now_s[0] += 1000.0  # storage was slower: no burst of a thousand seconds follows
    waits.clear()
    for _ in range(20):
        pace.read(5)
    assert sum(waits) == pytest.approx(9.0)
    ended = threading.Event()
    ended.set()
    with pytest.raises(InterruptedError):
        ReadPace(10.0, ended.wait).read(5)


def test_a_copy_whose_bytes_changed_after_it_was_written_is_found(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    copies = CheckpointCommitter(storage, 1, {}, verify=True)
    for step in (5, 10):
        checkpoint_writer.write_shard(
            storage, step, 1, rank=0, items=[(Box("w", (0,), (64,), "float32"), torch.arange(64.0))]
        )
    shard = next((tmp_path / "checkpoints" / "step-00000010.g0001").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    found: list[Event] = []
    for step in (5, 10):
        copies.commit(CheckpointParts(PLAN, step, {0: ShardStored(1, step, 0, 8, 0.1, 0.0, 1)}))
        found += [copies._news.get(timeout=60) for _ in range(3)]
    copies.close()
    kinds = [type(event) for event in found]
    assert kinds == [
        *(CopyStored, CopyReadBegun, CopyVerified), *(CopyStored, CopyReadBegun, CopyDamaged),
    ]  # fmt: skip
    assert isinstance(found[5], CopyDamaged) and shard.name in found[5].reason
