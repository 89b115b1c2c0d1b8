"""What the last stage of a pipeline computes is for the loss alone: nobody keeps it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from elastic.types import Layout
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
