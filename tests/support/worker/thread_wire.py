"""Participants of a move as threads of one process, over a wire that is as strict as NCCL: the
operations of a group start together and end together, groups of one participant run one after the
other, and a send ends when it is received.

It stands in for `torch.distributed` in elastic.worker.state.state_transfer, and counts.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.worker.state import state_transfer

LATE_S = 20.0
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}


@dataclass
class Op:
    what: str
    tensor: torch.Tensor
    group: Group
    group_peer: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class Group:
    """One participant's end. `ops`: of each group of operations that it started."""

    wire: Wire
    me: int
    ops: list[int] = field(default_factory=list)
    sent_bytes: int = 0
    queue: queue.SimpleQueue[list[Op] | None] = field(default_factory=queue.SimpleQueue)


class Wire:
    """`dist` for a move of n participants."""

    P2POp = staticmethod(Op)
    isend, irecv = "send", "receive"

    def __init__(self, n: int, fault: Callable[[Op], None] | None = None) -> None:
        self.fault = fault  # what happens to a message that has arrived
        self.groups = [Group(self, me) for me in range(n)]
        self.lock = threading.Lock()
        self.posted: dict[tuple[int, int, str], deque[Op]] = {}
        self.stuck: list[str] = []

    def get_world_size(self, group: Group) -> int:
        return len(self.groups)

    def batch_isend_irecv(self, ops: list[Op]) -> list[Any]:
        group = ops[0].group
        group.ops.append(len(ops))
        group.sent_bytes += sum(
            op.tensor.numel() * op.tensor.element_size() for op in ops if op.what == "send"
        )
        group.queue.put(ops)
        return [Work(ops)]

    def run(self, group: Group) -> None:
        """The participant's device: one group after the other."""
        while (ops := group.queue.get()) is not None:
            for op in ops:
                self.post(op)
            for op in ops:
                if not op.done.wait(LATE_S):
                    self.stuck.append(f"{group.me}: {op.what} with {op.group_peer}")
                    return

    def post(self, op: Op) -> None:
        pair = (op.group.me, op.group_peer) if op.what == "send" else (op.group_peer, op.group.me)
        with self.lock:
            self.posted.setdefault((*pair, op.what), deque()).append(op)
            sends, receives = (
                self.posted.setdefault((*pair, what), deque()) for what in ("send", "receive")
            )
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                receive.tensor.copy_(send.tensor)
                if self.fault is not None:
                    self.fault(receive)
                send.done.set()
                receive.done.set()


@dataclass
class Work:
    ops: list[Op]

    def wait(self) -> None:
        for op in self.ops:
            if not op.done.wait(LATE_S):
                raise TimeoutError(f"participant {op.group.me} waits for {op.group_peer}")


class Reads(TorchDispatchMode):
    """Counts where this thread waits for what a device has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.calls = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        self.n += name in READS
        return func(*args, **(kwargs or {}))


@contextmanager
def reads_counted() -> Iterator[Reads]:
    """Of this thread, while it is inside. `run` sees to `tolist`, which goes past every dispatch
    for a CPU tensor."""
    with Reads() as reads:
        _here.reads = reads
        try:
            yield reads
        finally:
            _here.reads = None


_here = threading.local()


def run(
    n: int,
    participant: Callable[[Group], Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Op], None] | None = None,
) -> tuple[list[Any], list[Group]]:
    """Runs `participant` as each of n; what they returned or raised, and their ends of the wire."""
    wire = Wire(n, fault)
    answers: list[Any] = [None] * n
    real = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        reads = getattr(_here, "reads", None)
        if reads is not None:
            reads.n += 1
        return real(tensor)

    def live(me: int) -> None:
        try:
            answers[me] = participant(wire.groups[me])
        except Exception as error:  # noqa: BLE001 - for the test to look at
            answers[me] = error

    with monkeypatch.context() as patch:
        patch.setattr(state_transfer, "dist", wire)
        patch.setattr(torch.Tensor, "tolist", tolist)
        devices = [
            threading.Thread(target=wire.run, args=(group,), daemon=True) for group in wire.groups
        ]
        hosts = [threading.Thread(target=live, args=(me,), daemon=True) for me in range(n)]
        for thread in (*devices, *hosts):
            thread.start()
        for thread in hosts:
            thread.join(2 * LATE_S)
        for group in wire.groups:
            group.queue.put(None)
    assert not wire.stuck, wire.stuck
    return answers, wire.groups
