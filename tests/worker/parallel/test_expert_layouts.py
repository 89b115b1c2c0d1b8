"""Experts shared out over ranks (ep), against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.layout_case import Case, check, run
from support.worker.worker_pool import Pool

pytestmark = pytest.mark.slow

CASES = [
    Case("tiny_experts.py", "dp_shard=2,ep=2"),
    Case("tiny_experts.py", "dp_shard=4,ep=2", 13),
    Case("tiny_experts.py", "dp_shard=4,ep=4"),
    Case("tiny_experts.py", "dp_replicate=2,dp_shard=2,ep=2"),
    Case("tiny_experts.py", "pp=2,dp_shard=2,ep=2"),
    Case("tiny_experts.py", "dp_shard=2,cp=2,ep=4"),
    Case("tiny_experts.py", "dp_shard=2,tp=2,ep=2"),
    Case("tiny_experts.py", "dp_shard=2,ep=2,activation_checkpointing=full"),
    Case("tiny_experts.py", "dp_shard=2,ep=2,zero_stage=1", microbatches=3),
]


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_trains_as_one_process_does(pool: Pool, tmp_path: Path, case: Case) -> None:
    check(case, run(pool, case, tmp_path))
