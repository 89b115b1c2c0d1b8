"""Numbers of the user's own ride with the step that they were told of, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.chain import job_of, pass_through
from support.worker.loop_case import loop_job
from support.worker.worker_pool import Pool

from elastic.types import Layout

LAYOUTS = [Layout(dp_shard=2), Layout(pp=2, dp_replicate=2), Layout(tp=2), Layout()]


@pytest.mark.e2e
def test_a_program_tells_sums_over_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Two microbatches of each, stages, parts of a head: the number is that of the whole batch."""
    steps = pass_through(pool, job_of("tiny_logging.py", steps=12), tmp_path, LAYOUTS, 3)
    for done in steps:
        assert done.logged.keys() == {"loss_again", "share/right"}
        assert done.logged["loss_again"] == pytest.approx(done.train_loss, rel=1e-6)
        right = done.logged["share/right"] * done.tokens
        assert right == pytest.approx(round(right), abs=1e-3) and 0 <= right <= done.tokens
    assert [one.step for one in steps] == list(range(1, 13))


@pytest.mark.e2e
def test_a_script_tells_them_before_and_after_its_step(pool: Pool, tmp_path: Path) -> None:
    layouts = [Layout(dp_shard=2), Layout(dp_shard=3), Layout()]
    steps = pass_through(pool, loop_job("loop_logging.py", steps=9), tmp_path, layouts, 3)
    assert [one.step for one in steps] == list(range(1, 10))
    for done in steps:
        assert done.logged == {
            "half": (done.step - 1) / 2,
            "loss/again": pytest.approx(done.train_loss, rel=1e-9),
        }
