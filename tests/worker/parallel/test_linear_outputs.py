"""Modules that end in a linear layer, whose output a program changes in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.reference import train_alone
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool
from torch import nn

from elastic.program import load_program
from elastic.types import Layout
from elastic.worker.parallel.parallelize import _whole_output


@pytest.mark.slow
def test_what_is_added_in_place_behind_a_block_is_right_when_it_is_sharded(
    pool: Pool, tmp_path: Path
) -> None:
    """Under plain FSDP its backward pass fails."""
    job = job_of("tiny_adding.py", steps=6)
    alone = train_alone(load_program(job["program"]), job, 6)
    for layout in (Layout(dp_shard=2), Layout(dp_shard=3, activation_checkpointing="full")):
        steps = pass_through(pool, job, tmp_path / str(layout.dp_shard), [layout], every=1)
        assert [e.train_loss for e in steps] == pytest.approx(alone, rel=1e-5)


def test_only_a_view_that_nobody_else_needs_becomes_a_tensor_of_its_own() -> None:
    x, linear = torch.randn(2, 3, 4), nn.Linear(4, 4)
    given = linear(x)
    own = _whole_output(linear, (), given)
    assert given._base is not None and own._base is None
    assert own.data_ptr() == given.data_ptr()  # without a copy
    needed = linear(x).relu().view(6, 4)  # relu's gradient asks for what it gave
    for output in (needed, linear(x[0]), (given,), linear(x).detach().view(6, 4)):
        assert _whole_output(linear, (), output) is output
    own += 1  # torch would raise for a gradient that asks for what was changed
    own.square().sum().backward()
    (want,) = torch.autograd.grad((linear(x) + 1).square().sum(), [linear.weight])
    torch.testing.assert_close(linear.weight.grad, want)
