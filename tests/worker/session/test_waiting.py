"""What rank 0 tells of a step holds for all ranks: how long one of them has waited for data, and
who had the most tokens."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.worker.chain import job_of
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.data import loader
from elastic.data.order import sample_ids, share
from elastic.program import load_program
from elastic.types import Layout, StepDone

SLOW_S = 0.6
STEPS = 5


def read_slowly() -> None:
    """In a worker's process: a batch is read in SLOW_S from when it is first waited for, however
    long the start has taken."""
    waited_for, take = threading.Event(), loader.Loader.take

    def taken(self: loader.Loader, step: int) -> Any:
        waited_for.set()
        return take(self, step)

    def slow(*arguments: Any, **named: Any) -> Any:
        waited_for.wait()
        time.sleep(SLOW_S)  # sleeps: a slow read is what is measured
        return loader.read_at_once(*arguments, **named)  # type: ignore[attr-defined]

    loader.read_at_once, loader.Loader._batch = loader.Loader._batch, slow  # type: ignore[attr-defined,method-assign]
    loader.taken_at_once, loader.Loader.take = take, taken  # type: ignore[attr-defined,method-assign]


def read_as_before() -> None:
    loader.Loader._batch = loader.read_at_once  # type: ignore[attr-defined,method-assign]
    loader.Loader.take = loader.taken_at_once  # type: ignore[attr-defined,method-assign]


@pytest.mark.e2e
def test_one_rank_that_waits_and_one_that_has_more(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", STEPS)
    workers = pool.open(job, tmp_path / "run", n=2)
    pool.patch(workers[1], read_slowly)
    entered = plan(1, Layout(dp_shard=2), workers, job["global_batch"])
    pool.enter(entered)
    pool.quiesced(1, 2)
    pool.patch(workers[1], read_as_before)
    steps: list[StepDone] = pool.events(StepDone)
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    # rank 0, which says so, had its own batch at once
    assert 0.8 * SLOW_S < steps[0].data_s <= steps[0].step_time_s
    dataset = load_program(job["program"]).dataset()
    for event in steps:
        ids = sample_ids(len(dataset), job["global_batch"], job["seed"], step=event.step - 1)
        tokens = [
            sum(int((dataset[i]["target"] != -100).sum()) for i in ids[share(entered.samples, dp)])
            for dp in range(2)
        ]
        assert event.imbalance == round(max(tokens) / (sum(tokens) / 2), 4)
    assert len({event.imbalance for event in steps}) > 1
