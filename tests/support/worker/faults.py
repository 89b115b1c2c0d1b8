"""Faults at a chosen collective of a chosen step, put into a worker process of a test from outside:
the product has no hook.

Collectives are seen as torch dispatches them (c10d and functional ones alike) while `Stepper.run`
is under way, and where other threads call send and receive for peer replicas. A process that is
armed dies by SIGKILL, as a lost node would, or does not hear a commit that the others hear.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.worker.session.session import Session
from elastic.worker.step.optimizer_step import Stepper

COMMIT_NUMBERS = 8  # float64 numbers at least in the vector of a commit
Kind = Literal["before", "after", "soon", "deaf", "list"]


@dataclass(frozen=True)
class Fault:
    """`step`: done before the one in which it happens. `at`: index of the collective, or "commit",
    or "copy" (the first send or receive of a peer replica that begins after that step).

    before, after: the process dies when the call begins, has returned. soon: `delay_s` after it has
    begun. deaf: the call is made, its result destroyed, and an error raised as if a peer had gone.
    list: nothing; the names go to `path`.
    """

    kind: Kind
    step: int
    at: int | Literal["commit", "copy"] = 0
    delay_s: float = 0.0
    path: str = ""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trap(TorchDispatchMode):
    """Counts the collectives of one step and springs at one of them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(("c10d.", "_c10d_functional.")) or "wait_tensor" in name:
            return func(*args, **(kwargs or {}))
        vector = args[0][0] if "allreduce" in name and isinstance(args[0], list) else None
        commit = (
            vector is not None
            and vector.dtype == torch.float64
            and vector.numel() >= COMMIT_NUMBERS
        )
        self.names.append("commit" if commit else name)
        here = (
            self.fault.at == ("commit" if commit else len(self.names) - 1)
            or self.fault.at == len(self.names) - 1
        )
        kind = self.fault.kind if here else "list"
        if kind == "before":
            _die()
        if kind == "soon":
            threading.Timer(self.fault.delay_s, _die).start()
        out = func(*args, **(kwargs or {}))
        if kind in ("after", "deaf"):
            _wait(out)
        if kind == "after":
            _die()
        if kind == "deaf":
            vector.fill_(float("nan"))
            raise dist.DistBackendError("Connection closed by peer (put in by the test)")
        return out


def _wait(out: Any) -> None:
    for work in out if isinstance(out, tuple | list) else (out,):
        if hasattr(work, "wait"):
            work.wait()


def arm(session: Session, fault: Fault) -> None:
    """From now on; one fault per process."""
    plain = Stepper.run

    def run(stepper: Stepper, *args: Any) -> Any:
        if stepper.state.step != fault.step:
            return plain(stepper, *args)
        if fault.at == "copy":
            _trap_copies(fault)
            return plain(stepper, *args)
        Stepper.run = plain  # type: ignore[method-assign]
        with Trap(fault) as trap:
            commit = plain(stepper, *args)
        if fault.path:
            Path(fault.path).write_text(json.dumps(trap.names))
        return commit

    Stepper.run = run  # type: ignore[method-assign]


def _trap_copies(fault: Fault) -> None:
    training = threading.get_ident()

    def call(plain: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == training:
            return plain(*args, **kwargs)
        if fault.kind == "before":
            _die()
        plain(*args, **kwargs)
        return _die()

    for name in ("isend", "irecv", "send", "recv"):
        setattr(dist, name, partial(call, getattr(dist, name)))


Session.arm = arm  # type: ignore[attr-defined]
