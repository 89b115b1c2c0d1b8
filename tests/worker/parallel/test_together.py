"""What was built one by one, in one program: several groups of blocks, experts over ranks, BatchNorm
over groups of samples, dropout, and optimizers that step whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.types import Layout, parse_layout

pytestmark = [pytest.mark.slow, pytest.mark.whole]

GROUP, BATCH, N_BLOCKS = 4, 48, 6
CHAIN = [
    "dp_shard=4,ep=2", "pp=3,activation_checkpointing=selective",
    "pp=2,dp_shard=2,ep=2,activation_checkpointing=full", "dp_shard=2,tp=2,ep=2",
    "dp_replicate=2,dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2,schedule=interleaved1f1b",
    "dp_shard=4,ep=4,activation_checkpointing=full", "pp=4,schedule=gpipe",
    "dp_shard=3,activation_checkpointing=selective", "pp=2,tp=2",
]  # fmt: skip
# at rates with which rounding in float32, and in Muon in bfloat16, becomes 4e-3 and 3e-2 of a loss
OPTIMIZERS = [{"path": "torch.optim.AdamW", "lr": 3e-3}, {"path": "muon+adamw", "lr": 1e-2}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "muon+adamw"])
def test_all_of_it_follows_one_process_through_layouts(
    pool: Pool, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    job = job_of("tiny_together_double.py", 2 * len(CHAIN) + 2, BATCH)
    job |= {"optimizer": optimizer, "batch_norm": {"group": GROUP}}
    how = {"every": 2, "n_blocks": N_BLOCKS, "together": GROUP}
    alone = pass_through(pool, job, tmp_path / "one", [Layout()], **how)
    steps = pass_through(pool, job, tmp_path / "many", list(map(parse_layout, CHAIN)), **how)
    assert {e.generation for e in steps} == set(range(1, len(CHAIN) + 1))
    assert [e.tokens for e in steps] == [e.tokens for e in alone]
    assert [e.train_loss for e in steps] == pytest.approx([e.train_loss for e in alone], abs=1e-12)
