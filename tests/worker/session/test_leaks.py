"""A worker that has lived through many generations holds no more than one that has lived through
two."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.types import Abort, Layout, Plan, Resume, StepDone

FOLDER = Path(tempfile.gettempdir())


def note_generations() -> None:
    """In the worker: which generations are still there, whoever holds them, though nobody asks for
    them to be collected."""
    from elastic.worker.session.generation import Generation

    numbers = sorted(one.number for one in gc.get_objects() if type(one) is Generation)
    written = FOLDER / f"generations-{os.getpid()}.new"
    written.write_text(" ".join(map(str, numbers)))
    written.rename(FOLDER / f"generations-{os.getpid()}")  # whole at once for who looks


@pytest.mark.e2e
def test_old_generations_go(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=400)
    workers = pool.open(job, tmp_path)
    note = FOLDER / f"generations-{pool.pids[0]}"
    plans: list[Plan] = []
    try:
        for i, layout in enumerate(
            [Layout(dp_shard=4), Layout(dp_shard=3), Layout(pp=2, dp_shard=2)]
        ):
            resume = live(plans[-1]) if plans else Resume()
            plans.append(
                plan(i + 1, layout, workers, job["global_batch"], resume=resume, peer_every=2)
            )
            pool.enter(plans[-1])
            pool.entered(i + 1)
            n = len(pool.events(StepDone, i + 1))
            pool.wait(
                lambda: len(pool.events(StepDone, i + 1)) >= n + 8,  # noqa: B023
                "a peer replica that is acknowledged",
            )
        pool.patch(workers[0], note_generations)
        pool.wait(note.is_file, "the worker's note")
        assert note.read_text() == "3"
    finally:
        note.unlink(missing_ok=True)
        pool.order(workers[0], Abort(len(plans)))
