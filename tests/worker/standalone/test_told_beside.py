"""Trackers and the metrics endpoint of ranks that torchrun has started: told by a process beside
rank 0; none where the job asks for none. What arrives there: test_standalone_run.py."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from support.waiting import until
from support.worker.torchrun import TINY, job

from elastic.config.job import load_job
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.storage import open_storage
from elastic.worker import __main__ as worker_command
from elastic.worker.standalone import told_beside
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun
from elastic.worker.standalone.told_beside import ToldBeside, is_asked


@pytest.mark.e2e
@pytest.mark.parametrize("port", ["taken", "ray"])
def test_what_is_not_to_be_had_is_one_line_before_a_step(
    tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own stay
    folder = job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as held:
        wanted = str(held.getsockname()[1]) if port == "taken" else port
        more = ("--storage", str(tmp_path / "runs"), "--set", f"metrics_port={wanted}")
        code = worker_command.main((str(folder), *more))
    said = capfd.readouterr().err
    assert (code, said.count("\n")) == (2, 1), said
    assert f"elastic.worker: metrics_port: {wanted if port == 'ray' else '127.0.0.1'}" in (
        said.replace("'", "")
    )
    assert not (tmp_path / "runs/tiny/journal.jsonl").exists()


def test_where_nothing_is_asked_for_there_is_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told_beside.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    folder = job(tmp_path)
    assert not is_asked(load_job(folder)) and is_asked(load_job(folder, ["metrics_port=0"]))
    wishes = StandaloneOptions(storage=str(tmp_path / "runs"))
    ended = StandaloneRun(load_job(folder, ["steps=2"]), wishes, {}).to_the_end()
    assert ended.outcome == "succeeded"


def test_what_ends_or_says_nothing_holds_no_run_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = load_job(job(tmp_path, program=str(TINY)), ["metrics_port=0"])
    uri = RunFolder.of(open_storage(tmp_path / "run")).storage.uri
    monkeypatch.setattr(told_beside, "MODULE", "elastic.version")  # begins, and ends at once
    ended = ToldBeside(uri, spec, print)
    with pytest.raises(SpecError, match="did not start"):
        ended.check()
    ended.start([], 1)
    line = Line(1.0, 1, ())
    until(lambda: ended.hear(line) or "told no more" in caplog.text, "the warning")
    ended.hear(Line(9.0, 1, ()))
    ended.close()
    monkeypatch.undo()
    monkeypatch.setattr(told_beside, "READY_MOST_S", 0.0)
    slow = ToldBeside(uri, spec, print)
    with pytest.raises(SpecError, match="is silent"):
        slow.check()
    slow.close()


@pytest.mark.e2e
def test_a_refusal_is_heard(tmp_path: Path) -> None:
    spec = load_job(job(tmp_path), ["metrics_port=ray"])
    said: list[str] = []
    told = ToldBeside(RunFolder.of(open_storage(tmp_path / "run")).storage.uri, spec, said.append)
    with pytest.raises(SpecError, match="goes through Ray's own metrics, and there is no Ray"):
        told.check()
    told.close()
    assert not said
