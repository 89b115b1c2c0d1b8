"""The program of a job: what its program.py says, with what its job.yaml adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.errors import SpecError
from elastic.models.nf4 import in_nf4
from elastic.program import Program, drawing
from elastic.types import Job, LrCurve
from elastic.worker.program.guards import with_memory
from elastic.worker.program.norms.batch_norms import ModelWithNorms, with_norms
from elastic.worker.program.optimizers import JobOptimizer
from elastic.worker.program.schedules import Factor, scale, schedule


def with_job(program: Program, job: Job) -> Program:
    """The program as `job` wants it. Raises SpecError where the two contradict each other."""
    held = _with_seed(with_frozen(program, job), job)
    return with_norms(with_memory(_with_rates(_with_optimizer(held, job), job), job), job)


def with_frozen(program: Program, job: Job) -> Program:
    """With its frozen layers in the bits that the job wants. Raises SpecError."""
    if not job.frozen_weights or program.packed:
        return program
    for key, what in (("script", "its script makes the model"), ("float8", "take one of them")):
        if getattr(job, key):
            raise SpecError(f"job.yaml: frozen_weights and {key} do not go together: {what}")
    try:
        return in_nf4(program)
    except SpecError as error:
        raise SpecError(f"job.yaml: {error}") from error


@dataclass(frozen=True)
class Seeded:
    """A function of the program whose draws follow from the job's seed, in whatever process and
    however often it is called: what a model keeps beside its state is drawn anew by each rank."""

    function: Callable[..., Any]
    seed: int

    def __call__(self, *given: Any) -> Any:
        with drawing(self.seed):
            return self.function(*given)


def _with_seed(program: Program, job: Job) -> Program:
    # a script is seeded as a whole
    if isinstance(program.model, ModelWithNorms) or job.script:
        return program
    init = Seeded(program.init, job.seed) if program.init is not None else None
    return replace(program, model=Seeded(program.model, job.seed), init=init)


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
    by = scale(job.lr_scaling, job.global_batch, job.base_global_batch)
    if isinstance(own, Rates) or (not given and by == 1.0 and not job.phases):
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
    whole = schedule(given, job.steps) if given else own
    each = [_rate(job.in_phase(k), whole) for k in range(len(job.phases))]
    return replace(program, lr_factor=Rates(each or [Rate(0, whole, by)]))


@dataclass(frozen=True)
class Rate:
    """Factor on the learning rates of the steps from `from_step` on: the schedule's, which counts
    its steps from `since`, times `by`."""

    from_step: int
    factor: Factor | None
    by: float
    since: int = 0

    def __call__(self, step: int) -> float:
        return self.by * (self.factor(step - self.since) if self.factor is not None else 1.0)


def _rate(job: Job, whole: Factor | None) -> Rate:
    """Of the phase that the job is in: without a schedule of its own it follows the whole job's."""
    said, begin = job.keys_of(job.phase), job.phases[job.phase].from_step
    by = scale(job.lr_scaling, job.global_batch, job.base_global_batch)
    by *= said.get("lr_factor", 1.0)
    if not (own := said.get("lr_schedule")):
        return Rate(begin, whole, by)
    curve = LrCurve(**{key: value for key, value in own.items() if value is not None})
    return Rate(begin, schedule(curve, job.until_step - begin), by, since=begin)


class Rates:
    """Factor on the learning rates of a step: that of the phase that it is in, whatever phase the
    run is in."""

    def __init__(self, each: Sequence[Rate]) -> None:
        self.each = tuple(each)

    def __call__(self, step: int) -> float:
        return next(rate for rate in reversed(self.each) if rate.from_step <= step)(step)
