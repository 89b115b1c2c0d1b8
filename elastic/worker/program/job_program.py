"""The program of a job: what its program.py says, with what its job.yaml adds to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.errors import SpecError
from elastic.program import Program
from elastic.types import Job
from elastic.worker.program.guards import with_memory
from elastic.worker.program.norms.batch_norms import with_norms
from elastic.worker.program.optimizers import JobOptimizer
from elastic.worker.program.schedules import scale, schedule


def with_job(program: Program, job: Job) -> Program:
    """The program as `job` wants it. Raises SpecError where the two contradict each other."""
    return with_norms(with_memory(_with_rates(_with_optimizer(program, job), job), job), job)


def _with_optimizer(program: Program, job: Job) -> Program:
    given = job.optimizer
    if isinstance(program.optimizer, JobOptimizer):
        return program
    if given and program.optimizer is not None:
        where = "elastic.loop has one" if job.script else "Program.optimizer is another"
        raise SpecError(
            f"job.yaml: key 'optimizer' gives an optimizer, and {where}; give one of them"
        )
    if given:
        return replace(program, optimizer=JobOptimizer(given, program.blocks))
    if program.optimizer is None:
        raise SpecError(
            "no optimizer: give Program.optimizer, or `optimizer: {path: torch.optim.AdamW, lr: "
            "3.0e-4}` in job.yaml"
        )
    return program


def _with_rates(program: Program, job: Job) -> Program:
    given, own = job.lr_schedule, program.lr_factor
    base = job.base_global_batch
    by = scale(job.lr_scaling, job.global_batch, base) if base else 1.0
    if isinstance(own, Rates) or (not given and by == 1.0):
        return program
    if job.script:
        key = "lr_schedule" if given else "lr_scaling"
        raise SpecError(
            f"job.yaml: key '{key}': a script that enters elastic.loop sets its own learning "
            "rates; leave it out"
        )
    if given and own is not None:
        raise SpecError(
            "job.yaml: key 'lr_schedule' gives a schedule, and Program.lr_factor is another; give "
            "one of them"
        )
    return replace(program, lr_factor=Rates(schedule(given, job.steps) if given else own, by))


class Rates:
    """Factor on the learning rates of a step: the schedule's, times that of the batch."""

    def __init__(self, factor: Any, by: float) -> None:
        self.factor, self.by = factor, by

    def __call__(self, step: int) -> float:
        return self.by * (self.factor(step) if self.factor is not None else 1.0)
