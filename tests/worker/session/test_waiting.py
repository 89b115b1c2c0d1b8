"""What rank 0 tells of a step holds for all ranks: how long one of them has waited for data, and who had the most tokens."""

from __future__ import annotations

import math
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
from elastic.worker.program.commit import N_WORDS, Commit, power_of_tokens, power_of_wait

SLOW_S = 0.6
STEPS = 5


def read_slowly() -> None:
    """In a worker's process: a batch is read in SLOW_S from when it is first waited for, however long the start has taken."""
    waited_for, take = threading.Event(), loader.Loader.take

    def taken(self: loader.Loader, step: int) -> Any:
        waited_for.set()
        return take(self, step)

    def slow(*arguments: Any) -> Any:
        waited_for.wait()
        time.sleep(SLOW_S)  # sleeps: a slow read is what is measured
        return loader.collated_at_once(*arguments)  # type: ignore[attr-defined]

    loader.collated_at_once, loader.batch_of = loader.batch_of, slow  # type: ignore[attr-defined]
    loader.taken_at_once, loader.Loader.take = take, taken  # type: ignore[attr-defined,method-assign]


def read_as_before() -> None:
    loader.batch_of = loader.collated_at_once  # type: ignore[attr-defined]
    loader.Loader.take = loader.taken_at_once  # type: ignore[attr-defined,method-assign]


def summed(vectors: list[dict[int, float]]) -> Commit:
    return Commit(tuple(sum(vector.get(i, 0.0) for vector in vectors) for i in range(N_WORDS)))


def test_the_word_of_one_rank_is_heard_by_all() -> None:
    """The ranks' vectors are added up."""
    silent: dict[int, float] = {}
    heard = summed([silent] * 4)
    assert not heard.stop and not heard.save and heard.cadence is None and heard.n_copies_done == 0
    assert summed([silent, {3: 1.0}, silent, silent]).stop and summed([{4: 1.0}, silent, silent]).save
    assert summed([{9: 6.0, 10: 1.0}, silent, silent]).cadence == (5, 0), "one more than the steps, so that 0 can be said"
    assert summed([{5: 1.0}, {5: 1.0}, {5: -float(1 << 30)}]).n_copies_done < 0, "one part that cannot be stored is enough"


@pytest.mark.parametrize("waits", [[0.0, 0.0], [0.25, 0.0], [3600.0] + [1.0] * 1023, [1e-3] * 8, [1e9, 0.0]])
def test_a_sum_tells_the_longest_wait(waits: list[float]) -> None:
    found = summed([{12: power_of_wait(wait)} for wait in waits]).data_s
    longest = min(max(waits), 1e4)
    assert longest <= found * (1 + 1e-9) and found <= longest * len(waits) ** (1 / 64) * (1 + 1e-9)


def test_and_the_fullest_rank() -> None:
    assert summed([{13: power_of_tokens(ratio)} for ratio in (0.5, 1.75, 1.2, 0.0)]).fullest == pytest.approx(1.75)
    assert summed([{13: power_of_tokens(99.0)}] * 1000).fullest == pytest.approx(10 * 1000 ** (1 / 256))
    assert Commit((0.0,) * 12).fullest == 0.0 and math.isfinite(power_of_tokens(1e9))


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
    assert 0.8 * SLOW_S < steps[0].data_s <= steps[0].step_time_s  # rank 0, which says so, had its own batch at once
    dataset = load_program(job["program"]).dataset()
    assert steps[0].imbalance == 0.0
    for event in steps[1:]:
        ids = sample_ids(len(dataset), job["global_batch"], job["seed"], event.step - 1)
        tokens = [sum(int((dataset[i]["target"] != -100).sum()) for i in ids[share(entered.samples, dp)]) for dp in range(2)]
        assert event.imbalance == pytest.approx(max(tokens) / (sum(tokens) / 2), rel=0.01)
    assert len({event.imbalance for event in steps[1:]}) > 1
