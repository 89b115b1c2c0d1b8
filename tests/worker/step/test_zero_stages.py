"""ZeRO stages and gradient accumulation: the same numbers, other collectives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.chain import check, job_of, pass_through
from support.worker.plans import plan
from support.worker.worker_pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data.collate import collate
from elastic.program import load_program
from elastic.types import Job, Layout, WorkerId
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.optimizer_step import Stepper

N_BLOCKS, N_MICROBATCHES = 4, 3
UNITS = N_BLOCKS + 1  # what is in no block is one more


class _Collectives(TorchDispatchMode):
    """Counts what is asked of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def collectives(layout: Layout) -> Counter[str]:
    """Of one step of rank 0, without the other ranks."""
    job = job_of("tiny.py", 1)
    program = load_program(job["program"])
    profile = trace(program)
    workers = [WorkerId("a", i) for i in range(layout.world_size)]
    step = plan(1, layout, workers, 12)
    assert step.n_microbatches == N_MICROBATCHES
    groups = Groups(0, layout, torch.device("cpu"))
    try:
        groups.pretend(0)
        state = TrainState(
            program,
            profile,
            groups,
            layout=layout,
            layers=step.layers,
            rank=0,
            job=Job.from_plain(job),
        )
        state.fill_zeros()
        stepper = Stepper(program, Job.from_plain(job), step, state=state, groups=groups)
        dataset = program.dataset()
        with _Collectives() as mode:
            stepper.forward_backward(
                [collate([dataset[i] for i in range(step.samples[0])])], train=True
            )
        assert set(state.gradients()) == set(state.parameters)
        return mode.found
    finally:
        groups.close()


@pytest.mark.parametrize(
    ("layout", "gathers", "scatters", "reductions"),
    [
        (
            Layout(dp_shard=2, microbatch_size=2, zero_stage=3),
            N_MICROBATCHES * (UNITS + N_BLOCKS),
            N_MICROBATCHES * UNITS,
            0,
        ),
        (
            Layout(dp_shard=2, microbatch_size=2, zero_stage=2),
            N_MICROBATCHES * UNITS,
            N_MICROBATCHES * UNITS,
            0,
        ),
        (Layout(dp_shard=2, microbatch_size=2, zero_stage=1), UNITS, UNITS, 0),
        (Layout(dp_replicate=2, microbatch_size=2, zero_stage=3), 0, 0, UNITS),
        (Layout(dp_replicate=2, microbatch_size=2, zero_stage=1), 0, 0, UNITS),
    ],
    ids=str,
)
def test_collectives_of_a_step(
    layout: Layout, gathers: int, scatters: int, reductions: int
) -> None:
    found = collectives(layout)
    counts = [
        sum(n for op, n in found.items() if word in op)
        for word in ("allgather", "reduce_scatter", "allreduce")
    ]
    print(found)
    assert counts == [gathers, scatters, reductions]


@pytest.mark.e2e
def test_stages_and_microbatches_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    """Shares are unequal (4, 4, 2, 2 and 6, 3, 3); the boxes are those of stage 3, so that every
    move is live."""
    layouts = [
        Layout(dp_shard=4, microbatch_size=2, zero_stage=1),
        Layout(dp_replicate=2, dp_shard=2, microbatch_size=1, zero_stage=2),
        Layout(dp_shard=3, microbatch_size=2, zero_stage=2, activation_checkpointing="full"),
        Layout(dp_replicate=2, dp_shard=2, microbatch_size=1, zero_stage=1),
        Layout(tp=2, microbatch_size=3),
        Layout(dp_replicate=3, microbatch_size=1),
        Layout(pp=2, dp_shard=2, microbatch_size=1, zero_stage=1),
        Layout(dp_shard=2, microbatch_size=1, zero_stage=3),
    ]
    job = job_of("tiny.py", steps=20)
    check(job, tmp_path, pass_through(pool, job, tmp_path, layouts, every=2), 1e-4)
