"""Faults of a worker at an operation of a chosen phase of a chosen generation, for workers on
NcclLike: put in from outside, the product has no hook.

kill: the process dies, as with a lost node. stop: it is stopped, its connections stay. stuck: its
training thread never comes back, as from a kernel that does not end; nothing frees it. abort: it
waits there until its generation is aborted.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from support.worker.nccl_like import NcclLike

from elastic.worker.process_groups.groups import Groups
from elastic.worker.session import takeover
from elastic.worker.session.loss_probe import Probe
from elastic.worker.session.session import Session
from elastic.worker.state import peer_replicas
from elastic.worker.step.optimizer_step import Stepper

Kind = Literal["kill", "stop", "stuck", "abort"]
Phase = Literal["meet", "move", "probe", "step", "commit", "copy"]
LOOK_S = 0.001


@dataclass
class PhaseFault:
    """At the operation of this phase that comes after `after` others. `from_step`: of a step or
    commit that begins when so many are done. `path`: gets the time (time.monotonic) at which it
    happened."""

    kind: Kind
    phase: Phase
    generation: int
    path: str
    after: int = 0
    from_step: int = 0


_here = threading.local()  # the phase of each thread
_running: list[Groups] = []  # the newest generation's


@contextmanager
def _within(phase: str) -> Any:
    before, _here.phase = getattr(_here, "phase", ""), phase
    try:
        yield
    finally:
        _here.phase = before


def _wrapped(
    plain: Callable[..., Any], phase: str, wanted: Callable[..., bool] = lambda *_: True
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _within(phase if wanted(*args) else ""):
            return plain(*args, **kwargs)

    return call


class Trap:
    """Counts the operations of the fault's phase, and springs at one of them."""

    def __init__(self, fault: PhaseFault) -> None:
        self.fault, self.left, self.lock = fault, fault.after, threading.Lock()

    def __call__(self, of: Any = None) -> None:
        here = (
            getattr(_here, "phase", "") == self.fault.phase
            and _running[-1].generation == self.fault.generation
        )
        if not here:
            return
        with self.lock:
            self.left -= 1
        if self.left == -1:
            spring(self.fault)


def arm_phase(session: Session, fault: PhaseFault) -> None:
    """From now on; one fault per process. Operations are those of the process groups; "meet" begins
    with one more, before anyone was met."""
    late = lambda stepper, *_: stepper.state.step >= fault.from_step  # noqa: E731
    NcclLike.before = Trap(fault)
    Stepper.run = _wrapped(Stepper.run, "step", late)  # type: ignore[method-assign]
    Stepper._commit = _wrapped(Stepper._commit, "commit", late)  # type: ignore[method-assign]
    Probe.at_entry = _wrapped(Probe.at_entry, "probe")  # type: ignore[method-assign]
    takeover.carry_out = _wrapped(takeover.carry_out, "move")
    peer_replicas.send_boxes = _wrapped(peer_replicas.send_boxes, "copy")
    peer_replicas.receive_boxes = _wrapped(peer_replicas.receive_boxes, "copy")


def follow_generations() -> None:
    """In a worker's process, before any work of it."""
    plain = Groups._form

    def join(groups: Groups, *args: Any, **named: Any) -> None:
        _running.append(groups)
        with _within("meet"):
            if NcclLike.before is not None:
                NcclLike.before(groups)
            plain(groups, *args, **named)

    Groups._form = join  # type: ignore[method-assign]


def spring(fault: PhaseFault) -> None:
    part = Path(fault.path + ".part")
    part.write_text(str(time.monotonic()))
    part.rename(fault.path)
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "stuck":
        threading.Event().wait()  # sleeps: a thread that never comes back is the fault
    else:
        while not _running[-1].aborted:
            time.sleep(LOOK_S)  # sleeps: in a worker, which is aborted from outside


Session.arm_phase = arm_phase  # type: ignore[attr-defined]
