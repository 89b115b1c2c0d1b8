"""What is said where a run that is started again does steps once more: that it begins at step 0,
and which drills do not come again."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS

from elastic.api.running import run
from elastic.api.running.options import Options
from elastic.api.running.run import JobRun, Result
from elastic.api.running.start_checks import comes_again
from elastic.cluster.backend.drills import Schedule
from elastic.config.job import load_job
from elastic.driver import drive
from elastic.ledger.journal import Journal, MemoryJournal
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted
from elastic.worker.step.loss_scale import profile_of

JOB = """
steps: 6
global_batch: 12
layout: dp_shard=1
pools: [{name: p, max_nodes: 1}]
drill: [{at_step: 2, kill: any}, {at_step: 90, kill: rank0}]
"""
KILL, ADD = {"at_step": 20, "kill": "any"}, {"at_step": 30, "add": "spot"}


def test_a_run_without_a_checkpoint_says_that_it_begins_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(f"{JOB}program: {PROGRAMS / 'tiny.py'}\n")
    stream = io.StringIO()
    one = JobRun(load_job(folder), Options(run_name="again", local=True, stream=stream))
    spec, lines = one.spec, MemoryJournal()
    start = DriverStarted("again", 1, spec.plain(), one.pools, profile_of(one.program, spec.job()))
    drive(SimBackend(one.pools, spec.job()), lines, start)
    written = Journal(one.journal_path, 1)
    for line in lines.lines[:-2]:  # before its checkpoint
        written.append(line.at_s, line.events, line.decision)
    written.close()
    Schedule(spec.job().drill, one.storage).due(2)

    def simulated(*_: Any, **__: Any) -> SimBackend:
        return SimBackend(one.pools, spec.job())

    monkeypatch.setattr(JobRun, "_cluster", lambda *_: None)
    monkeypatch.setattr(JobRun, "_backend", simulated)
    monkeypatch.setattr(run, "drive", lambda backend, journal, start, state, found: state)
    monkeypatch.setattr(
        JobRun,
        "_result",
        lambda self, last: Result("again", "stopped", {"steps": last.step}, folder),
    )
    step = one.to_the_end().step
    said = [line for line in stream.getvalue().splitlines() if "begins at step 0 again" in line]
    assert step > 0 and said == [
        f"run 'again' begins at step 0 again: it had reached step {step}, and no checkpoint was "
        "stored; drills that were carried out do not come again: kill any (at step 2); "
        "another --run-name, or none, has them (of an ElasticTrainer: RunConfig(name=...))"
    ]


@pytest.mark.parametrize(
    ("step", "saved", "drilled", "said"),
    [
        (0, 0, [], ""),
        (45, 40, [KILL, ADD], ""),
        (45, 25, [], ""),
        (45, 25, [KILL, ADD], "resumes from step 25; drills .* again: add spot \\(at step 30\\); "),
        (0, 0, [{"kill": "any"}], "begins at step 0 again; drills .* again: kill any; "),
        (45, 0, [], "begins at step 0 again: it had reached step 45, and no checkpoint .*stored$"),
    ],
)
def test_only_drills_of_steps_that_come_again_are_named(
    step: int, saved: int, drilled: list[dict[str, Any]], said: str
) -> None:
    found = comes_again("a", step, saved, carried_out=drilled)
    assert re.search(said, found) if said else not found
