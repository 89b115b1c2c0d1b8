"""ElasticTrainer(...).fit() with a Program: through a notice and a kill, and what its Result holds.
(A growth, as of any run: the scenario "main path".)"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.e2e.runs import (
    PROGRAM,
    SOON_S,
    TOLERANCE,
    alone,
    survivors_kept_their_processes,
    went_on_as_if_nothing_happened,
)  # fmt: skip

import elastic
from elastic.errors import SpecError
from elastic.ledger.journal import read
from elastic.observe.metrics.step_rows import read_rows
from elastic.program import load_program
from elastic.types import DrillAsked

ray_train = pytest.importorskip("ray.train")
pytestmark = pytest.mark.e2e
STEPS = 42
POOLS = [
    {"name": "spot", "market_type": "spot", "usd_per_node_h": 1.0, "max_nodes": 2, "notice_s": 20},
    {"name": "on-demand", "market_type": "on-demand", "usd_per_node_h": 3.0, "max_nodes": 1},
]


def test_fit_through_a_notice_and_a_kill(tmp_path: Path) -> None:
    drill = [
        {"at_step": 8, "notice": "any-spot", "deadline_s": SOON_S},
        {"at_step": 22, "kill": "any-spot"},
    ]
    job = {
        "steps": STEPS, "global_batch": 12, "seed": 3, "clip_grad_norm": 1.0, "peer_every": 4,
        "durable_every": 0, "eval_every": 20, "pools": POOLS, "budget_usd": 1000, "drill": drill,
    }  # fmt: skip
    config = ray_train.RunConfig(
        name="run", storage_path=str(tmp_path), logging_config=ray_train.LoggingConfig("ERROR")
    )
    told: list[int] = []
    trainer = elastic.ElasticTrainer(
        load_program(PROGRAM),
        on_step=lambda row: told.append(row["step"]),
        job=job,
        scaling_config=ray_train.ScalingConfig(num_workers=(1, 3)),
        run_config=config,
    )
    result = trainer.fit()
    summary = json.loads((tmp_path / "run" / "report.json").read_text())
    lines = read(tmp_path / "run" / "journal.jsonl")
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    assert {t["cause"] for t in summary["transitions"]} == {"start", "notice", "loss"}
    asked = [e.drill for line in lines for _, e in line.events if isinstance(e, DrillAsked)]
    survivors_kept_their_processes(
        lines, {n for d in asked for kind in ("notice", "kill") for n in d.get(kind, ())}
    )

    assert isinstance(result, ray_train.Result)
    assert (result.error, result.path) == (None, str(tmp_path / "run"))
    assert (result.metrics["step"], result.metrics["outcome"]) == (STEPS, "succeeded")
    assert result.metrics["tokens"] == summary["tokens"]
    assert set(told) == set(range(1, STEPS + 1)) and told[-1] == STEPS
    rows = read_rows((tmp_path / "run" / "metrics.csv").read_text())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    frame = result.metrics_dataframe
    assert list(frame["step"]) == list(range(1, STEPS + 1))
    assert (
        max(abs(a - b) for a, b in zip(frame["train_loss"], alone(STEPS), strict=True)) < TOLERANCE
    )
    assert [
        step for step, loss in zip(frame["step"], frame["validation_loss"]) if not math.isnan(loss)
    ] == [20, 40, STEPS]
    assert Path(result.checkpoint.path).name.startswith(f"step-{STEPS:08d}")
    with pytest.raises(SpecError, match="run 'run' is done"):
        trainer.fit()
