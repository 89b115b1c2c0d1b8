"""What a command reads, it reads once: job.yaml, and the journal of the drivers before."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS

import elastic
from elastic import api
from elastic.api.planning.model_source import of_job
from elastic.api.running import entry, run
from elastic.api.running.options import Options
from elastic.api.running.run import JobRun, Result
from elastic.config import job as config_job
from elastic.driver import drive
from elastic.ledger import journal as journals
from elastic.ledger.journal import Journal, MemoryJournal
from elastic.policy.state import fold as folding
from elastic.policy.state.fold import State
from elastic.program import load_program
from elastic.sim.sim_backend import SimBackend
from elastic.types import Decided, DriverStarted
from elastic.worker.step.loss_scale import profile_of

JOB = "steps: 6\nglobal_batch: 12\nlayout: dp_shard=1\npools: [{name: p, max_nodes: 1}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "job.yaml").write_text(f"{JOB}program: {PROGRAMS / 'tiny.py'}\n")
    return made


COMMANDS: dict[str, Any] = {
    "run": lambda folder: elastic.run(folder),
    "run with a program": lambda folder: elastic.run(load_program(PROGRAMS / "tiny.py"), folder),
    "plan": lambda folder: of_job(str(folder)),
    "import and export": lambda folder: entry.loaded(folder),
    "profile": lambda folder: api.profile(folder, api.ProfileRequest(local=True)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_job_yaml_is_read_once(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, n = config_job.read_yaml, Counter[str]()

    def counted(file: Path, shown: str) -> Any:
        n[file.name] += 1
        return read(file, shown)

    class Enough(Exception):
        pass

    def enough(*_: Any, **__: Any) -> None:
        raise Enough

    monkeypatch.setattr(config_job, "read_yaml", counted)
    monkeypatch.setattr(entry, "run_job", enough)
    monkeypatch.setattr("elastic.worker.profile.measure.measure", enough)
    try:
        COMMANDS[name](folder)
    except Enough:
        pass
    assert n == {"job.yaml": 1}


def test_a_resumed_run_reads_and_folds_each_line_of_the_drivers_before_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = JobRun(
        config_job.load_job(folder), Options(run_name="again", local=True, stream=io.StringIO())
    )
    spec = one.spec
    start = DriverStarted("again", 1, spec.plain(), one.pools, profile_of(one.program, spec.job()))
    lines = MemoryJournal()
    drive(SimBackend(one.pools, spec.job()), lines, start)
    with_file = Journal(one.journal_path, 1)
    for line in lines.lines[:-2]:  # not to the end
        with_file.append(line.at_s, line.events, line.decision)
    with_file.close()
    written = one.journal_path.read_bytes().splitlines()
    parsed, folded = Counter[bytes](), Counter[str]()
    parse, fold = journals._parsed, folding.fold
    monkeypatch.setattr(
        journals, "_parsed", lambda text: parsed.update([bytes(text)]) or parse(text)
    )

    def counted(state: State, event: Any, at_s: float) -> State:
        folded.update([type(event).__name__])
        return fold(state, event, at_s)

    monkeypatch.setattr(folding, "fold", counted)
    monkeypatch.setattr(JobRun, "_cluster", lambda *_: None)
    monkeypatch.setattr(JobRun, "_backend", lambda *_, **__: SimBackend(one.pools, spec.job()))
    monkeypatch.setattr(run, "drive", lambda backend, journal, start, state, found: state)
    monkeypatch.setattr(
        JobRun,
        "_result",
        lambda self, last: Result("again", "stopped", {"steps": last.step}, folder),
    )
    assert one.to_the_end().step > 0
    *first, last = written
    assert len(first) > 5 and {text: parsed[text] for text in first} == dict.fromkeys(first, 1)
    assert parsed[last] == 2, "by the journal too, which continues behind it"
    events = Counter(
        type(event).__name__ for line in journals.read(one.journal_path) for _, event in line.events
    )
    assert folded == events + Counter(
        {Decided.__name__: sum(line.decision is not None for line in lines.lines[: len(written)])}
    )
