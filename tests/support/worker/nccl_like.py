"""A process group that behaves as NCCL's does where gloo is kinder, and the transport that runs a
generation on it, all on the CPU.

- The first use of a group needs all of its ranks, and of a batch of messages too.
- Set-up that waits for a rank holds the lock which `abort` needs; it ends when its connections do.
- An operation returns before it is done; who waits for it is freed by `abort` of that group and by
  nothing else: not by the end of a connection, not by another group's abort. `abort` raises nothing
  in those that wait; the outputs hold silent data corruption.
- `abort` frees memory, which waits for all kernels that are on the device then, those of other
  groups too: aborted one after the other, groups that hang wait for each other.
- After its abort a group refuses further calls. `shutdown` waits for the group's own kernels, which
  `abort` ends first where they hang; it may raise or take long.
- Calls are counted when they are enqueued, and run in that order, `late_s` after it: inputs are
  read then.
- Ranks are connected by the first call of a kind, and by the first message between two, which waits
  for the other one's no longer than set-up does: a step may not make one (only the world, whose
  messages move the state, is free to).
- An all-to-all without sizes fails, as torch's does over NCCL 2.28 and later where communicators can
  be aborted while they are set up: it takes "in progress" for an error.
- Tensors of host memory are refused beside those of the device, and so are types that NCCL does not
  have.

Numbers in host memory go through gloo as they do beside NCCL: float64, int64, bytes that are few
(messages of the ranks), and what the threads of peer replicas send; everything else counts as being
on the device.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from elastic.worker.process.fault_injection import MADE_UP, DeviceFaults
from elastic.worker.process_groups import groups
from elastic.worker.process_groups.first_use import Use
from elastic.worker.process_groups.transport import Host, Nccl, gloo_of
from elastic.worker.state.host_copy import CopyThreads

NAME = "nccllike"
FEW_BYTES = 4096
COPIES = "peer-copy"  # the name of their threads
WRONG = 7.0  # what an aborted operation leaves in its outputs
# that the first use, and the first message of a pair, wait for the other ranks; NCCL waits for
# TORCH_NCCL_NONBLOCKING_TIMEOUT
SET_UP_S = 5.0
ENDS_S = 60.0  # that abort and shutdown wait for kernels; then they raise, as torch does
LOOK_S = 0.0005
GATHER, SCATTER, MESSAGE = "all-gather", "reduce-scatter", "message "
NO_TYPE = (torch.int16, torch.complex64, torch.complex128)  # of NCCL's


def in_host_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """As elastic uses them: commits, sums, messages between ranks and peer replicas are never on
    the device. Raises what torch does where only some of them are."""
    if threading.current_thread().name == COPIES:
        return True
    on_host = [
        t.dtype in (torch.float64, torch.int64)
        or (t.dtype == torch.uint8 and t.numel() <= FEW_BYTES)
        for t in tensors
    ]
    if len(set(on_host)) > 1:
        raise ValueError("Tensors must be CUDA and dense: some of these are in host memory")
    for tensor in tensors:
        if tensor.dtype in NO_TYPE and not all(on_host):
            raise TypeError(f"Unconvertible NCCL type {tensor.dtype}")
    return all(on_host)


def _flat(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for part in nested for tensor in _flat(part)]


class DeviceWork(dist.Work):
    """An operation on the device. `outputs` are filled with WRONG when it is aborted."""

    def __init__(
        self, of: NcclLike, begin: Callable[[], dist.Work], outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.of, self.outputs = of, outputs
        self.connects: Callable[[], None] | None = None  # the host waits for that too
        self.over = threading.Event()
        with NcclLike.lock:
            NcclLike.on_device.add(self)
        if of.late_s:
            of.stream.do(lambda: self._begin_late(begin, time.monotonic() + of.late_s))
        else:
            self._follow(begin())

    def _begin_late(self, begin: Callable[[], dist.Work], at_s: float) -> None:
        if not self.of.gone.wait(max(0.0, at_s - time.monotonic())):
            try:
                self._follow(begin())
            except RuntimeError:  # a connection has ended: a kernel does not notice
                self._follow(None)

    def _follow(self, inner: dist.Work | None) -> None:
        threading.Thread(target=self._run, args=(inner,), daemon=True).start()

    def _run(self, inner: dist.Work | None) -> None:
        try:
            if inner is None:
                raise RuntimeError
            inner.wait()
        except RuntimeError:  # a connection has ended: a kernel does not notice, and spins on
            self.of.gone.wait()
        self.over.set()

    @property
    def ended(self) -> bool:
        return self.over.is_set() or self.of.gone.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.connects is not None:
            self.connects()
        while not self.over.wait(LOOK_S):
            if self.of.gone.is_set():
                break
        if self.of.gone.is_set():
            with torch.no_grad():
                for tensor in self.outputs:
                    tensor.fill_(WRONG)
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.outputs)
        return future


class NcclLike(dist.ProcessGroup):
    shutdown_raises = False
    shutdown_takes_s = 0.0
    dies_after: int | None = None  # operations of this process on the device
    lost = False  # this process's device
    strict = False  # a first call of its kind outside of the warm-up is an error
    late_s = 0.0  # from the call to the beginning of an operation on the device
    before: Callable[[Any], None] | None = None  # called with each operation's process group
    on_device: ClassVar[weakref.WeakSet[DeviceWork]] = weakref.WeakSet()
    setting_up: ClassVar[weakref.WeakSet[NcclLike]] = weakref.WeakSet()
    lock = threading.Lock()

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, host: Host) -> None:
        super().__init__(rank, size)
        self.store, self.me, self.n = store, rank, size
        self.host = gloo_of(PrefixStore("host", store), rank, size, timeout=timeout, host=host)
        self.kernels = dist.ProcessGroupGloo(
            PrefixStore("kernels", store), rank, size, timeout=timedelta(days=1)
        )
        self.gone = threading.Event()
        self.set_up = False
        self.uses = threading.Lock()  # torch's of a communicator, which set-up holds
        self.cut_off = threading.Event()  # the connections of its set-up are shut
        self.warming, self.connected = False, set[str]()
        self.from_host = False  # everything that is sent lies in host memory
        self._stream: CopyThreads | None = None
        self.n_enqueued = 0
        self.known_as = self.described_as = ""

    # ---------------------------------------------------------------------------- as a communicator

    @property
    def stream(self) -> CopyThreads:
        """Begins operations in the order of their calls."""
        self._stream = self._stream or CopyThreads(1, "device-stream")
        return self._stream

    def abort(self) -> None:
        with self.uses:
            self.gone.set()
        self._wait_for(self._kernels())

    def _kernels(self) -> list[DeviceWork]:
        """That are on the device now, of any group."""
        with NcclLike.lock:
            return [work for work in NcclLike.on_device if not work.ended]

    def _wait_for(self, kernels: Sequence[DeviceWork]) -> None:
        ends_s = time.monotonic() + ENDS_S
        while not all(work.ended for work in kernels):
            if time.monotonic() > ends_s:
                raise dist.DistBackendError(
                    f"NCCL communicator waits for kernels that do not end within {ENDS_S:.0f} s"
                )
            time.sleep(LOOK_S)  # sleeps: as a call that waits for the device

    def shutdown(self) -> None:
        self._wait_for([work for work in self._kernels() if work.of is self])
        time.sleep(self.shutdown_takes_s)  # sleeps: a slow shutdown
        if self.shutdown_raises:
            raise RuntimeError(
                "NCCL error: remote process exited or there was a network error (put in by the "
                "test)"
            )

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Nothing here wakes up by itself."""

    def _get_sequence_number_for_group(self) -> int:
        return self.n_enqueued

    def _set_up(self) -> None:
        """Waits for all ranks, like the exchange of NCCL's unique id."""
        self.store.set(f"first-use/{self.me}", "")
        ends_s = time.monotonic() + SET_UP_S
        with NcclLike.lock:
            NcclLike.setting_up.add(self)
        while not self._all_came():
            if self.cut_off.wait(LOOK_S) or time.monotonic() > ends_s:
                raise dist.DistBackendError(
                    "NCCL communicator was not set up: not all ranks of the group took part"
                )
        self.set_up = True

    def _connect(self, kind: str) -> Callable[[], None] | None:
        """Whoever waits for the call waits for what is returned too."""
        new = bool(kind) and kind not in self.connected
        if NcclLike.strict and new and not self.warming and self.known_as != "0":
            raise AssertionError(f"the first {kind} in this group comes within a step")
        self.connected.add(kind)
        if not new or not kind.startswith(MESSAGE):
            return None
        way, peer = kind.removeprefix(MESSAGE).split()
        with suppress(RuntimeError):  # a store that has ended
            self.store.set(f"{self.me} {way} {peer}", "")
        other = f"{peer} {'from' if way == 'to' else 'to'} {self.me}"
        return partial(self._wait_for_pair, other, time.monotonic() + SET_UP_S)

    def _wait_for_pair(self, other: str, ends_s: float) -> None:
        while not self.gone.wait(LOOK_S):
            try:
                if self.store.check([other]):
                    return
            except RuntimeError:  # the store has ended
                return
            if time.monotonic() > ends_s:
                raise dist.DistBackendError(
                    f"NCCL communicator: the first message, {other}, has not come"
                )

    def _all_came(self) -> bool:
        try:
            return self.store.check([f"first-use/{rank}" for rank in range(self.n)])
        except RuntimeError:  # the store's end is not noticed: the id was exchanged before
            return False

    def _run(
        self, call: Callable[[dist.ProcessGroup], dist.Work], inputs: Any, outputs: Any,
        on_device: bool = False, kind: str = "",
    ) -> dist.Work:  # fmt: skip
        """`on_device`: whatever the tensors are. `kind`: what connects ranks that are not yet."""
        tensors, filled = [*_flat(inputs), *_flat(outputs)], _flat(outputs)
        if NcclLike.before is not None:
            NcclLike.before(self)
        if self.from_host or (not on_device and in_host_memory(tensors)):
            return call(self.host)
        if NcclLike.lost:
            raise torch.AcceleratorError(MADE_UP)
        if self.gone.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on this rank")
        if not self.set_up:
            with self.uses:
                self._set_up()
        connects = self._connect(kind)
        self.n_enqueued += 1
        if NcclLike.dies_after is not None:
            if NcclLike.dies_after == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            NcclLike.dies_after -= 1
        work = DeviceWork(self, lambda: call(self.kernels), filled)
        work.connects = connects
        return work

    # --------------------------------------------------------------------------- as a process group

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._run(
            lambda to: to.allreduce(tensors, opts or dist.AllreduceOptions()), (), tensors
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._run(
            lambda to: to.broadcast(tensors, opts or dist.BroadcastOptions()), (), tensors
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda to: to.allgather(outputs, inputs), inputs, outputs, kind=GATHER)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda to: to._allgather_base(output, given), given, output, kind=GATHER)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        return self._run(
            lambda to: to._reduce_scatter_base(output, given, opts), given, output, kind=SCATTER
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._run(
            lambda to: to.reduce_scatter(outputs, inputs, opts), inputs, outputs, kind=SCATTER
        )

    def all_to_all_single(
        self, output: Any, given: Any, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> dist.Work:
        if not out_sizes and not in_sizes:
            raise RuntimeError("NCCL Error 7: NCCL operation in progress")
        return self._run(
            lambda to: to.alltoall_base(output, given, out_sizes, in_sizes),
            given,
            output,
            True,
            "all-to-all",
        )

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, to_rank: int, tag: int = 0) -> dist.Work:
        return self._run(
            lambda to: to.send(tensors, to_rank, tag), tensors, (), kind=f"{MESSAGE}to {to_rank}"
        )

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        return self._run(
            lambda to: to.recv(tensors, source, tag), (), tensors, kind=f"{MESSAGE}from {source}"
        )

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._run(lambda to: to.reduce(tensors, opts or dist.ReduceOptions()), (), tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.host.barrier()

    def getBackendName(self) -> str:
        return NAME

    def getSize(self) -> int:
        return self.n

    def getRank(self) -> int:
        return self.me

    def getGroupName(self) -> str:
        return self.known_as

    def setGroupName(self, name: str) -> None:
        self.known_as = name

    def getGroupDesc(self) -> str:
        return self.described_as

    def setGroupDesc(self, words: str) -> None:
        self.described_as = words


class NcclLikeTransport(Nccl):
    """elastic's own code for NCCL, over NcclLike."""

    backend = f"cpu:{NAME}"
    large_bytes = 1 << 10

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(torch.device("cpu"))
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, NcclLike, devices=["cpu"])

    def make(
        self,
        store: Store,
        name: str,
        ranks: Sequence[int],
        me: int,
        timeout: timedelta,
        host: Host = "mesh",
    ) -> dist.ProcessGroup:
        group = NcclLike(PrefixStore(f"{name}/", store), me, len(ranks), timeout, host)
        group._set_group_name(name)
        return group

    def host_only(self) -> NcclLikeTransport:
        return NcclLikeHostOnly()

    def wire(
        self, world: Any, device: torch.device, whole: bool
    ) -> tuple[dist.ProcessGroup, torch.device]:
        world.from_host = not whole
        return super().wire(world, device, whole)

    def communicator(self, group: dist.ProcessGroup) -> Any:
        return group

    def counters(self, group: dist.ProcessGroup) -> tuple[Any, ...]:
        return (group,)

    def warm_up(self, groups: Mapping[dist.ProcessGroup, Collection[Use]]) -> None:
        for warming in (True, False):
            for group in groups:
                group.warming = warming  # type: ignore[attr-defined]
            if warming:
                super().warm_up(groups)

    @contextmanager
    def _batch(self, group: Any) -> Iterator[list[Any]]:
        yield []

    def break_set_up(self, before: Collection[int]) -> None:
        with NcclLike.lock:
            for group in NcclLike.setting_up:
                group.cut_off.set()


class NcclLikeHostOnly(NcclLikeTransport):
    def warm_up(self, groups: Mapping[dist.ProcessGroup, Collection[Use]]) -> None:
        """There is no communicator."""


def use() -> None:
    """In a worker's process: its generations are on NcclLike from now on, and nothing goes through
    a device that has failed."""
    NcclLike.strict = True
    plain = DeviceFaults.check

    def check(faults: DeviceFaults, place: str) -> None:
        try:
            plain(faults, place)
        finally:
            NcclLike.lost = faults.lost

    DeviceFaults.check = check  # type: ignore[method-assign]
    groups.transport_of = NcclLikeTransport  # type: ignore[assignment]
