"""A host copy of a rank's boxes at a step boundary, taken behind the next step; peers, the durable
writer and digests read it.

Parameters and optimizer state change in the optimizer alone, so they are copied while the next
forward and backward run, and the optimizer waits for that (`HostCopies.settle`). Buffers and the
RNG box change earlier: they are copied at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import prod

import torch

from elastic.errors import InternalError
from elastic.text import gib
from elastic.types import Box
from elastic.worker.process.cuda_errors import holds_lost, let_go
from elastic.worker.process.doing import doing
from elastic.worker.process.side_stream import SideStream, boundary, on_device, waitable

log = logging.getLogger(__name__)

Tensors = dict[str, tuple[Box, torch.Tensor]]  # by the name of the logical tensor
CPU = torch.device("cpu")
SAID_MOST = 200  # characters of an error
ALIGN = 8  # each box starts at a multiple of so many bytes


class CopyThreads:
    """Threads that wait for work. Starting a thread waits until it was scheduled, which takes
    milliseconds on a busy machine; handing work to one that is there does not. `device`: their
    current one."""

    def __init__(self, n: int, name: str, device: torch.device = CPU) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._n, self._device = n, device
        for _ in range(n):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        with on_device(self._device):
            while (work := self._work.get()) is not None:
                work()
                del work  # or its buffers live until the next

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        """They end when they have done what they were given."""
        for _ in range(self._n):
            self._work.put(None)


class BufferLease:
    """A host buffer in use. Released by its last user it is used again; only dropped, it is
    freed."""

    def __init__(self, memory: HostMemory, n_bytes: int, whole: torch.Tensor | None = None) -> None:
        self._memory, self._whole, self.n_bytes = memory, whole, n_bytes
        self._users = 1
        self._making = threading.Lock()

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 [n_bytes]. Pinned memory that was not there yet is allocated here, which takes up
        to 0.4 s/GB: not on the training thread."""
        with self._making:
            if self._whole is None:
                self._whole = self._memory.make(self.n_bytes)
            return self._whole[: self.n_bytes]

    @property
    def in_use(self) -> bool:
        return self._users > 0

    def retain(self) -> BufferLease:
        """One more user. Raises InternalError when the buffer was released already: its bytes may
        be another copy's."""
        with self._memory.lock:
            if not self._users:
                raise InternalError("a host buffer is read after it was released")
            self._users += 1
        return self

    def release(self) -> None:
        with self._memory.lock:
            if not self._users:
                raise InternalError("a host buffer was released twice")
            self._users -= 1
            if not self._users and self._whole is not None:
                self._memory.free.append(self._whole)


class HostMemory:
    """The host buffers of a worker process. Fresh pages cost several times as much as warm ones, so
    buffers are used again.

    `pinned`: for copies from and to a GPU. Pinning takes long, so such a buffer is allocated by the
    thread that first needs its bytes, or ahead by `reserve`. Where pinned memory is not to be had
    (a limit of the host, of locked memory) all further buffers are pageable, and `unpinned` gets
    the reason, once: copies then take longer."""

    def __init__(self, pinned: bool = False, unpinned: Callable[[str], None] = log.warning) -> None:
        self.pinned = pinned
        self._pins, self._unpinned = pinned, unpinned
        self.free: list[torch.Tensor] = []
        self.lock = threading.Lock()
        self._allocating = threading.Lock()
        self._owed = 0  # leases without a buffer yet

    def lease(self, n_bytes: int) -> BufferLease:
        """The smallest free buffer that is large enough; else a new one, and the free ones, which
        are too small, are let go."""
        with self.lock:
            whole = self._fitting(n_bytes)
            if whole is None and self.pinned:
                self._owed += 1
                return BufferLease(self, n_bytes)
            dropped = self._dropped(whole is None)
        let_go(dropped)
        return BufferLease(self, n_bytes, self._allocate(n_bytes) if whole is None else whole)

    def make(self, n_bytes: int) -> torch.Tensor:
        """The buffer of a lease that has none; one that is reserved meanwhile is waited for."""
        with self._allocating:
            with self.lock:
                self._owed -= 1
                whole = self._fitting(n_bytes)
                if whole is not None:
                    return whole
                dropped = self._dropped()
            let_go(dropped)
            return self._allocate(n_bytes)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocates ahead, so that leases of these sizes find their buffers; where it does, other
        free ones are let go."""
        with self._allocating:
            with self.lock:
                kept, missing = [], []
                for n_bytes in sorted(sizes, reverse=True):
                    whole = self._fitting(n_bytes)
                    if whole is None:
                        missing.append(n_bytes)
                    else:
                        kept.append(whole)
                dropped = self._dropped(bool(missing))
                self.free += kept
            let_go(dropped)
            for n_bytes in missing:
                whole = self._allocate(n_bytes)
                with self.lock:
                    self.free.append(whole)

    def _fitting(self, n_bytes: int) -> torch.Tensor | None:
        fitting = [i for i, whole in enumerate(self.free) if whole.numel() >= n_bytes]
        return self.free.pop(min(fitting, key=lambda i: self.free[i].numel())) if fitting else None

    def _allocate(self, n_bytes: int) -> torch.Tensor:
        if self._pins:
            try:
                return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
            except (
                RuntimeError
            ) as error:  # of a device that is gone, too: what uses that next says so
                self._pins = False
                self._unpinned(
                    f"{gib(n_bytes)} were asked for: {' '.join(str(error).split())[:SAID_MOST]}"
                )
        return torch.empty(n_bytes, dtype=torch.uint8)

    def trim(self) -> None:
        """Lets all free buffers go, but those that a lease is about to take."""
        with self.lock:
            dropped = self._dropped(not self._owed)
        let_go(dropped)

    def _dropped(self, wanted: bool = True) -> list[torch.Tensor]:
        """The free buffers, to be let go of outside of the lock."""
        dropped = self.free if wanted else []
        self.free = [] if wanted else self.free
        return dropped


class Flat:
    """How boxes lie in one buffer: one after the other, each at a multiple of 8 bytes. Counted
    once; a view is one call."""

    def __init__(self, mine: Sequence[Box]) -> None:
        # with strides, and where it begins in bytes
        self._parts: list[tuple[Box, torch.dtype, tuple[int, ...], int]] = []
        self._dtypes = {getattr(torch, box.dtype) for box in mine}
        self.n_bytes = 0
        for box in mine:
            strides = tuple(prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes)))
            self._parts.append((box, getattr(torch, box.dtype), strides, self.n_bytes))
            self.n_bytes += -(-box.n_bytes // ALIGN) * ALIGN

    def views(self, buffer: torch.Tensor) -> Tensors:
        """A view of the buffer (uint8, from the beginning of its memory, at least `n_bytes`) per
        box."""
        words = {dtype: buffer[: self.n_bytes].view(dtype) for dtype in self._dtypes}
        return {
            box.fqn: (box, words[dtype].as_strided(box.sizes, strides, at // dtype.itemsize))
            for box, dtype, strides, at in self._parts
        }


class HostCopy:
    """The boxes as they were after `step` steps. Nothing may read `tensors` before `wait` has
    returned them."""

    def __init__(self, step: int, lease: BufferLease, tensors: Tensors) -> None:
        self.step, self.lease, self._tensors = step, lease, tensors
        self.filled = threading.Event()  # or failed; of a GPU: all of it is queued
        # done when nothing reads the live tensors, or writes the buffer, any more
        self.reading: Future[None] = Future()
        self.whole = False
        self.error: BaseException | None = None
        self.on_device: torch.cuda.Event | None = None
        # boxes that change before they can be copied, as they were
        self.early: dict[str, torch.Tensor] = {}

    def wait(self, timeout_s: float | None = None) -> Tensors:
        """The boxes, once all of them are there. Raises InternalError when they could not be
        copied."""
        if not self.filled.wait(timeout_s):
            raise InternalError(
                f"the host copy of step {self.step} was not there after {timeout_s} s"
            )
        if not self.whole:
            raise InternalError(
                f"the host copy of step {self.step} was not completed: {self.error}"
            )
        if self.on_device is not None:
            try:
                self.on_device.synchronize()
            except RuntimeError as error:
                holds_lost(error)
                raise
        return self._tensors

    @property
    def n_bytes(self) -> int:
        return self.lease.n_bytes

    def retain(self) -> HostCopy:
        self.lease.retain()
        return self

    def release(self) -> None:
        """A copy that the device is still making is another's buffer only when it has ended."""
        if self.reading.done():
            self.lease.release()
        else:
            self.reading.add_done_callback(lambda _: self.lease.release())


class HostCopies:
    """The host copies of one rank in one generation, at most `limit` of them in use at a time. Used
    by its training thread.

    `volatile`: names of boxes that change before the optimizer does (buffers, RNG). `device`: that
    of the tensors; default: the GPU on which any of them lies, else the CPU.
    """

    def __init__(
        self,
        memory: HostMemory,
        tensors: Tensors,
        volatile: frozenset[str],
        *,
        limit: int = 2,
        device: torch.device | None = None,
    ) -> None:
        self.memory, self.live, self.volatile, self.limit = memory, tensors, volatile, limit
        self._flat = Flat([box for box, _ in tensors.values()])
        self._leases: list[weakref.ref[BufferLease]] = []
        self._filling: HostCopy | None = None
        self._newest: weakref.ref[HostCopy] | None = None
        self.reading: Future[None] | None = None  # of the newest copy
        self.device = device or next(
            (tensor.device for _, tensor in tensors.values() if tensor.is_cuda), CPU
        )
        self._side = SideStream(self.device)
        self._hands = CopyThreads(1, "host-copy", self.device)

    @property
    def available(self) -> bool:
        """Is a buffer free for another copy?"""
        self._leases = [
            ref for ref in self._leases if (lease := ref()) is not None and lease.in_use
        ]
        return len(self._leases) < self.limit

    @doing("copying")
    def take(self, step: int) -> HostCopy | None:
        """Starts the copy of this boundary, or gives the one that was started already; the caller
        releases it when it has read it. None: every buffer is still being read; the caller does
        without."""
        newest = self._newest() if self._newest is not None else None
        if newest is not None and (newest.step, newest.error) == (step, None):
            with suppress(InternalError):  # others may release it at any moment
                return newest.retain()
        if not self.available:
            return None
        self.settle()
        lease = self.memory.lease(self._flat.n_bytes)
        copy = HostCopy(step, lease, {})
        self._leases.append(weakref.ref(lease))
        self._newest, self.reading = weakref.ref(copy), copy.reading
        # the buffer may not be there yet, and the host need not wait
        if self.device.type == "cuda":
            copy.early = {
                fqn: self.live[fqn][1].clone() for fqn in self.volatile & self.live.keys()
            }
        else:
            copy._tensors = self._flat.views(lease.buffer)
            for fqn in self.volatile & self.live.keys():
                copy._tensors[fqn][1].copy_(self.live[fqn][1])
        at = boundary(self.device)
        self._filling = copy
        self._hands.do(lambda: self._fill(copy, at))
        return copy

    def close(self) -> None:
        """No more copies; one that is under way is finished."""
        self._hands.close()

    def _fill(self, copy: HostCopy, at: torch.cuda.Event | None) -> None:
        try:
            if at is not None:
                copy._tensors = self._flat.views(copy.lease.buffer)
            # of a GPU on a stream of its own, behind the boundary; `filled` then means: all copies
            # are queued
            with self._side.behind(at) as stream:
                try:
                    self._copy(copy, stream is not None)
                finally:  # what was queued before an error is still on its way
                    copy.on_device = waitable(stream) if stream is not None else None
            copy.whole = True
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the copy
            holds_lost(error)
            copy.error = error
        finally:
            self._filled(copy)

    def _filled(self, copy: HostCopy) -> None:
        """Until the device has copied them this thread holds the live tensors: their generation may
        have ended, and torch knows nothing of a side stream that reads them."""
        if copy.on_device is None:
            copy.reading.set_result(None)
            copy.filled.set()
            return
        copy.filled.set()
        try:
            copy.on_device.synchronize()
        except RuntimeError as error:  # whoever waits for the copy hears of it
            holds_lost(error)
        finally:
            copy.reading.set_result(None)

    @torch.no_grad()
    def _copy(self, copy: HostCopy, non_blocking: bool = False) -> None:
        for fqn, (_, into) in copy._tensors.items():
            if fqn not in self.volatile or fqn in copy.early:
                into.copy_(copy.early.get(fqn, self.live[fqn][1]), non_blocking=non_blocking)

    @doing("copying")
    def settle(self) -> float:
        """Before the live tensors change: waits until the copy under way has read them. Returns the
        seconds waited."""
        copy, self._filling = self._filling, None
        if copy is None:
            return 0.0
        began = time.monotonic()
        copy.filled.wait()
        if copy.on_device is not None:
            # the device waits, the host does not
            torch.cuda.current_stream(self.device).wait_event(copy.on_device)
        return time.monotonic() - began
