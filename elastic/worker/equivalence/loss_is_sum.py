"""Is a program's loss a sum over the batch? Found out on shapes, without a weight in memory: by the
driver before a worker starts, and by workers of a model that is too large to be built whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from elastic.data.batches import item_of
from elastic.data.budget import Microbatch, budget_of
from elastic.data.collate import collate
from elastic.errors import ElasticError, ProgramError
from elastic.program import Program
from elastic.types import Job
from elastic.worker.program.calls import call_model, loss_of
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import build_meta

log = logging.getLogger(__name__)

Batch = dict[str, Tensor]
MOST_ELEMENTS = 1 << 26  # of an output that the driver makes up: logits of long sequences are more


def check_before_start(program: Program, job: Job, dataset: Any) -> None:
    """Raises ProgramError for a loss that is a mean, and for a first sample that the program takes
    no input from. What cannot run without values is not judged: the workers run it."""
    program = with_job(program, job)
    with torch.random.fork_rng(devices=[]):
        try:
            model = build_meta(program)
            check_on_shapes(
                program, model, lambda n: first_sample(job, dataset, n), most=MOST_ELEMENTS
            )
        except ElasticError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's model and dataset
            log.info("its loss was not looked at: %s", " ".join(str(error).split())[:200])


def first_sample(job: Job, dataset: Any, times: int, *, multiple: int = 1) -> Batch:
    """The first sample, `times` over; of what a job gives micro-batches by tokens, filled up, and
    no more than go into one."""
    budget = budget_of(job, dataset, multiple)
    part = budget.of_one(0, times) if budget is not None else Microbatch((0,) * times)
    return collate([item_of(dataset, i, part.length) for i in part.ids])


def check_on_shapes(
    program: Program, model: nn.Module, batch: Callable[[int], Batch], *, most: int | None = None
) -> None:
    """`model`: on the meta device; `batch`: the first sample, so many times over. The loss is that
    of made-up outputs of the right shape. A model that wants values is not judged."""
    ones, twos = batch(1), batch(2)
    try:
        with torch.no_grad():
            once, twice = (call_model(program, model, _on_meta(one)) for one in (ones, twos))
    except (NotImplementedError, RuntimeError) as error:
        log.info("not rehearsed: %s", " ".join(str(error).split())[:200])
        return
    if most is not None and _n_elements(twice) > most:
        return
    torch.manual_seed(0)
    refuse_a_mean(
        float(loss_of(program, made_up(once), ones)), float(loss_of(program, made_up(twice), twos))
    )


def refuse_a_mean(once: float, twice: float) -> None:
    """The same sample twice must double the loss. Raises ProgramError for a mean: its scale would
    change with the layout."""
    if once and abs(twice - once) < 1e-3 * abs(once):
        raise ProgramError(
            f"Program.loss returned {once:.4f} for one sample and {twice:.4f} for the same sample "
            "twice: a mean, it seems; it must return the sum over the batch (reduction='sum'), "
            "which elastic divides by the global count of the step"
        )


def made_up(output: Any) -> Any:
    """Numbers in the shape of an output on the meta device; every row is the same."""
    if isinstance(output, Tensor):
        torch.manual_seed(0)
        row = torch.randn(output.shape[1:]).to(output.dtype)
        return (
            row.expand(output.shape).contiguous()
            if output.ndim
            else torch.ones((), dtype=output.dtype)
        )
    if isinstance(output, Mapping):
        return type(output)(**{key: made_up(value) for key, value in output.items()})
    return (
        type(output)([made_up(value) for value in output])
        if isinstance(output, list | tuple)
        else output
    )


def _on_meta(batch: Batch) -> Batch:
    return {key: value.to("meta") for key, value in batch.items()}


def _n_elements(output: Any) -> int:
    if isinstance(output, Tensor):
        return output.numel()
    values = output.values() if isinstance(output, Mapping) else output
    return sum(map(_n_elements, values)) if isinstance(output, Mapping | list | tuple) else 0
