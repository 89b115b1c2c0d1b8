"""The probe: the loss of one fixed sample, in evaluation mode, which must be the same in the layout before and the one after.

Each generation computes it when it has taken over the state, and again where it stops at a boundary. Both are forward passes of
one sample (with pp: of one per microbatch). A generation whose value differs from what the layout before had at that step never
makes a step: every rank raises, all at the same point, with the old boxes still in hand.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from elastic.data.batches import item_of
from elastic.data.budget import Microbatch, budget_of
from elastic.data.loader import Batch, collate
from elastic.data.streams import Stream
from elastic.errors import ElasticError
from elastic.types import Probed, agree, tolerance
from elastic.worker.loop_program import LoopProgram

if TYPE_CHECKING:
    from elastic.worker.groups import Groups
    from elastic.worker.step import Stepper
    from elastic.worker.workplace import EnterOrder, Workplace

log = logging.getLogger(__name__)

KEPT = 4  # steps whose values a worker remembers


class LayoutDiffers(ElasticError):
    """The layout that was entered computes another function than the one before at `step`; the same on every rank."""

    def __init__(self, text: str, step: int = 0) -> None:
        super().__init__(text)
        self.step = step

    def __reduce__(self) -> tuple[type[LayoutDiffers], tuple[str, int]]:
        return type(self), (str(self), self.step)


class Probe:
    """One worker's part in the probes of one generation. `stepper`: None where the worker only sends."""

    def __init__(self, place: Workplace, order: EnterOrder, groups: Groups, stepper: Stepper | None) -> None:
        self.place, self.order, self.groups, self.stepper = place, order, groups, stepper

    def at_entry(self, step: int) -> Probed | None:
        """All participants call it, once all have their state. Raises LayoutDiffers. None = this program has no probe."""
        expected = self._expected(step)
        began, loss = time.monotonic(), self._loss()
        bad = loss is not None and expected is not None and not agree(loss, expected, tolerance(self.place.job))
        found, told = self._together(bad, loss)
        if found:
            assert expected is not None
            raise LayoutDiffers(self._sentence(step, told, expected), step)
        if loss is None:
            return None
        self._remember(step, loss)
        return Probed(self.order.plan.generation, step, loss, expected, round(time.monotonic() - began, 4))

    def at_boundary(self, step: int) -> Probed | None:
        """The ranks of the plan call it, where they have stopped."""
        began, loss = time.monotonic(), self._loss()
        if loss is None:
            return None
        self._remember(step, loss)
        return Probed(self.order.plan.generation, step, loss, None, round(time.monotonic() - began, 4))

    def _remember(self, step: int, loss: float) -> None:
        probes = self.place.probes
        probes[step] = loss
        for old in sorted(probes)[:-KEPT]:
            del probes[old]

    def _expected(self, step: int) -> float | None:
        """What any of the participants knows, or the driver."""
        plan = self.order.plan
        fresh = plan.resume.source == "fresh"
        mine = None if fresh else self.place.probes.get(step, plan.probe)
        known = torch.tensor([-math.inf if mine is None or not math.isfinite(mine) else mine], dtype=torch.float64)
        if len(self.order.participants) > 1:
            dist.all_reduce(known, op=dist.ReduceOp.MAX, group=self.groups.world)
        return float(known) if math.isfinite(float(known)) else None

    def _together(self, bad: bool, loss: float | None) -> tuple[bool, float]:
        """Has any rank found it wrong, and which loss? The same answer for everyone."""
        said = torch.tensor([float(bad), loss if bad and loss is not None else -math.inf], dtype=torch.float64)
        said = said.nan_to_num(nan=math.inf)
        if len(self.order.participants) > 1:
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.groups.world)
        return bool(said[0]), float(said[1])

    def _sentence(self, step: int, loss: float, expected: float) -> str:
        return (
            f"layout {self.order.plan.layout} computes another function than the one before: after step {step} the loss of the "
            f"probe sample is {loss:.6g} per token, it was {expected:.6g}"
        )

    def _loss(self) -> float | None:
        if self.stepper is None:
            return None
        batch = self._batch()
        return None if batch is None else loss_of_one(self.stepper, batch)

    def _batch(self) -> Batch | None:
        """The first sample; None where it cannot be asked for again, or a script has not said what its loss is."""
        place = self.place
        if isinstance(place.program, LoopProgram) and place.program.evaluation is None:
            return None
        if isinstance(place.dataset, Stream):
            return None
        assert self.stepper is not None
        budget = budget_of(place.job, place.dataset, self.stepper.sequence.multiple)
        part = budget.of_one(0, 1) if budget is not None else Microbatch((0,))
        return collate([item_of(place.dataset, 0, part.length)])


def loss_of_one(stepper: Stepper, batch: Batch) -> float:
    """Loss per token of a batch of one sample, in evaluation mode; every rank of the plan gets the same number."""
    n = stepper.n_microbatches if stepper.groups.pp is not None else 1
    rows = {key: x.expand(n, *x.shape[1:]).contiguous() for key, x in batch.items()}
    stepper.state.train(False)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        value, tokens = stepper.forward_backward([rows], train=False, valid=[1], n_microbatches=n)
    stepper.state.train()
    first = stepper.dp == 0
    mine = [value if stepper.speaks and first else 0.0, tokens if stepper.counts and first else 0]
    sums = torch.tensor(mine, dtype=torch.float64)
    if stepper.plan.layout.world_size > 1:
        dist.all_reduce(sums, group=stepper.groups.plan)
    return float(sums[0] / sums[1].clamp(min=1))
