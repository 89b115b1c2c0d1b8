"""Several groups of blocks: pipeline stages may begin inside of either tower, and what a later
stage needs is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.chain import check, job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.types import parse_layout

N_BLOCKS = 6
CHAIN = [
    "dp_shard=4", "pp=3", "pp=2,dp_shard=2", "pp=4", "pp=2,tp=2", "dp_replicate=2,dp_shard=2",
    "pp=2,schedule=interleaved1f1b", "pp=2,dp_replicate=2", "pp=3,schedule=gpipe",
    "pp=2,dp_shard=2,activation_checkpointing=full", "dp_shard=3",
    "pp=4,activation_checkpointing=selective",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, pytest.param(len(CHAIN), marks=pytest.mark.whole)])
def test_two_towers_follow_one_process_through_layouts(pool: Pool, tmp_path: Path, n: int) -> None:
    job = job_of("tiny_towers.py", steps=2 * n + 2)
    chain = [parse_layout(text) for text in CHAIN[:n]]
    steps = pass_through(pool, job, tmp_path, chain, every=2, n_blocks=N_BLOCKS)
    check(job, tmp_path, steps, 1e-5)
