"""Prepare in the shadow: what a new process does slowly the first time is done before the cut,
while others train."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch import nn

from elastic.program import Program
from elastic.types import ModelProfile, Plan, Rehearsal, agree
from elastic.types.grid import stage_blocks, stages_at
from elastic.worker.equivalence.draw_trial import try_call, try_draws
from elastic.worker.equivalence.loss_is_sum import (
    check_beside,
    check_on_shapes,
    first_sample,
    refuse_a_mean,
)
from elastic.worker.equivalence.stages.unit_flow import with_flow
from elastic.worker.parallel.context_parallel import (
    check_calls,
    check_loss,
    check_possible,
    largest_cp,
)
from elastic.worker.parallel.keyed_draws import KeyedDraws
from elastic.worker.parallel.stages.carried_values import MODEL_INPUT, carries
from elastic.worker.program.calls import call_model, inputs_of, keywords_of, loss_of, tensors_in
from elastic.worker.program.model_profile import block_names, build_meta
from elastic.worker.session.generation import groups_of
from elastic.worker.session.workplace import Workplace
from elastic.worker.state.state_transfer import warm_staging
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.evaluation import drawing_on
from elastic.worker.step.optimizer_step import Stepper

log = logging.getLogger(__name__)

REPEATS = 1e-6  # relative difference of one loss in one process
# a larger model is not built whole, not even once; nor is one that is read from files
WHOLE_MOST_PARAMETERS = 1 << 30


def rehearse(place: Workplace) -> None:
    """Runs the program once on the CPU or GPU of this worker, where it is small enough, else on the
    meta device. Raises what the program raises."""
    warm_staging()
    # its loss is computed in its loop, which is not entered for a rehearsal
    if place.script is not None:
        return
    cp = largest_cp(place.job)
    check_possible(place.program, cp)
    if place.program.log is not None or place.program.metrics is not None:
        check_beside(
            place.program, build_meta(place.program), place.job, train=lambda: place.dataset,
            validation=lambda: place.validation,
        )  # fmt: skip
    if place.profile.n_params > WHOLE_MOST_PARAMETERS or place.program.weights is not None:
        model = build_meta(place.program)  # shapes only; one that wants values is not rehearsed
        with _noting_inputs(place, model):
            check_on_shapes(place.program, model, lambda n: _batch(place, n, "cpu", within=False))
        if cp > 1:
            check_calls(place.program, _batch(place, 1, "cpu", multiple=2 * cp), cp)
        return
    torch.manual_seed(0)
    model = place.program.model().to(place.device)
    if place.program.init is not None:
        place.program.init(model)
    with _noting_inputs(place, model):
        _loss(place, model, 1).backward()
    model.eval()
    with torch.no_grad():
        refuse_a_mean(float(_loss(place, model, 1)), float(_loss(place, model, 2)))
        place.probe_repeats = _repeats(place, model)
    if cp > 1:
        check_loss(place.program, model, _batch(place, 1, place.device, multiple=2 * cp), cp=cp)


def keyed(place: Workplace) -> Program:
    """The program, with what it draws keyed by sample and place; the same where it draws
    nothing."""
    compiled = place.job.compile
    if place.script is not None:
        place.script.draws = KeyedDraws(compiled=compiled, find=try_call, say=_say)
        return place.script.keyed(place.program)
    trial = try_draws(place.program, _batch(place, 1, "cpu"))
    if not trial.modules:
        return place.program
    return KeyedDraws(trial, compiled).of(place.program)


def _say(text: str) -> None:
    """Of what a script prints, that of rank 0 is shown."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def handed_on(place: Workplace) -> ModelProfile:
    """The profile, with what the pipeline stages of several groups of blocks hand on."""
    if place.script is not None or not carries(place.program):
        return place.profile
    return with_flow(place.program, place.profile, _batch(place, 1, "cpu"))


def _repeats(place: Workplace, model: nn.Module) -> bool:
    """Is the loss of the first sample the same each time in evaluation mode, whatever is drawn?"""
    found = []
    for seed in (1, 2):
        with drawing_on(seed, place.device):
            found.append(float(_loss(place, model, 1)))
    return agree(found[0], found[1], REPEATS)


@contextmanager
def _noting_inputs(place: Workplace, model: nn.Module) -> Iterator[None]:
    """Keeps what each block is called with for one sample: a later pipeline stage begins with
    that."""
    notes: list[torch.Tensor | None] = []

    def note(module: nn.Module, arguments: tuple[object, ...]) -> None:
        noted, first = None, arguments[0] if arguments else None
        if isinstance(first, torch.Tensor):
            noted = torch.zeros(first[:1].shape, dtype=first.dtype, device=place.device)
        notes.append(noted)

    blocks = [model.get_submodule(name) for name in block_names(model, place.program.blocks)]
    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    place.block_inputs = (
        notes[: len(blocks)] if len(notes) in (len(blocks), 2 * len(blocks)) else []
    )


def rehearse_plan(place: Workplace, rehearsal: Rehearsal) -> bool:
    """One step of this worker's part of a coming plan, on the first sample, with collectives that
    move nothing: builds the model, cuts it, lets DTensor work out its shardings, warms kernels and
    optimizer. The numbers are thrown away. False: the plan has no part for this worker. Raises what
    the program raises."""
    layout = rehearsal.layout
    rank = rehearsal.ranks[place.me.local_rank]
    if rank < 0:
        return False
    ranks, samples = (place.me,) * layout.world_size, (rehearsal.n_samples,) * layout.dp
    plan = Plan(0, layout, ranks, samples, rehearsal.layers, rehearsal.n_microbatches)
    groups = groups_of(place, plan)
    try:
        groups.pretend(rank)
        state = TrainState(
            place.program, place.profile, groups, layout=layout, layers=plan.layers, rank=rank,
            job=place.job,
        )  # fmt: skip
        state.fill_zeros()
        stepper = Stepper(place.program, place.job, plan, state=state, groups=groups)
        n_rows = plan.samples[stepper.dp]
        if plan.layout.pp == 1:
            multiple = stepper.sequence.multiple
            batch = _batch(place, n_rows, place.device, multiple=multiple)
            stepper.forward_backward([batch], train=True)
        elif not _pass_through_stages(place, stepper, n_rows // plan.n_microbatches):
            return True  # built, and no more: nothing is known of what its stage is called with
        gradients = state.gradients()
        state.square_norms(gradients)
        state.apply(gradients, 0.0)
    finally:
        groups.close()
    return True


def _pass_through_stages(place: Workplace, stepper: Stepper, n_rows: int) -> bool:
    """One microbatch forward and backward through each of this worker's stages. False: the input of
    one is not known."""
    plan, sequence = stepper.plan, stepper.sequence
    batch = sequence.cut(_batch(place, n_rows, place.device))
    with sequence.running(blocks_here=False):
        keywords, inputs = keywords_of(place.program, batch), inputs_of(place.program, batch)
        if carries(place.program):
            keywords[MODEL_INPUT] = inputs
        for stage, model in zip(
            stages_at(plan.layout, stepper.at.pp), stepper.state.models, strict=True
        ):
            given = (inputs,) if stage == 0 else _stage_input(place, stepper, stage, n_rows=n_rows)
            if given is None:
                return False
            output = model(*given, **keywords)
            if stage == plan.layout.n_stages - 1:
                loss_of(place.program, output, batch).backward()
            else:
                _sum(output).backward()
    return True


def _stage_input(
    place: Workplace, stepper: Stepper, stage: int, *, n_rows: int
) -> tuple[torch.Tensor, ...] | None:
    """What a later stage is called with, of made-up values; None = that is not known."""
    first_block = stage_blocks(stepper.plan.layers, stage).start
    if carries(place.program):
        units = {unit.name: unit for unit in place.profile.flow}
        given = [units[name] for name in place.profile.carried(first_block)]
        return tuple(
            torch.zeros(
                unit.shape_of(n_rows),
                dtype=getattr(torch, unit.dtype),
                device=place.device,
                requires_grad=getattr(torch, unit.dtype).is_floating_point,
            )
            for unit in given
        )
    if first_block >= len(place.block_inputs) or (noted := place.block_inputs[first_block]) is None:
        return None
    shard = stepper.sequence.shard
    hidden = noted if shard is None else shard.take(noted)
    return (hidden.expand(n_rows, *hidden.shape[1:]).contiguous().requires_grad_(),)


def _sum(output: Any) -> torch.Tensor:
    """Of what a stage gives, as far as it has gradients."""
    given = [x.float().sum() for x in tensors_in(output) if x.requires_grad]
    return torch.stack(given).sum() if given else torch.zeros((), requires_grad=True)


def _batch(
    place: Workplace,
    times: int,
    device: torch.device | str,
    *,
    multiple: int = 1,
    within: bool = True,
) -> dict[str, torch.Tensor]:
    """See first_sample."""
    batch = first_sample(place.job, place.dataset, times, multiple=multiple, within=within)
    return {key: value.to(device) for key, value in batch.items()}


def _loss(place: Workplace, model: nn.Module, times: int) -> torch.Tensor:
    batch = _batch(place, times, place.device, within=False)  # a mean is known by two
    return loss_of(place.program, call_model(place.program, model, batch), batch)
