"""Which rank does not come to a collective: told apart by the numbers of all, while all of them
answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS
from support.waiting import until
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.types import Layout, Quiesce, StepDone, WorkerId
from elastic.worker.hosting.absent_ranks import RankSite, absent_ranks

pytestmark = pytest.mark.slow
PROGRAM = PROGRAMS / "tiny_stands.py"
STANDS = "ELASTIC_TEST_STANDS"
LAYOUTS = [
    Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(dp_replicate=4), Layout(dp_replicate=2,
    dp_shard=2), Layout(pp=4), Layout(pp=2, dp_shard=2), Layout(pp=2, tp=2), Layout(dp_shard=2,
    cp=2), Layout(pp=2),
]  # fmt: skip
STILL_STEPS = 40.0  # for as long as so many steps take has nobody got on
# however slow the steps: the others give up after the group's timeout, a minute
STILL_MOST_S = 10.0


def stand_still() -> None:
    os.environ[STANDS] = "1"


def go_on() -> None:
    os.environ.pop(STANDS)


def when_nobody_gets_on(pool: Pool, victim: WorkerId) -> dict[WorkerId, RankSite]:
    """Where each rank stands, once nobody makes progress any more."""
    done_s = [at_s for at_s, _, event in pool.log if isinstance(event, StepDone)][-3:]
    still_s = min(STILL_MOST_S, STILL_STEPS * max(done_s[1] - done_s[0], done_s[2] - done_s[1]))
    before: dict[WorkerId, Any] = {}
    since_s = time.monotonic()

    def still() -> dict[WorkerId, Any]:
        nonlocal before, since_s
        beats = {worker: beat for worker, beat in pool.beats().items() if beat.generation}
        now = {worker: (beat.progress, beat.arrived) for worker, beat in beats.items()}
        if now != before or victim not in beats or "in stand" not in beats[victim].where:
            before, since_s = now, time.monotonic()
        return beats if time.monotonic() - since_s > still_s else {}

    beats = until(still, lambda: f"ranks that stall for {still_s:.2f} s: {before}")
    return {
        worker: RankSite(beat.arrived, beat.doing, beat.where) for worker, beat in beats.items()
    }


# worker/hosting/test_absent_ranks.py has the arithmetic, the scenario "faulty worker" a rank that
# does not come
@pytest.mark.whole
@pytest.mark.parametrize(("first", "layout"), list(enumerate(LAYOUTS)), ids=str)
def test_the_rank_that_does_not_come_is_told_apart(
    pool: Pool, tmp_path: Path, first: int, layout: Layout
) -> None:
    """Two ranks of each layout, others each time."""
    job = {"program": str(PROGRAM), "steps": 1_000_000, "global_batch": 8, "seed": 3}
    workers = pool.open(job, tmp_path)
    mine = plan(1, layout, workers, job["global_batch"])
    pool.enter(mine)
    n = len(mine.ranks)
    for victim in (mine.ranks[first % n], mine.ranks[(first + n // 2) % n]):
        done = len(pool.events(StepDone))
        pool.wait(lambda done=done: len(pool.events(StepDone)) > done + 2, "steps")
        pool.patch(victim, stand_still)
        ranks = when_nobody_gets_on(pool, victim)
        found = absent_ranks(ranks, layout.pp > 1)
        assert list(found) == [victim], (found, ranks)
        assert "in stand" in found[victim] and "wait" in found[victim]
        print(f"{layout}: {found[victim]}")
        pool.patch(victim, go_on)
    for worker in mine.ranks:
        pool.order(worker, Quiesce(1, save=False))
    pool.quiesced(1, layout.world_size)
