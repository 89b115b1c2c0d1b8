"""The probe: the loss of one fixed sample, in evaluation mode, which must be the same in the layout
before and the one after.

Each generation computes it when it has taken over the state, and again where it stops at a
boundary: forward passes of one sample (with pp: of one per microbatch) that leave no trace. A
generation whose value differs from what the layout before had at that step never makes a step:
every rank raises, all at the same point, with the old boxes still in hand.

A program whose loss is another one each time (noise that is drawn in every mode) has no probe; that
is tried before the start (rehearsal.py). With the probe at the entry ranks compare what they read
as a few of the samples: each opens the dataset by itself. Of a stream that is its first item, where
the run begins.
"""

from __future__ import annotations

import logging
import math
import time
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from elastic.data.budget import Microbatch, budget_of
from elastic.data.collate import Batch, collate
from elastic.data.streams import Stream
from elastic.errors import ElasticError, ProgramError
from elastic.types import Probed, agree, tolerance
from elastic.worker.process.doing import doing
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.step.evaluation import evaluating

if TYPE_CHECKING:
    from elastic.worker.process_groups.groups import Groups
    from elastic.worker.session.workplace import EnterOrder, Workplace
    from elastic.worker.step.optimizer_step import Stepper

log = logging.getLogger(__name__)

KEPT = 4  # steps whose values a worker remembers
ROUNDED = 1e-3  # samples of real numbers may differ by so much between machines, of their norm


class LayoutDiffers(ElasticError):
    """The layout that was entered computes another function than the one before at `step`; the same
    on every rank."""

    def __init__(self, text: str, step: int = 0) -> None:
        super().__init__(text)
        self.step = step

    def __reduce__(self) -> tuple[type[LayoutDiffers], tuple[str, int]]:
        return type(self), (str(self), self.step)


class Probe:
    """One worker's part in the probes of one generation. `stepper`: None where the worker only
    sends."""

    def __init__(
        self, place: Workplace, order: EnterOrder, groups: Groups, *, stepper: Stepper | None
    ) -> None:
        self.place, self.order, self.groups, self.stepper = place, order, groups, stepper
        self.streams = isinstance(place.dataset, Stream)
        # later a stream stands elsewhere, and what it begins with may be another item by then
        self.begins = self.streams and order.plan.resume.source == "fresh"
        self.possible = (
            place.probe_repeats
            # a script may not have said what its loss is
            and (not isinstance(place.program, LoopProgram) or place.program.evaluation is not None)
            and not self.streams
        )

    def at_entry(self, step: int) -> Probed | None:
        """All participants call it, once all have their state. Raises LayoutDiffers. None = this
        program has no probe."""
        expected = self._expected(step)
        if not self.possible:
            return None
        began, loss = time.monotonic(), self._loss()
        bad = False
        if loss is not None and expected is not None:
            bad = not agree(loss, expected, tolerance(self.place.job))
        found, told = self._together(bad, loss)
        if found:
            assert expected is not None
            got = f"{told:.6g} per token" if math.isfinite(told) else "no number"
            raise LayoutDiffers(
                f"layout {self.order.plan.layout} computes another function than the one before: "
                f"after step {step} the loss of the probe sample is {got}, it was {expected:.6g}",
                step,
            )
        if loss is None:
            return None
        self._remember(step, loss)
        return Probed(
            self.order.plan.generation, step, loss, expected, round(time.monotonic() - began, 4)
        )

    def at_boundary(self, step: int) -> Probed | None:
        """The ranks of the plan call it, where they have stopped."""
        if not self.possible:
            return None
        began, loss = time.monotonic(), self._loss()
        assert loss is not None
        self._remember(step, loss)
        return Probed(
            self.order.plan.generation, step, loss, None, round(time.monotonic() - began, 4)
        )

    def _remember(self, step: int, loss: float) -> None:
        probes = self.place.probes
        probes[step] = self.order.plan.generation, loss
        for old in sorted(probes)[:-KEPT]:
            del probes[old]

    def _expected(self, step: int) -> float | None:
        """What the driver knows of that step, else what those know who were in the generation that
        the state comes from. Where one of the participants has no probe, nobody has. Raises
        ProgramError, on all of them, where they do not read the same samples."""
        plan = self.order.plan
        mine = None
        if plan.resume.source != "fresh":
            generation, loss = self.place.probes.get(step, (-1, 0.0))
            mine = loss if generation == plan.resume.generation else None
            mine = plan.probe if plan.probe is not None else mine
        known = -math.inf if mine is None or not math.isfinite(mine) else mine
        read = self._samples()
        numbers = [known, 0.0 if self.possible else 1.0, *read, *(-x for x in read)]
        said = torch.tensor(numbers, dtype=torch.float64)
        self.groups.control.all_reduce(said, dist.ReduceOp.MAX)
        self.possible = not bool(said[1])
        if self.possible or self.begins:
            most, least = said[2:].view(2, -1).unbind()
            self._check_samples((most + least).tolist())
        return float(said[0]) if math.isfinite(float(said[0])) else None

    def _together(self, bad: bool, loss: float | None) -> tuple[bool, float]:
        """Has any rank found it wrong, and which loss? The same answer for everyone."""
        said = torch.tensor(
            [float(bad), loss if bad and loss is not None else -math.inf], dtype=torch.float64
        )
        said = said.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        self.groups.control.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said[0]), float(said[1])

    def _ids(self) -> list[int]:
        n = len(self.place.dataset)
        return [0] if self.streams else [0, n // 2, n - 1]

    def _samples(self) -> list[float]:
        """What this worker reads as some of the samples, in two numbers each; read once."""
        place = self.place
        told = self.possible or self.begins
        if told and not place.samples_read:
            with doing("batch"):
                for sample in self._ids():
                    item = place.sample_draws.item(place.dataset, sample)
                    place.samples_read += fingerprint(collate([item]))
        return place.samples_read if told else [0.0] * 6

    def _check_samples(self, apart: list[float]) -> None:
        """`apart`: by how much the numbers of ranks differ."""
        for i, sample in enumerate(self._ids()):
            whole, real = apart[2 * i : 2 * i + 2]
            if not (whole or real > ROUNDED):
                continue
            if self.streams:
                raise ProgramError(
                    "ranks read other values as the first sample of the stream, which each of "
                    "them reads by itself; it must be the same in every process: give a "
                    "generator of its own a seed, take no hash() of a text and no clock"
                )
            raise ProgramError(
                f"ranks read other values as sample {sample} of the dataset, which each of "
                "them opens by itself; it must be the same in every process: sort what "
                "os.listdir and glob give, sort a set of texts, take no hash() of a text, no "
                "clock, no file of one node alone and nothing that threads of its own draw"
            )

    def _loss(self) -> float | None:
        return (
            None if self.stepper is None else loss_of_one(self.stepper, self._batch(self.stepper))
        )

    def _batch(self, stepper: Stepper) -> Batch:
        """The first sample, the same at each call."""
        place = self.place
        budget = budget_of(place.job, place.dataset, stepper.sequence.multiple)
        part = budget.of_one(0, 1) if budget is not None else Microbatch((0,))
        with doing("batch"):
            return collate([place.sample_draws.item(place.dataset, 0, part.length)])


def fingerprint(sample: Batch) -> tuple[float, float]:
    """Of a sample's whole numbers, exactly, and of its others: machines may round them otherwise,
    or decode a picture."""
    digest, real = sha256(), 0.0
    for key, x in sorted(sample.items()):
        flat = x.detach().cpu().flatten()
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.uint8:
            flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
            flat = flat.double().nan_to_num()
            along = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) ** 2)
            real += float(flat @ along) / max(float(flat.norm() * along.norm()), 1e-30)
        else:
            digest.update(f"{key} {list(x.shape)} {flat.tolist()}".encode())
    return float(int.from_bytes(digest.digest()[:6], "little")), real


def loss_of_one(stepper: Stepper, batch: Batch) -> float:
    """Loss per token of a batch of one sample, in evaluation mode; every rank of the plan gets the
    same number. With pp each microbatch is that sample."""
    n = stepper.n_microbatches if stepper.groups.pp is not None else 1
    rows = {key: x.expand(n, *x.shape[1:]).contiguous() for key, x in batch.items()}
    with evaluating(stepper.state, stepper.job, stepper.device):
        value, tokens = stepper.forward_backward([rows], train=False, n_microbatches=n)
    first = stepper.dp == 0
    mine = [value if stepper.speaks and first else 0.0, tokens if stepper.counts and first else 0]
    sums = torch.tensor(mine, dtype=torch.float64)
    stepper.groups.commit.all_reduce(sums)
    return float(sums[0] / sums[1].clamp(min=1))
