"""What a model draws in a script's loop: a run that is resized follows the one that is not, and what
cannot be so is told by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import pass_through
from support.worker.loop_case import loop_job
from support.worker.worker_pool import Pool

from elastic.types import Layout

CHAIN = [
    Layout(dp_shard=3, activation_checkpointing="full"),
    Layout(tp=2, activation_checkpointing="selective"),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2),
]


def losses(pool: Pool, run: Path, *args: str, layouts: list[Layout], steps: int = 14) -> list[float]:
    job: dict[str, Any] = loop_job("loop_drops.py", steps=steps) | {"args": list(args)}
    every = 3 if len(layouts) > 1 else 1
    return [e.train_loss for e in pass_through(pool, job, run, layouts, every=every)]


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["whole", "parts", "twice"])
def test_a_resized_loop_follows_the_undisturbed_one(pool: Pool, tmp_path: Path, calls: str) -> None:
    how = ("--calls", calls, "--double")
    alone = losses(pool, tmp_path / "one", *how, layouts=[Layout()])
    assert losses(pool, tmp_path / "many", *how, layouts=CHAIN) == pytest.approx(alone, rel=1e-12)
