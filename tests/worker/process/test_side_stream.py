"""Threads beside the training thread use their own GPU, and sleep while they wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.worker.made_up_cuda import NO_TENSORS, current, make_up

from elastic.types import Box, Event, Job, Layout, PinningFailed, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.process.side_stream import SideStream, run_on
from elastic.worker.session import boundary_copies
from elastic.worker.session.generation import Generation
from elastic.worker.session.takeover import _to_host
from elastic.worker.session.workplace import Workplace
from elastic.worker.state import peer_replicas as peer_copies
from elastic.worker.state.host_copy import CopyThreads, HostCopies, HostMemory, Tensors
from elastic.worker.state.train_state import Held

CUDA_1 = torch.device("cuda", 1)


def test_a_host_copy_is_made_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is cuda:0; the stream, and the event that stands for the copy,
    are on cuda:1."""
    cuda = make_up(monkeypatch)
    tensors = {"w": (Box("w", (0,), (4,), "float32"), torch.arange(4.0))}
    host = HostCopies(HostMemory(), tensors, frozenset(), device=CUDA_1)
    seen: list[tuple[int, int]] = []
    whole = host._copy

    def copy(*arguments: Any, **named: Any) -> None:
        seen.append((current(), torch.cuda.current_stream().device))  # type: ignore[arg-type]
        whole(*arguments, **named)

    monkeypatch.setattr(host, "_copy", copy)
    taken = host.take(3)
    assert taken is not None
    assert taken.wait()["w"][1].tolist() == [0, 1, 2, 3]
    host.settle()
    assert seen == [(1, 1)], "copied on another device"
    assert cuda.of("stream") == [(1, "host-copy", 0)]
    (first_device, first_thread, boundary), (device, thread, done) = cuda.of("record")
    assert (first_device, first_thread) == (1, threading.current_thread().name)
    assert (device, thread, done.blocking) == (1, "host-copy", True), (
        "who waits for it would keep a core busy"
    )
    waited = cuda.of("stream waits")
    assert [(d, event) for d, _, event in waited] == [(1, boundary), (1, done)], (
        "behind the boundary; the optimizer behind it"
    )
    assert set(cuda.of("host waits")) == {
        (1, threading.current_thread().name, done),
        (1, "host-copy", done),  # it holds the tensors until then
    }


def test_threads_that_wait_for_work_have_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    seen, done = [], threading.Event()
    hands = CopyThreads(1, "hand", CUDA_1)
    hands.do(lambda: seen.append(current()))
    hands.do(done.set)
    assert done.wait(60)
    hands.close()
    assert seen == [1]


def test_a_side_stream_is_on_its_device_whatever_the_threads_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = make_up(monkeypatch)
    side = SideStream(CUDA_1)
    for _ in range(2):
        with side.behind(None):
            assert current() == 1
    assert current() == 0 and [device for device, _, _ in cuda.of("stream")] == [1], (
        "one stream, made once"
    )


def test_work_behind_the_steps_runs_on_the_workers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        program: Any = SimpleNamespace(extra_state={})
        nothing: Any = None
        place = Workplace(
            WorkerId("n", 0), program, NO_TENSORS, Job(), nothing, nothing, nothing, CUDA_1, print,
            print, pool.submit
        )  # fmt: skip
        assert place.background(current).result() == 1
        assert pool.submit(current).result() == 0, "the thread is as it was"
    assert run_on(torch.device("cpu"), current) is current


# ------------------------------------------------------------------------------ pinned host buffers


class Pinned(HostMemory):
    """Pinned memory without a GPU: who allocated how much, and a gate in front of it."""

    def __init__(self) -> None:
        super().__init__(pinned=True)
        self.made: list[tuple[int, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def _allocate(self, n_bytes: int) -> torch.Tensor:
        assert self.gate.wait(60)
        self.made.append((n_bytes, threading.current_thread().name))
        return torch.empty(n_bytes, dtype=torch.uint8)


def state() -> Tensors:
    return {
        "w": (Box("w", (0,), (4,), "float32"), torch.arange(4.0)),
        "buffer": (Box("buffer", (0,), (2,), "int64"), torch.tensor([7, 8])),
    }


def test_pinned_memory_is_never_allocated_on_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seconds per copy; the boxes that change before the optimizer are kept on the device until the
    buffer is there."""
    make_up(monkeypatch)
    tensors, memory = state(), Pinned()
    host = HostCopies(memory, tensors, frozenset({"buffer"}), device=CUDA_1)
    memory.gate.clear()
    copy = host.take(1)
    assert copy is not None and copy.n_bytes == 32
    tensors["buffer"][1].add_(100)  # the forward of the next step
    memory.trim()  # does not take away what is about to be used
    memory.gate.set()
    assert copy.wait()["buffer"][1].tolist() == [7, 8] and copy.wait()["w"][1].tolist() == [
        0,
        1,
        2,
        3,
    ]
    host.settle()
    copy.release()
    again = host.take(2)
    assert again is not None and again.wait()["buffer"][1].tolist() == [107, 108]
    assert memory.made == [(32, "host-copy")], "allocated by another thread, or twice"


def test_where_pinned_memory_is_not_to_be_had_copies_are_pageable_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_up(monkeypatch)
    asked: list[int] = []
    plain = torch.empty

    def empty(n: int, **options: Any) -> torch.Tensor:
        if options.pop("pin_memory", False):
            asked.append(n)
            raise torch.AcceleratorError(
                "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
            )
        return plain(n, **options)

    monkeypatch.setattr(torch, "empty", empty)
    told: list[str] = []
    memory = HostMemory(pinned=True, unpinned=told.append)
    host = HostCopies(memory, state(), frozenset({"buffer"}), device=CUDA_1)
    for step in (1, 2, 3):
        copy = host.take(step)
        assert copy is not None and copy.wait()["w"][1].tolist() == [0, 1, 2, 3]
        host.settle()
    memory.reserve([100])
    assert asked == [32] and len(told) == 1, "asked for again, or told again"
    assert told[0].startswith(
        "0.00 GiB were asked for: CUDA error: out of memory CUDA kernel errors"
    )


def test_the_driver_hears_that_a_worker_has_no_pinned_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Event] = []
    nothing: Any = None
    program: Any = SimpleNamespace(extra_state={})
    place = Workplace(
        WorkerId("n", 0), program, NO_TENSORS, Job(), nothing, nothing, nothing, CUDA_1, told.append,
        print, nothing
    )  # fmt: skip
    place.host_memory._unpinned("17.00 GiB were asked for: no")
    assert (
        told == [PinningFailed(WorkerId("n", 0), "17.00 GiB were asked for: no")]
        and "17.00 GiB" in caplog.text
    )


def test_buffers_that_are_reserved_are_waited_for_and_used() -> None:
    memory = Pinned()
    memory.gate.clear()
    reserving = threading.Thread(target=memory.reserve, args=([100, 40],), name="reserving")
    reserving.start()
    one, other = memory.lease(100), memory.lease(40)
    memory.trim()
    sizes: list[int] = []
    using = threading.Thread(
        target=lambda: sizes.extend((one.buffer.numel(), other.buffer.numel()))
    )
    using.start()
    memory.gate.set()
    reserving.join(60)
    using.join(60)
    assert sizes == [100, 40] and memory.made == [(100, "reserving"), (40, "reserving")]
    one.release()
    other.release()
    memory.reserve([90, 40])
    assert len(memory.made) == 2, "there was enough"
    memory.reserve([200, 30])
    assert [whole.numel() for whole in memory.free] == [40, 200], (
        "what is too small is let go before more is taken"
    )


def test_what_a_lease_is_about_to_take_is_not_trimmed() -> None:
    """It was asked for before the buffer was there."""
    memory = Pinned()
    lease = memory.lease(100)
    memory.reserve([100])
    memory.trim()
    assert lease.buffer.numel() == 100 and len(memory.made) == 1
    lease.release()
    memory.trim()
    assert memory.free == []


def test_boxes_that_make_room_go_to_one_leased_buffer_on_a_side_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer that is there already: nothing is allocated in the pause. Memory is given up once
    the copies are done."""
    cuda = make_up(monkeypatch)
    tensors, memory = state(), Pinned()
    memory.reserve([1000])
    given_up: list[bool] = []
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, n_bytes: int) -> Any:
        given_up.append(bool(cuda.of("host waits")))
        return real(storage, n_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    place: Any = SimpleNamespace(host_memory=memory, side=SideStream(CUDA_1), device=CUDA_1)
    moved = _to_host(Held(1, 0, 6, "live", Layout(), (), {**tensors}), place)
    assert [tensor.tolist() for _, tensor in moved.tensors.values()] == [[0, 1, 2, 3], [7, 8]]
    assert moved.on_host and moved.lease is not None and moved.lease.in_use
    assert all(tensor.untyped_storage().nbytes() == 0 for _, tensor in tensors.values())
    assert given_up == [True, True], "memory was given up while a copy might read it"
    assert memory.made == [(1000, threading.current_thread().name)] and memory.free == []
    assert len(cuda.of("stream")) == 1 and [
        event.blocking for _, _, event in cuda.of("host waits")
    ] == [True]
    moved.lease.release()
    assert len(memory.free) == 1


def test_where_the_host_has_no_memory_the_boxes_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, memory = state(), Pinned()

    def none_left(n_bytes: int) -> torch.Tensor:
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(memory, "_allocate", none_left)
    place: Any = SimpleNamespace(
        host_memory=memory, side=SideStream(torch.device("cpu")), device=torch.device("cpu")
    )
    held = Held(1, 0, 6, "live", Layout(), (), {**tensors})
    with pytest.raises(RuntimeError, match="out of host memory"):
        _to_host(held, place)
    assert [tensor.tolist() for _, tensor in held.tensors.values()] == [
        [0, 1, 2, 3],
        [7, 8],
    ] and not held.on_host


def test_a_generation_reserves_its_buffers_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its own boxes, and of those that it keeps for others."""
    memory, seen = Pinned(), []
    for module in (boundary_copies, peer_copies):
        monkeypatch.setattr(
            module,
            "boxes",
            lambda profile, layout, layers, rank: (Box("w", (0,), (rank + 1,), "float64"),),
        )
    place: Any = SimpleNamespace(
        host_memory=memory,
        profile=None,
        at_phase=lambda *_: None,
        device_lost=False,
        background=lambda work, *more: seen.append((work, *more)),
    )
    plan: Any = SimpleNamespace(layout=None, layers=(), copies_to=((1,), (2,), (3,), (1,)))
    generation = Generation.__new__(Generation)
    generation.place, generation.plan, generation.rank = place, plan, 1

    class Meeting(Exception):
        pass

    def join(*_: Any) -> None:
        raise Meeting

    generation.groups = cast(Any, SimpleNamespace(join=join))
    generation.order = cast(Any, SimpleNamespace(me=1, rendezvous=Rendezvous((), ("", 0))))
    with pytest.raises(Meeting):
        generation.enter()
    assert seen == [(memory.reserve, [16, 8, 32])]
