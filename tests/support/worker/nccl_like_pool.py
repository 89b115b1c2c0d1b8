"""Worker processes whose generations are on a process group that behaves like NCCL's."""

from __future__ import annotations

from typing import Any, ClassVar

from support.worker import nccl_like
from support.worker.faulty_pool import FaultyPool, ServedFaulty

from elastic.worker.session.session import Session
from elastic.worker.step.optimizer_step import Stepper


def _dies_on_device(session: Session, step: int, after: int) -> None:
    """In the step that begins when `step` is done: at the operation on the device that comes after
    so many others."""
    plain = Stepper.run

    def run(stepper: Stepper, *args: Any) -> Any:
        if stepper.state.step == step:
            nccl_like.NcclLike.dies_after = after
        return plain(stepper, *args)

    Stepper.run = run  # type: ignore[method-assign]


Session.dies_on_device = _dies_on_device  # type: ignore[attr-defined]


def _late(session: Session, seconds: float) -> None:
    """Operations on the device begin so long after their calls."""
    nccl_like.NcclLike.late_s = seconds


Session.late = _late  # type: ignore[attr-defined]


class ServedNcclLike(ServedFaulty):
    def __init__(self, put: Any) -> None:
        from support.worker import phase_faults  # gives the session `arm_phase`

        phase_faults.follow_generations()
        nccl_like.use()
        super().__init__(put)


class NcclLikePool(FaultyPool):
    served: ClassVar[type] = ServedNcclLike
