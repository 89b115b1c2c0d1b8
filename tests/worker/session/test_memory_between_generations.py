"""What is in a worker's memory when the next state is built: nothing of the generation before but
what is held."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.chain import job_of
from support.worker.faults import Fault, arm
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.types import Abort, Layout, Resume, StepDone, WorkerFailed
from elastic.worker.session import generation, takeover
from elastic.worker.session.session import Session
from elastic.worker.state import train_state

FOLDER = Path(tempfile.gettempdir())
# a collective of a step on two shards: each of two micro-batches has some 14, those of its forward
# pass first
IN_BACKWARD = 23


class Left:
    """A generation with gradients, in a circle as a model and its hooks make them."""

    def __init__(self) -> None:
        self.gradients = torch.ones(3)
        self.hook = self.forward

    def forward(self) -> torch.Tensor:
        return self.gradients


def session(broken: Any, unfinished: bool = False) -> Session:
    made = Session.__new__(Session)
    made._broken, made._unfinished = broken, unfinished
    return made


@pytest.fixture
def no_collector() -> Any:
    """The garbage collector comes many generations later by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_gradients_that_nobody_asks_for_any_more_are_gone() -> None:
    left = Left()
    gone = weakref.ref(left)
    made = session(left)
    del left
    made._forget_broken()
    assert gone() is None and made._broken is None


@pytest.mark.usefixtures("no_collector")
def test_what_the_frames_of_an_error_keep_is_gone() -> None:
    left = Left()
    gone = weakref.ref(left)
    del left
    assert gone() is not None, "no circle: this test shows nothing"
    made = session(None, unfinished=True)
    made._forget_broken()
    assert gone() is None and not made._unfinished


def test_the_peak_of_a_generation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    session(None)._forget_broken()
    assert calls == ["empty", "reset"]


def test_a_lost_device_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    session(None)._forget_broken()


# --------------------------------------------------------------------------------------- a real one


def watch() -> None:
    """In the worker: what of the generation that aborts next is still there when the state after it
    is built."""
    failed, made = Session._failed, generation.TrainState
    left: list[weakref.ref[Any]] = []
    found: dict[str, Any] = {}

    def fail(self: Session, broken: Any, error: Exception) -> None:
        Session._failed = failed  # type: ignore[method-assign]
        gc.disable()
        found["names"] = [
            frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        found["gradients"] = sum(p.grad is not None for p in broken.state.parameters.values())
        left.extend(
            weakref.ref(x)
            for p in broken.state.parameters.values()
            for x in (p, p.grad)
            if x is not None
        )
        failed(self, broken, error)

    def make(*given: Any, **named: Any) -> Any:
        if not found:
            return made(*given, **named)
        generation.TrainState = made  # type: ignore[misc]
        gc.enable()
        found["alive"] = sum(one() is not None for one in left)
        note = FOLDER / f"left-{os.getpid()}"
        note.with_suffix(".new").write_text(json.dumps(found))
        note.with_suffix(".new").rename(note)
        return made(*given, **named)

    Session._failed = fail  # type: ignore[method-assign]
    generation.TrainState = make  # type: ignore[assignment,misc]


def die_in_backward() -> None:
    arm(Any, Fault("before", 2, IN_BACKWARD))  # type: ignore[arg-type]


@pytest.mark.slow
def test_nothing_of_a_backward_pass_that_was_broken_off_is_left(pool: Pool, tmp_path: Path) -> None:
    """Its peer dies in the second of two micro-batches: no commit is pending then, and gradients of
    the first are there."""
    job = job_of("tiny.py", steps=6)
    workers = pool.open(job, tmp_path, n=2)
    note = FOLDER / f"left-{pool.pids[0]}"
    try:
        pool.patch(workers[0], watch)
        pool.patch(workers[1], die_in_backward)
        pool.enter(plan(1, Layout(dp_shard=2), workers, job["global_batch"], n_microbatches=2))
        pool.wait(lambda: pool.events(WorkerFailed, 1), "failure")
        pool.order(workers[0], Abort(1))
        pool.quiesced(1, 1)
        pool.enter(plan(2, Layout(), workers[:1], job["global_batch"]))
        pool.wait(lambda: pool.events(StepDone, 2), "a step of the other one")
        found = json.loads(note.read_text())
        assert "backward" in found["names"] and found["gradients"] > 0, found
        assert found["alive"] == 0
    finally:
        note.unlink(missing_ok=True)
        pool.revive()


def hold_digests() -> None:
    """In the worker: nobody gets to the digests of new states; notes, whenever a state is built,
    how many bytes of tensors are there besides host buffers."""
    made = generation.TrainState
    note, seen = FOLDER / f"bytes-{os.getpid()}", []  # type: ignore[var-annotated]

    def never(place: Any, order: Any, old: Any, *, gave: bool, after: Any) -> None:
        old.result()
        held.append((place, order, after))

    def make(*given: Any, **named: Any) -> Any:
        gc.collect()
        storages: dict[int, int] = {}
        buffers = set()
        for one in gc.get_objects():
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                if one.dtype == torch.uint8:
                    buffers.add(storage.data_ptr())
        seen.append(sum(n for at, n in storages.items() if at not in buffers))
        note.with_suffix(".new").write_text(json.dumps(seen))
        note.with_suffix(".new").rename(note)
        return made(*given, **named)

    held: list[Any] = []
    generation.tell_digests = never
    generation.TrainState = make  # type: ignore[assignment,misc]


def as_before() -> None:
    """In the worker, which others use after this."""
    generation.tell_digests = takeover.tell_digests
    generation.TrainState = train_state.TrainState  # type: ignore[misc]


@pytest.mark.slow
def test_a_state_before_the_old_one_is_gone_though_the_digest_of_a_new_one_takes_long(
    pool: Pool, tmp_path: Path
) -> None:
    """Digests of what was received are taken from host copies, for a second per GB; what was given
    away lies on the device, and goes as soon as it was read there."""
    job = job_of("tiny.py", steps=40)
    workers = pool.open(job, tmp_path, n=2)
    note = FOLDER / f"bytes-{pool.pids[0]}"
    try:
        pool.patch(workers[0], hold_digests)
        resume = Resume()
        for number in range(1, 7):
            layout = Layout(dp_shard=2) if number % 2 else Layout(dp_replicate=2)
            entered = plan(number, layout, workers, job["global_batch"], resume=resume)
            resume = live(entered)
            pool.enter(entered)
            pool.wait(lambda: len(pool.events(StepDone, number)) > 1, "two steps")  # noqa: B023
        sizes = json.loads(note.read_text())
        assert len(sizes) == 6
        assert sizes[5] < 1.1 * sizes[3], sizes
    finally:
        pool.patch(workers[0], as_before)
        note.unlink(missing_ok=True)
