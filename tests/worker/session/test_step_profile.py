"""Steps are traced while they are trained: on the ranks that were asked for, to the last bit as
without, and a change of generation ends it with a word."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.types import Layout, RankProfiled, StartProfile, StepDone

TINY = str(PROGRAMS / "tiny.py")
BATCH, STEPS = 8, 3


def job(steps: int) -> dict[str, Any]:
    return {
        "program": TINY, "steps": steps, "global_batch": BATCH, "seed": 7, "clip_grad_norm": 1.0,
    }  # fmt: skip


def losses(pool: Pool) -> dict[int, float]:
    return {event.step: event.train_loss for event in pool.events(StepDone)}


def trained(pool: Pool, folder: Path, layout: Layout, n: int, *profiles: StartProfile) -> None:
    """`n` steps, of which some are traced."""
    pool.open(job(n), folder)
    first = plan(1, layout, pool.workers, BATCH)
    pool.enter(first)
    pool.entered(1)
    for order in profiles:
        for worker in first.ranks:
            pool.order(worker, order)
    pool.wait(lambda: len(losses(pool)) == n, f"{n} steps")


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(pp=2, tp=2), {"pp", "tp", "bubble", "commit"}),
        (Layout(dp_shard=4), {"fsdp", "commit"}),
        (Layout(dp_replicate=2, dp_shard=2), {"fsdp", "dp_replicate", "commit"}),
        (Layout(cp=2, dp_shard=2), {"fsdp", "cp", "commit"}),
    ],
    ids=str,
)
def test_every_rank_says_where_its_steps_went(
    pool: Pool, tmp_path: Path, layout: Layout, axes: set[str]
) -> None:
    order = StartProfile(1, "one", STEPS, (0, 1, 2, 3), 1)
    trained(pool, tmp_path / "run", layout, 30, order)
    pool.wait(lambda: len(pool.events(RankProfiled)) == 4, "four traces")
    for event in pool.events(RankProfiled):
        assert (event.error, event.n_steps) == ("", STEPS), event
        place = tmp_path / "run" / "profiles" / "one" / f"rank-{event.rank}"
        said = json.loads(place.with_suffix(".json").read_text())
        print(layout, said)
        assert said["steps"] == [event.first_step + n for n in (1, 2, 3)]
        assert sum(said["parts"].values()) == pytest.approx(said["step_s"], rel=1e-6)
        assert {"compute", "optimizer", *axes} <= set(said["parts"])
        assert "other ranks" not in said["parts"]
        trace = json.loads(gzip.decompress(Path(f"{place}.trace.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"elastic.commit", "elastic.data", "elastic.optimizer", "where the time goes"} <= {
            *names,
            *(event.get("args", {}).get("name") for event in trace["traceEvents"]),
        }
