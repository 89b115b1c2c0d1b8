"""A validation that a lost worker has cut off is made by those that continue, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.places import PROGRAMS
from support.worker.chain import job_of, pass_through
from support.worker.plans import from_copies, plan
from support.worker.worker_pool import Pool

from elastic.types import Abort, Evaluated, Layout, Quiesced, WorkerFailed

pytestmark = pytest.mark.e2e
PROGRAM = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {programs!r})
import tiny

class Fatal(tiny.Strides):
    def __getitem__(self, index):
        mark = Path({mark!r})
        mark.with_suffix(f".{{os.getpid()}}").touch()
        try:
            mark.unlink()  # for one process
        except FileNotFoundError:
            return super().__getitem__(index)
        while len(list(mark.parent.glob("mark.*"))) < 2:  # the other one has done the step too
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

program = replace(tiny.program, validation=lambda: Fatal(48, first=512))
"""


def test_it_is_made_by_those_that_continue(pool: Pool, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "program.py"
    file.write_text(PROGRAM.format(programs=str(PROGRAMS), mark=str(mark)))
    job = job_of("tiny.py", steps=10) | {"program": str(file), "eval_every": 4}
    workers = pool.open(job, tmp_path / "run", n=2)
    mark.touch()
    try:
        first = plan(1, Layout(dp_replicate=2), workers, 12)
        pool.enter(first)
        alive = lambda: [one for one in workers if pool.processes[workers.index(one)].is_alive()]  # noqa: E731
        pool.wait(lambda: pool.events(WorkerFailed, 1) and len(alive()) == 1, "failure")
        (left,) = alive()
        pool.order(left, Abort(1))
        pool.stores[1] = None
        pool.wait(lambda: pool.events(Quiesced, 1), "the one that is left")
        there = pool.events(Quiesced, 1)[-1]
        # rank 0, where that is the lost one, may have told of no step since the third
        assert 4 in {one.step for one in there.holdings} and not pool.events(Evaluated)
        second = plan(2, Layout(), [left], 12, resume=from_copies(first, 4, there.holdings))
        pool.enter(second)
        pool.wait(lambda: pool.quiesced(2, 1), "the end")
        assert [e.step for e in pool.events(Evaluated, 2)] == [4, 8, 10]
    finally:
        pool.revive()


def test_one_that_was_made_is_not_repeated(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=12) | {"eval_every": 1}
    pass_through(pool, job, tmp_path, [Layout(dp_shard=2), Layout()], every=3)
    assert [e.step for e in pool.events(Evaluated)] == list(range(1, 13))
