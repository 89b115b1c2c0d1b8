"""Sessions with one fault each: what the checks of certify must find."""

import time
from dataclasses import replace

from elastic.types import Abort, DigestPart, EnterPlan, Event, Quiesced, StepDone
from elastic.types.orders import InjectFault, WorkerOrder
from elastic.worker.session.session import Session


class SlowAbort(Session):
    """Breaks off 3 s late."""

    def order(self, order: WorkerOrder) -> None:
        if isinstance(order.action, Abort):
            time.sleep(3.0)  # sleeps: the fault
        super().order(order)


class WrongLoss(Session):
    def _put(self, event: Event) -> None:
        super()._put(
            replace(event, train_loss=event.train_loss + 1e-3)
            if isinstance(event, StepDone)
            else event
        )


class LeavesOutSteps(Session):
    def _put(self, event: Event) -> None:
        if not (isinstance(event, StepDone) and event.step == 2):
            super()._put(event)


class OtherContent(Session):
    def _put(self, event: Event) -> None:
        other = isinstance(event, DigestPart) and event.after is not None
        super()._put(replace(event, after=event.after + 1) if other else event)


class OtherFunction(Session):
    """Layouts on several ranks that it changes to, once it has been on one, compute something
    else."""

    def order(self, order: WorkerOrder) -> None:
        if isinstance(order.action, EnterPlan) and len(order.action.plan.ranks) == 1:
            super().order(WorkerOrder(InjectFault("layout")))
        super().order(order)


class KeepsNothing(Session):
    def _put(self, event: Event) -> None:
        super()._put(replace(event, holdings=()) if isinstance(event, Quiesced) else event)


class SlowSteps(Session):
    def _at_phase(self, phase: str, step: int) -> None:
        if phase == "stepping":
            time.sleep(0.2)  # sleeps: the fault
        super()._at_phase(phase, step)
