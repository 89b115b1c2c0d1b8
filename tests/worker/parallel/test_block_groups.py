"""Several groups of blocks: pipeline stages may begin inside of either tower, and what a later
stage needs is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reference import train
from support.worker.chain import check, job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import parse_layout
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.checkpoint.checkpoint_index import open_checkpoint

N_BLOCKS = 6
CHAIN = [
    "dp_shard=4", "pp=3", "pp=2,tp=2", "pp=4", "pp=2,dp_shard=2", "dp_replicate=2,dp_shard=2",
    "pp=2,schedule=interleaved1f1b", "pp=2,dp_replicate=2", "pp=3,schedule=gpipe",
    "pp=2,dp_shard=2,activation_checkpointing=full", "dp_shard=3",
    "pp=4,activation_checkpointing=selective",
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("n", [4, pytest.param(len(CHAIN), marks=pytest.mark.whole)])
def test_two_towers_follow_one_process_through_layouts(pool: Pool, tmp_path: Path, n: int) -> None:
    job = job_of("tiny_towers.py", steps=2 * n + 2)
    chain = [parse_layout(text) for text in CHAIN[:n]]
    steps = pass_through(pool, job, tmp_path, chain, every=2, n_blocks=N_BLOCKS)
    check(job, tmp_path, steps, 1e-5)


TEACHING = [
    "dp_shard=2,dp_replicate=2", "pp=3", "pp=2,dp_shard=2", "pp=2,tp=2", "dp_shard=3", "pp=4",
    "pp=2,dp_replicate=2", "pp=3,schedule=interleaved1f1b", "dp_shard=2,tp=2", "dp_shard=2,cp=2",
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("n", [3, pytest.param(len(TEACHING), marks=pytest.mark.whole)])
def test_a_student_beside_its_teacher_follows_one_process_through_layouts(
    pool: Pool, tmp_path: Path, n: int
) -> None:
    """The teacher is on stages of its own, and in no checkpoint."""
    job = job_of("tiny_distilled.py", steps=2 * n + 2)
    job |= {"layout": dict.fromkeys("4", "dp_shard=2,cp=2")} if "cp=2" in TEACHING[n - 1] else {}
    chain = [parse_layout(text) for text in TEACHING[:n]]
    steps = pass_through(pool, job, tmp_path, chain, every=2, n_blocks=N_BLOCKS)
    alone = train(load_program(job["program"]), job, job["steps"])
    assert [e.step for e in steps] == list(range(1, job["steps"] + 1))
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, abs=1e-5)
    assert [e.grad_norm for e in steps] == pytest.approx(alone.grad_norms, rel=1e-4)
    stored = open_checkpoint(checkpoint_index.find(open_storage(str(tmp_path)))[0].uri).tensors
    assert any("student" in name for name in stored) and not any("teacher" in n for n in stored)
