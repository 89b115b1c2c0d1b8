"""Passes in 16 bits: one meaning in every layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.low_reference import train_low
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.reshard.rank_boxes import LOSS_SCALE
from elastic.storage import open_storage
from elastic.types import Box, Layout
from elastic.worker.checkpoint import checkpoint_index

pytestmark = pytest.mark.slow
LAYOUTS = [
    Layout(dp_shard=2, tp=2), Layout(offload=True), Layout(pp=2, dp_shard=2,
    activation_checkpointing="selective"), Layout(tp=2),    Layout(dp_replicate=2, dp_shard=2,
    zero_stage=1), Layout(pp=2, tp=2), Layout(cp=2, dp_shard=2, microbatch_size=3), Layout(pp=2),
]  # fmt: skip


@pytest.mark.whole
def test_bfloat16_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    """As near to a plain process in bfloat16 as rounding lets it; the program itself looks at the
    dtypes."""
    job = job_of("tiny_low.py", steps=24) | {"precision": "bfloat16"}
    steps = pass_through(pool, job, tmp_path, LAYOUTS, every=2)
    program = load_program(job["program"])
    low = train_low(program, job, torch.bfloat16).losses
    off = [abs(e.train_loss - loss) for e, loss in zip(steps, low, strict=True)]
    assert max(off) < 2e-3
    assert [e.step for e in steps] == list(range(1, job["steps"] + 1))


# that no rank applies such a step: test_loss_scale.py; skipped steps in a chain of layouts:
# tests/worker/program/test_guards.py
@pytest.mark.whole
def test_float16_skips_alike_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    """Some steps overflow: every layout skips the same ones and continues with the same scale,
    which is in the checkpoint."""
    job = job_of("tiny_half.py", steps=24) | {"precision": "float16"}
    steps = pass_through(pool, job, tmp_path, LAYOUTS, every=2)
    # sample 0 counts 12 tokens
    first = 2.0 ** math.floor(math.log2(2**16 / (12 * job["global_batch"])))
    alone = train_low(load_program(job["program"]), job, torch.float16, first)
    assert len(alone.skipped) > 2
    assert [e.step for e in steps if e.skipped] == alone.skipped
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, rel=1e-3)
    checkpoint = checkpoint_index.open_checkpoint(
        checkpoint_index.find(open_storage(str(tmp_path)))[0].uri
    )
    scale = first / 2 ** len(alone.skipped)
    assert checkpoint.read(Box(LOSS_SCALE, (0,), (2,), "float64")).tolist() == [
        scale,
        job["steps"] - alone.skipped[-1],
    ]
    for name, parameter in alone.model.named_parameters():
        got = checkpoint.read(
            Box(f"model.{name}", (0,) * parameter.ndim, tuple(parameter.shape), "float32")
        )
        assert float((got - parameter.detach()).abs().mean()) < 2e-4, name
