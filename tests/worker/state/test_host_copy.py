"""Host copies: what they hold, when the optimizer may continue, and that a buffer is not used twice
at a time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.waiting import once_waiting, until
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.errors import InternalError
from elastic.types import Box
from elastic.worker.process import cuda_errors
from elastic.worker.state import host_copy
from elastic.worker.state.host_copy import Flat, HostCopies, HostMemory, Tensors


def box(fqn: str, *sizes: int, dtype: str = "float32") -> Box:
    return Box(fqn, (0,) * len(sizes), sizes, dtype)


def live() -> Tensors:
    return {
        "w": (box("w", 3, 5), torch.arange(15.0).view(3, 5)),
        "half": (box("half", 3, dtype="bfloat16"), torch.ones(3, dtype=torch.bfloat16)),
        "step": (box("step"), torch.tensor(4.0)),
        "buffer": (box("buffer", 2, dtype="int64"), torch.tensor([7, 8])),
    }


def copies(tensors: Tensors, limit: int = 2) -> HostCopies:
    return HostCopies(HostMemory(), tensors, frozenset({"buffer"}), limit=limit)


class Operations(TorchDispatchMode):
    """Counts what this thread asks of torch."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


class Gate:
    """Holds a copy up between the volatile boxes and the others."""

    def __init__(
        self, host: HostCopies, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
    ) -> None:
        self.open, whole = threading.Event(), host._copy

        def late(*arguments: Any, **named: Any) -> None:
            assert self.open.wait(120)
            if error is not None:
                raise error
            whole(*arguments, **named)

        monkeypatch.setattr(host, "_copy", late)


def test_buffers_of_boxes_start_at_multiples_of_eight() -> None:
    mine = [box for box, _ in live().values()]
    flat = Flat(mine)
    assert flat.n_bytes == 64 + 8 + 8 + 16
    buffer = torch.arange(flat.n_bytes + 8, dtype=torch.uint8)
    views, at = flat.views(buffer), 0
    for box, view in views.values():
        assert tuple(view.shape) == box.sizes and view.is_contiguous()
        assert torch.equal(view.flatten().view(torch.uint8), buffer[at : at + box.n_bytes])
        at += -(-box.n_bytes // 8) * 8


def test_a_copy_costs_the_training_thread_one_call_per_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken every few steps: what is known of the boxes is counted once in a generation."""
    n, sized = 40, Counter[str]()
    tensors = {f"w{i}": (box(f"w{i}", 3, i + 1), torch.ones(3, i + 1)) for i in range(n)}
    host = copies(tensors)
    of = Box.n_elements.fget
    assert of is not None
    monkeypatch.setattr(Box, "n_elements", property(lambda one: sized.update([one.fqn]) or of(one)))
    with Operations() as operations:
        copy = host.take(1)
    assert copy is not None
    assert len(copy.wait()) == n
    host.close()
    assert not sized, "the sizes of boxes are counted again"
    assert operations.n <= n + 10


def test_a_copy_is_the_state_of_its_boundary_whatever_the_next_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = live()
    host = copies(tensors)
    gate = Gate(host, monkeypatch)
    copy = host.take(1)
    assert copy is not None
    tensors["buffer"][1].add_(100)  # the forward of the next step: batch statistics
    least_s: list[float] = []

    def open_later() -> None:
        seen_s = time.monotonic()
        until(lambda: time.monotonic() > seen_s + 0.05, "a while")
        least_s.append(time.monotonic() - seen_s)
        gate.open.set()

    began_s = time.monotonic()
    opener = once_waiting("settle", open_later)
    waited_s = host.settle()
    most_s = time.monotonic() - began_s
    tensors["w"][1].zero_()  # the optimizer of the next step
    opener.join()
    assert least_s[0] <= waited_s <= most_s
    got = copy.wait()
    assert torch.equal(got["w"][1], torch.arange(15.0).view(3, 5))
    assert (
        got["buffer"][1].tolist() == [7, 8]
        and got["half"][1].tolist() == [1, 1, 1]
        and float(got["step"][1]) == 4
    )
    assert host.settle() == 0.0


def test_a_copy_that_failed_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    host = copies(live())
    gate = Gate(host, monkeypatch, error=RuntimeError("device-side assert"))
    copy = host.take(1)
    assert copy is not None
    with pytest.raises(InternalError, match="not there after"):
        copy.wait(0.01)
    gate.open.set()
    host.settle()
    with pytest.raises(InternalError, match="step 1 was not completed: device-side assert"):
        copy.wait()


def test_no_buffer_is_used_twice_at_a_time_and_none_means_go_without() -> None:
    tensors = live()
    host = copies(tensors)
    first, second = host.take(1), host.take(2)
    assert first is not None and second is not None
    assert not host.available and host.take(3) is None
    host.settle()
    tensors["w"][1].fill_(-1)
    first.retain()  # the durable writer reads it still
    first.release()
    assert host.take(3) is None
    assert float(first.wait()["w"][1].sum()) == 105
    first.release()
    third = host.take(3)
    assert third is not None and third.lease.buffer.data_ptr() == first.lease.buffer.data_ptr(), (
        "warm pages are used again"
    )
    host.settle()
    assert float(third.wait()["w"][1].sum()) == -15 and float(second.wait()["w"][1].sum()) == 105
    with pytest.raises(InternalError, match="released twice"):
        first.release()
    with pytest.raises(InternalError, match="after it was released"):
        first.retain()


def test_one_copy_per_boundary_serves_all_its_readers() -> None:
    host = copies(live())
    one, same = host.take(5), host.take(5)
    assert one is not None and same is one
    assert host.available, "it takes one buffer only"
    one.release()
    assert one.wait()["w"][1].shape == (3, 5), "the other reader has it still"
    same.release()
    assert host.take(5) is not one


def test_a_copy_that_is_only_dropped_frees_its_place() -> None:
    host = copies(live(), limit=1)
    copy = host.take(1)
    host.settle()
    assert not host.available
    del copy
    gc.collect()
    assert host.available


def test_host_memory_gives_the_smallest_that_fits_and_lets_go_what_is_too_small() -> None:
    memory = HostMemory()
    small, large = memory.lease(100), memory.lease(1000)
    where = {id(lease): lease.buffer.data_ptr() for lease in (small, large)}
    small.release()
    large.release()
    again = memory.lease(90)
    assert again.buffer.data_ptr() == where[id(small)] and again.buffer.numel() == 90
    assert memory.lease(2000).buffer.numel() == 2000
    assert memory.free == [], "nothing that is too small is kept beside the new one"


class Copying:
    """In the place of a CUDA event: what the device was given is done when the test says so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(120)


def test_what_the_device_still_copies_is_neither_freed_nor_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy was given to the device, its generation has ended, and the checkpoint that it is for
    is left out: the live tensors stay until the device has read them, and the buffer is nobody
    else's before."""
    event, memory, tensors = Copying(), HostMemory(), live()
    host = HostCopies(memory, tensors, frozenset({"buffer"}))
    read = weakref.ref(tensors["w"][1])
    monkeypatch.setattr(host._side, "behind", lambda at: nullcontext(object()))
    monkeypatch.setattr(host_copy, "waitable", lambda stream: event)
    copy = host.take(1)
    assert copy is not None and copy.filled.wait(60)
    reading = host.reading
    host.close()
    copy.release()
    del host, tensors, copy
    gc.collect()
    assert reading is not None and not reading.done()
    assert read() is not None and memory.free == []
    event.done.set()
    reading.result(60)
    until(lambda: len(memory.free) == 1, "the buffer to be free")
    until(lambda: gc.collect() is not None and read() is None, "the live tensors to be let go")


@pytest.mark.parametrize("how", ["lease", "make", "reserve", "trim"])
def test_what_is_let_go_is_freed_without_pythons_lock(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, whoever still refers to the tensor, and while others may return their buffers: for
    pinned memory CUDA waits until the kernels have ended."""
    memory = HostMemory(pinned=how == "make")
    monkeypatch.setattr(memory, "_pins", False)
    leases = [memory.lease(100), memory.lease(200)]
    assert [lease.buffer.numel() for lease in leases] == [100, 200]
    for lease in leases:
        lease.release()
    whole, freed = list(memory.free), []
    plain = host_copy.let_go

    def let_go(buffers: list[torch.Tensor]) -> None:
        assert memory.lock.acquire(blocking=False), "a release would wait for the kernels too"
        memory.lock.release()
        freed.extend(buffers)
        plain(buffers)

    monkeypatch.setattr(host_copy, "let_go", let_go)
    if how in ("lease", "make"):
        assert memory.lease(1000).buffer.numel() == 1000
    elif how == "reserve":
        memory.reserve([1000, 2000])
    else:
        memory.trim()
    assert {id(one) for one in freed} == {id(one) for one in whole}
    assert [one.untyped_storage().nbytes() for one in whole] == [0, 0]


def test_nothing_is_let_go_after_an_error_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_errors, "_held", [torch.ones(1)])
    memory = HostMemory()
    memory.lease(100).release()
    (whole,) = memory.free
    memory.trim()
    assert memory.free == [] and whole.untyped_storage().nbytes() == 100


def test_a_copy_that_fails_midway_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device was given before still reads the live tensors and writes the buffer."""
    event, memory = Copying(), HostMemory()
    host = HostCopies(memory, live(), frozenset())
    monkeypatch.setattr(host._side, "behind", lambda at: nullcontext(object()))
    monkeypatch.setattr(host_copy, "waitable", lambda stream: event)

    def fails(copy: object, non_blocking: bool = False) -> None:
        raise RuntimeError("put in by the test")

    monkeypatch.setattr(host, "_copy", fails)
    copy = host.take(1)
    assert copy is not None and copy.filled.wait(60)
    with pytest.raises(InternalError, match="put in by the test"):
        copy.wait()
    copy.release()
    assert memory.free == []
    event.done.set()
    copy.reading.result(60)
    until(lambda: len(memory.free) == 1, "the buffer to be free")
    host.close()


def test_a_copy_that_is_released_while_it_is_asked_for_is_made_anew() -> None:
    host = copies(live())
    first = host.take(1)
    assert first is not None

    class Late(type(first.lease)):  # type: ignore[misc]
        in_use = True  # as it was before its last user released it

    first.wait()
    first.lease.__class__ = Late
    first.release()
    again = host.take(1)
    assert again is not None and again is not first and again.lease is not first.lease
    host.close()
