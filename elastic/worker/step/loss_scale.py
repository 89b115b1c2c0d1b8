"""The loss scale of float16: gradients that are too small for it are lifted, those that overflow
show that it was too much.

It is one box of the training state, equal on every rank: scale and good steps since it last
changed. Whether a gradient overflowed anywhere rides on the commit all-reduce, so all ranks skip
the same step and change the scale alike; a skipped step counts as a step, its samples are not seen
again. As in Micikevicius et al. 2018, section 3.2, with the numbers of torch.amp.GradScaler; the
loss is a sum here, so the first scale is divided by the tokens of a step.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from elastic.program import Program
from elastic.reshard.rank_boxes import LOSS_SCALE
from elastic.types import Job, ModelProfile, TensorSpec
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**-24  # powers of two: scaling rounds nothing
GROWTH_STEPS = 2000  # good steps after which it is doubled


def profile_of(program: Program, job: Job) -> ModelProfile:
    """The program's profile, with what the job adds to the training state. Raises ProgramError as
    `trace` does."""
    profile = trace(with_job(program, job))
    return replace(profile, extra=(*profile.extra, *scale_specs(job)))


def scale_specs(job: Job) -> tuple[TensorSpec, ...]:
    """The box, where the job has one."""
    if job.precision != "float16":
        return ()
    return (TensorSpec(LOSS_SCALE, (2,), "float64", trainable=False, buffer=True),)


def fresh_scale(job: Job) -> dict[str, torch.Tensor]:
    """The box before the first step, where the job has one."""
    return {spec.fqn: torch.zeros(spec.shape, dtype=torch.float64) for spec in scale_specs(job)}


class LossScale:
    """`box`: float64 [2], zeros before the first step; None = the loss is not scaled."""

    def __init__(self, box: torch.Tensor | None) -> None:
        self.box = box

    @property
    def on(self) -> bool:
        return self.box is not None

    @property
    def value(self) -> float:
        return float(self.box[0]) or 1.0 if self.box is not None else 1.0

    @property
    def exhausted(self) -> bool:
        return self.value <= SMALLEST

    def begin(self, n_tokens: int) -> None:
        """Before the first step of a run, whose steps have about so many tokens."""
        if self.box is not None and not self.box[0]:
            self.box[0] = 2.0 ** math.floor(math.log2(FIRST / max(1, n_tokens)))

    def after(self, overflowed: bool) -> None:
        """A step was done, or skipped."""
        if self.box is None:
            return
        if overflowed:
            self.box[0], self.box[1] = max(SMALLEST, self.value / 2), 0
        elif self.box[1] + 1 >= GROWTH_STEPS:
            self.box[0], self.box[1] = min(LARGEST, self.value * 2), 0
        else:
            self.box[1] += 1
