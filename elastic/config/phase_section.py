"""What stands under `phases:` in job.yaml: which of the job's keys are others from a step on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, model_validator

from elastic.config.optimization import LrSchedule
from elastic.config.strict_model import NODES_MOST, NORM_MOST, SAMPLES_MOST, STEPS_MOST, Strict
from elastic.errors import SpecError
from elastic.types import Job
from elastic.types.typed_job import OF_PHASE, Recompute, Schedule


class PhaseSpec(Strict):
    """Keys of the job that are others from the step after `from_step` on; all that it leaves out is
    the job's own. `lr_factor`: on the learning rates that the job's schedule gives; `lr_schedule`:
    a schedule of its own, whose steps count from its first."""

    from_step: int = Field(gt=0, le=STEPS_MOST)
    global_batch: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    lr_factor: float | None = Field(None, gt=0, le=NORM_MOST)
    lr_schedule: LrSchedule | None = None
    layout: str | dict[str, str] | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = Field(None, gt=1, le=NODES_MOST)
    microbatch_size: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    microbatch_tokens: int | None = Field(None, gt=0, le=SAMPLES_MOST)
    activation_checkpointing: Recompute | None = None
    zero_stage: Literal[1, 2, 3] | None = None
    data: dict[Literal["train"], dict[str, Any]] | None = None  # keys of the job's data.train

    @model_validator(mode="before")
    @classmethod
    def _of_a_phase(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for key in given:
            if key in {one.name for one in fields(Job)} - {*cls.__pydantic_fields__}:
                raise ValueError(
                    f"'{key}' is the same for all steps of a run; a phase can have "
                    f"{', '.join(cls.__pydantic_fields__)}"
                )
        if isinstance(given.get("layout"), Mapping):
            return {**given, "layout": {str(n): text for n, text in given["layout"].items()}}
        return given

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


def in_phase(job: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The plain data of a job with phases as that of a job which is one of them, with so many
    steps."""
    typed = Job.from_plain({**job, "phase": number})
    said, begin = typed.keys_of(number), typed.phases[number].from_step
    keys = {key: said[key] for key in OF_PHASE}
    keys |= {"lr_schedule": said.get("lr_schedule"), "steps": typed.until_step - begin}
    return {**job, **keys, "drill": [], "phases": []}


def check_phases(
    phases: Sequence[PhaseSpec], job: Mapping[str, Any], check: Callable[[dict[str, Any]], object]
) -> None:
    """Raises ValueError for the first entry that is wrong. `job`: all of it, as plain data;
    `check`: raises SpecError for what no job may be."""
    before = 0
    for number, phase in enumerate(phases, 1):
        where, begin = f"phases, entry {number}", phase.from_step
        if begin <= before:
            raise ValueError(
                f"{where}: from_step={begin} does not come after {before}, where the phase before "
                "it begins; they are in order"
            )
        if begin >= job["steps"]:
            raise ValueError(
                f"{where}: from_step={begin} is not within the job's {job['steps']} steps; give "
                "a smaller one, or more steps"
            )
        before = begin
    if phases and job["script"]:
        raise ValueError("phases: a script reads its own data in its own batches; leave it out")
    for number in range(1, len(phases) + 1):
        try:
            check(in_phase(job, number))
        except SpecError as error:
            text = str(error).removeprefix("it: ")
            raise ValueError(f"phases, entry {number}: {text}") from None
