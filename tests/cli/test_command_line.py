"""The command line on runs that are there: what it prints, its exit codes, one line per error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from elastic.api import control
from elastic.cli.command_line import main
from elastic.driver import drive
from elastic.ledger.journal import Journal
from elastic.ledger.lease import Lease
from elastic.observe import find_runs
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage
from elastic.types import DriverStarted, ModelProfile, OptimizerSpec, Pool, TensorSpec

MODEL = ModelProfile(
    4, 1000, (TensorSpec("w", (100, 10), "float32", 0, 1),), (OptimizerSpec(("exp_avg",), ("step",)),), tp_limit=2
)
POOLS = (Pool("spot", "CPU", 2, "spot", 0.9, 0, 3),)
JOB = {
    "name": "tiny", "folder": "/jobs/tiny", "steps": 30, "global_batch": 8, "seed": 0, "layout": "auto", "min_workers": 1,
    "max_workers": None, "peer_every": 3, "durable_every": 10, "budget_usd": None, "max_nodes": None,
}  # fmt: skip


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage folder with one run, done by the simulator: a notice and a loss on the way."""
    folder = tmp_path / "elastic_runs"
    faults = [Fault(25.0, "notice", 0, 10.0), Fault(33.0, "loss", 1)]
    backend = SimBackend(POOLS, JOB, faults, Delays(work_s=4.0))
    state = drive(backend, Journal(folder / "tiny-1" / "journal.jsonl", 1), DriverStarted("tiny-1", 1, JOB, POOLS, MODEL))
    assert state.phase == "succeeded"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    return folder


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "holder", lambda run: "somebody")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "holder", lambda run: "")


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code, out, _ = called(capsys, *words, "--json")
    assert code == 0
    return json.loads(out)


@pytest.mark.usefixtures("idle")
def test_ls_and_status(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "ls")
    assert code == 0
    assert "tiny-1  succeeded  30/30" in out
    assert as_json(capsys, "ls")[0]["run"] == "tiny-1"
    code, out, _ = called(capsys, "status", "tiny-1")
    assert code == 0
    assert "30 of 30" in out
    data = as_json(capsys, "status", str(storage / "tiny-1"))
    assert (data["phase"], data["step"], data["durable_step"]) == ("succeeded", 30, 30)
    assert {node["status"] for node in data["nodes"]} >= {"lost"}


@pytest.mark.usefixtures("idle")
def test_ls_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "ls", "--storage", str(tmp_path / "empty"))[1] == f"no runs in {tmp_path / 'empty'}\n"
    assert as_json(capsys, "ls", "--storage", str(tmp_path / "empty")) == []


@pytest.mark.usefixtures("storage")
def test_why_says_what_led_to_what(capsys: pytest.CaptureFixture[str]) -> None:
    lines = called(capsys, "why", "tiny-1")[1].splitlines()
    notice = next(i for i, line in enumerate(lines) if "notice: node" in line)
    assert "=> " in lines[notice + 1]
    assert called(capsys, "why", "tiny-1", "--last", "1")[1].splitlines() == lines[-1:]
    kinds = [note["kind"] for note in as_json(capsys, "why", "tiny-1")]
    assert "NodeLost" in kinds
    assert "Decision" in kinds


@pytest.mark.usefixtures("storage")
def test_ledger_report_and_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert "productive" in called(capsys, "ledger", "tiny-1")[1]
    assert as_json(capsys, "ledger", "tiny-1")["totals"]["steps"] == 30
    code, out, _ = called(capsys, "report", "tiny-1")
    assert code == 0
    assert "TRANSITIONS" in out
    assert Path("elastic_runs/tiny-1/loss.png").is_file()
    data = as_json(capsys, "replay", "tiny-1")
    assert data["identical"] is True
    assert data["decisions"] > 5


def test_replay_of_an_altered_journal_is_found(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = storage / "tiny-1" / "journal.jsonl"
    path.write_text(re.sub(r',"crc":"\w+"', "", path.read_text()).replace('"Notice"', '"NoticeWithdrawn"'))
    code, out, _ = called(capsys, "replay", "tiny-1")
    assert code == 1
    assert "NOT identical" in out


@pytest.mark.usefixtures("live")
def test_orders_reach_the_inbox(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "stop", "tiny-1", "--reason", "enough")[0] == 0
    assert as_json(capsys, "drill", "tiny-1", "kill=any-spot,partner")["drill"] == {"kill": ["any-spot", "partner"]}
    assert called(capsys, "drill", "tiny-1", "notice=any", "deadline_s=5", "at_step=9")[0] == 0
    run = LocalStorage(storage / "tiny-1")
    assert [json.loads(run.get(key)) for key in run.list("inbox/")] == [
        {"stop": "enough"},
        {"drill": {"kill": ["any-spot", "partner"]}},
        {"drill": {"notice": "any", "deadline_s": 5.0, "at_step": 9}},
    ]


@pytest.mark.usefixtures("idle")
def test_a_run_by_the_name_of_its_job_or_by_how_it_begins(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def named(word: str) -> str:
        code, out, err = called(capsys, "status", word, "--json")
        return err if code else str(find_runs.open_run(word).name)

    for name in ("tiny-20250101-000000", "tiny-20250102-000000", "tiny-3-20250103-000000"):
        (storage / name).mkdir()
        (storage / name / "journal.jsonl").write_bytes((storage / "tiny-1" / "journal.jsonl").read_bytes())
    assert named("tiny") == "tiny-20250102-000000", "the newest of the job's, not of those of the job tiny-3"
    assert named("tiny-3") == "tiny-3-20250103-000000"
    assert named("tiny-1") == "tiny-1"
    assert named("tiny-20250101") == "tiny-20250101-000000"
    assert "no run 'tiny-2' here or in" in named("tiny-2")
    assert named("tiny-2").rstrip().endswith("several begin so: tiny-20250101-000000, tiny-20250102-000000")
    assert "runs there: tiny-" in named("iny")
    assert "no run 'tiny'" in called(capsys, "checkpoint", "rm", "tiny", "--step", "3")[2], (
        "what removes asks for the whole name"
    )


@pytest.mark.usefixtures("storage", "idle")
@pytest.mark.parametrize("words", [("stop", "tiny-1"), ("drill", "tiny-1", "kill=any")])
def test_orders_to_a_run_that_nobody_drives(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, *words)
    assert (code, err) == (2, "elastic: run 'tiny-1' is not running (succeeded at step 30)\n")


def test_who_trains_without_a_driver_takes_no_orders(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = LocalStorage(storage / "tiny-1")
    Lease(run, "tiny-1").release()  # the driver's, whose journal is there
    by_torchrun = Lease(run, "tiny-1")
    try:
        code, _, err = called(capsys, "stop", "tiny-1")
        assert code == 2 and f"process {os.getpid()} on " in err and "takes no orders" in err and not run.list("inbox/")
    finally:
        by_torchrun.release()


@pytest.mark.usefixtures("storage", "live")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "tiny-2"), "no run 'tiny-2' here or in"),
        (("drill", "tiny-1", "kill"), "'kill' must be key=value"),
        (("drill", "tiny-1", "kil=any"), "unknown key 'kil'; did you mean 'kill'?"),
        (("drill", "tiny-1", "kill=any", "add=spot"), "exactly one of"),
        (("drill", "tiny-1", "kill=spot-77"), "drill: 'spot-77' is no node; standing are "),
        (("drill", "tiny-1", "add=spto"), "drill: there is no pool 'spto'; the pools are spot"),
        (("run", "nowhere"), "nowhere: no such folder"),
        (("status", "s3://Bucket_/run"), "no name of a bucket; use s3://bucket/prefix"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("words", [(), ("fly",), ("run",), ("ls", "--jsn"), ("checkpoint",)])
def test_bad_usage_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [check["name"] for check in as_json(capsys, "doctor", "--storage", str(tmp_path))]
    assert names[:3] == ["python", "torch", "ray"]


@pytest.mark.usefixtures("storage")
def test_doctor_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "doctor", "tiny-1")
    assert code == 0
    assert "worker failures" in out


@pytest.mark.usefixtures("storage")
def test_checkpoints_of_a_run_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "checkpoint", "ls", "tiny-1")[:2] == (0, "no committed checkpoint\n")
    assert as_json(capsys, "checkpoint", "verify", "tiny-1") == []
