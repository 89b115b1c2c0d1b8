"""Trackers and the metrics endpoint of ranks that torchrun has started: told by a process beside
rank 0, without Ray; none where the job asks for none."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.observe.read_trackers import WHERE, needed, read_back
from support.observe.scraped import scraped
from support.places import ROOT
from support.waiting import until
from support.worker.torchrun import SLOW, TINY, command, environment, job, started

from elastic.config.job import load_job
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.step_rows import read_rows
from elastic.storage import open_storage
from elastic.worker import __main__ as worker_command
from elastic.worker.standalone import told_beside
from elastic.worker.standalone.standalone_run import StandaloneOptions, StandaloneRun
from elastic.worker.standalone.told_beside import ToldBeside, is_asked


@pytest.fixture
def without_ray(tmp_path: Path) -> Path:
    """A folder that comes before the installed packages: ray cannot be imported."""
    (tmp_path / "hidden" / "ray").mkdir(parents=True)
    (tmp_path / "hidden/ray/__init__.py").write_text("raise ImportError('no ray here')\n")
    return tmp_path / "hidden"


@pytest.mark.e2e
@needed("mlflow")
def test_ranks_tell_a_tracker_and_prometheus_without_ray_also_when_they_go_on(
    tmp_path: Path, without_ray: Path
) -> None:
    store = tmp_path / "mlflow"
    folder = job(tmp_path / "job", program=str(SLOW), steps=30, metrics_port=0, trackers=["mlflow"])
    held = tmp_path / "held"  # the ranks do not end before they were asked for their numbers
    held.touch()
    slow = {"SLOW": str(held), "SLOW_AFTER": "8", "PAUSE_S": "10"}
    own = WHERE["mlflow"](store) | {f"ELASTIC_TEST_{k}": v for k, v in slow.items()}
    own["PYTHONPATH"] = f"{ROOT}:{without_ray}"
    log = tmp_path / "log"
    with started(command(2, folder), log, **own) as ranks:
        until(lambda: "step 6/" in log.read_text() or ranks.poll() is not None, log.read_text)
        (url,) = re.findall(r"run tiny: metrics for Prometheus: (http\S+)", log.read_text())
        until(lambda: scraped(url).get("elastic_step", 0) > 5, log.read_text)
        assert scraped(url)["elastic_workers"] == 2
        held.unlink()
        assert ranks.wait(300) == 0, log.read_text()
    more = [*command(1, folder), "--set", "steps=34"]
    ended = subprocess.run(
        more, capture_output=True, text=True, env=environment(**own), timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    (told,) = read_back("mlflow", store, "tiny").values()
    assert [step for step, _ in told["train/train_loss"]] == list(range(1, 35))
    rows = read_rows((folder / "runs/tiny/metrics.csv").read_text())
    assert [row["step"] for row in rows] == list(range(1, 35))


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


def test_a_refusal_is_heard(tmp_path: Path) -> None:
    spec = load_job(job(tmp_path), ["metrics_port=ray"])
    said: list[str] = []
    told = ToldBeside(RunFolder.of(open_storage(tmp_path / "run")).storage.uri, spec, said.append)
    with pytest.raises(SpecError, match="goes through Ray's own metrics, and there is no Ray"):
        told.check()
    told.close()
    assert not said
