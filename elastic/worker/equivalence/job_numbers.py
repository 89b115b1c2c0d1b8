"""The numbers of a job's model, for a planner on a machine that has neither GPUs nor a cluster."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch

from elastic.data.batches import item_of
from elastic.data.budget import budget_of
from elastic.data.collate import collate
from elastic.data.open_datasets import dataset_of
from elastic.data.streams import with_stream
from elastic.errors import ElasticError, ProgramError, SpecError
from elastic.program import Program
from elastic.types import Job, ModelProfile, SampleProfile
from elastic.worker.equivalence.small_batch import batch_of
from elastic.worker.equivalence.structure import Structure, structure_of
from elastic.worker.loop.called_program import called_program
from elastic.worker.loop.script_host import ScriptSource, first_call
from elastic.worker.profile.sample_profile import traced_sample
from elastic.worker.program.calls import count_of, tensors_in
from elastic.worker.program.job_program import with_job
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.step.loss_scale import profile_of

log = logging.getLogger(__name__)


def model_profile_of(program: Program, job: Job) -> ModelProfile:
    """Traces the model on the meta device and runs the first sample of the dataset there; allocates
    no weights.

    `sample` is None where samples are of unequal length (`microbatch_tokens`). Raises
    ProgramError for what the program raises there, SpecError where its dataset cannot be read.
    """
    dataset, sample = _data(program, job)
    try:
        program = with_stream(with_job(program, job), dataset, job)
        profile = profile_of(program, job)
        return replace(profile, sample=traced_sample(program, job, sample))
    except ElasticError:
        raise
    except Exception as error:  # a boundary: the user's model may raise anything
        raise ProgramError(
            f"{_where(job)}: on the meta device, where tensors have no values, it {_raised(error)}"
        ) from error


def sample_of_call(program: Program, job: Job) -> SampleProfile | None:
    """What a sample asks of a script's model in the first call that its loop makes of it, without
    the loss, which is the script's own; its trial may have ended before, then it is run once more.
    None = the loop does not come there, or such a call cannot be made again."""
    if not isinstance(program, LoopProgram):
        return None
    try:
        if program.called is None:
            with redirect_stdout(io.StringIO()):  # what it prints was shown
                program = first_call(ScriptSource.of(job), lambda data: batch_of(data, None))
        assert program.called is not None
        again, batch = called_program(program, program.called)
    except SpecError as error:
        log.info("the first call of its model is not known: %s", error)
        return None
    row = {key: value[0].to("meta") for key, value in batch.items()}
    found = traced_sample(replace(again, loss=_summed), job, row)
    _, sample = _data(program, job)
    return found and replace(found, tokens=count_of(program, collate([sample])))


def _summed(output: Any, batch: Any) -> torch.Tensor:
    numbers = [x.sum() for x in tensors_in(output) if x.is_floating_point()]
    return torch.stack([x.float() for x in numbers]).sum()


def _data(program: Program, job: Job) -> tuple[Any, Mapping[str, Any]]:
    """The dataset, and its first sample."""
    try:
        dataset = dataset_of(program, job)
        return dataset, item_of(dataset, 0, None)
    except ElasticError:
        raise
    except Exception as error:  # a boundary: so may the dataset
        raise SpecError(f"{_where(job)}: its dataset {_raised(error)}") from error


def structure_of_job(program: Program, job: Job) -> Structure:
    """What the program's structure says against layouts; nothing where it cannot be followed."""
    dataset, _ = _data(program, job)
    program = with_stream(with_job(program, job), dataset, job)
    try:
        return structure_of(
            program, profile_of(program, job), batch_of(dataset, budget_of(job, dataset, 4), 1)
        )
    except ElasticError:
        raise
    except Exception as error:  # a boundary: the user's model may raise anything
        raise ProgramError(f"{_where(job)}: its forward pass {_raised(error)}") from error


def samples_of(program: Program, job: Job, n: int) -> list[Mapping[str, Any]]:
    """The first few samples of the dataset, as `model_profile_of` sees the first one; none where
    they are of unequal length."""
    dataset, first = _data(program, job)
    if job.microbatch_tokens:
        return []
    return [first, *(item_of(dataset, i, None) for i in range(1, min(n, len(dataset))))]


def _where(job: Job) -> str:
    return job.program or "the program"


def _raised(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
