"""What the last stage of a pipeline computes is for the loss alone: nobody keeps it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.reference import train
from support.worker.chain import job_of
from support.worker.plans import plan
from support.worker.worker_pool import Pool
from torch import nn
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from elastic.errors import ProgramError
from elastic.program import load_program
from elastic.types import Evaluated, Layout, StepDone
from elastic.worker.parallel.pipeline import Pipeline

N = 8


@pytest.fixture
def alone() -> Iterator[ProcessGroup]:
    """A group of one process: its only stage is the last one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_output_outlives_its_microbatch(alone: ProcessGroup, schedule: str, train: bool) -> None:
    layout = Layout(schedule=schedule)
    pipeline = Pipeline([nn.Linear(4, 6)], alone, layout, n=N, device=torch.device("cpu"))
    outputs: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def loss(output: torch.Tensor, rows: range) -> torch.Tensor:
        nonlocal most
        outputs.append(weakref.ref(output))
        most = max(most, sum(one() is not None for one in outputs))
        return output.float().square().sum()

    for _ in range(2):  # what a pass leaves, the next one would free
        with torch.set_grad_enabled(train):
            pipeline.run(torch.ones(N, 4), {}, N, loss=loss, train=train)
        gc.collect()
        assert [one() for one in outputs] == [None] * len(outputs)
    assert len(outputs) >= 2 * N  # torch calls it once more, to learn of its gradient
    # all forward passes of GPipe come before the first backward pass
    assert most <= (N if train and schedule == "gpipe" else 2)


RUN: list[Callable[..., torch.Tensor]] = []


def watch_outputs() -> None:
    """Refuses a pass whose outputs are there after it."""
    run = Pipeline.run
    RUN.append(run)

    def watched(self: Pipeline, *given: Any, loss: Any, **more: Any) -> torch.Tensor:
        outputs: list[weakref.ref[torch.Tensor]] = []

        def noted(output: torch.Tensor, rows: range) -> torch.Tensor:
            outputs.append(weakref.ref(output))
            found: torch.Tensor = loss(output, rows)
            return found

        total = run(self, *given, loss=noted, **more)
        gc.collect()
        if kept := sum(one() is not None for one in outputs):
            raise ProgramError(f"{kept} of {len(outputs)} outputs are kept")
        return total

    Pipeline.run = watched  # type: ignore[method-assign]


def watch_no_more() -> None:
    Pipeline.run = RUN.pop()  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, schedule="interleaved1f1b")], ids=str
)
def test_steps_and_evaluations_of_two_stages_leave_none(
    pool: Pool, tmp_path: Path, layout: Layout
) -> None:
    job = job_of("tiny.py", steps=3, global_batch=16) | {"eval_every": 1}
    workers = pool.open(job, tmp_path, n=2)
    for worker in workers:
        pool.patch(worker, watch_outputs)
    pool.enter(plan(1, layout, workers, 16, n_microbatches=N))
    pool.quiesced(1, 2)
    for worker in workers:
        pool.patch(worker, watch_no_more)
    steps = pool.events(StepDone)
    alone = train(load_program(job["program"]), job, 3)
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, abs=1e-4)
    assert [e.step for e in pool.events(Evaluated)] == [1, 2, 3]
