"""A rank's training state and made-up gradients, for steps of an optimizer without a forward
pass."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from support.worker.plans import shares
from support.worker.ranks import meeting

from elastic.program import Program
from elastic.types import Job, Layout
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace
from elastic.worker.program.weights import cut
from elastic.worker.state.train_state import TrainState

CPU, SEED = torch.device("cpu"), 7


@contextmanager
def stepping(
    program: Program, job: Job, layout: Layout, rank: int, store: tuple[str, int] | None = None
) -> Iterator[TrainState]:
    """In its generation, with the others; without a store alone, as in a rehearsal."""
    program = with_job(program, job)
    profile = trace(program)
    groups = Groups(1, layout, CPU, fsdp=True, stage=profile.by_owners)
    if store is None:
        groups.pretend(rank)
    else:
        groups.join(meeting(layout.world_size, store[1]), rank)
    try:
        layers = shares(profile.n_blocks, layout.n_stages)
        state = TrainState(
            program, profile, groups, layout=layout, layers=layers, rank=rank, job=job
        )
        state.fill_fresh(SEED)
        yield state
    finally:
        groups.close()


def gradients(state: TrainState, step: int) -> Mapping[str, torch.Tensor]:
    """This rank's parts of gradients that are the same in every layout."""
    found = {}
    for spec in state.profile.specs:
        box, _ = state.tensors.get(f"model.{spec.fqn}", (None, None))
        if box is not None and spec.fqn in state.local and state.local[spec.fqn].requires_grad:
            draw = torch.Generator().manual_seed(zlib.crc32(spec.fqn.encode()) + step)
            whole = torch.randn(spec.shape, generator=draw).mul_(0.01)
            found[spec.fqn] = cut(whole, box).clone()
    return found
