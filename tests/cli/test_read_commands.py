"""Commands that read a run: what they print of one that the simulator has done, and how a run is
named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.cli.calls import as_json, called

from elastic import api
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.storage import Storage, open_storage


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
    assert (
        called(capsys, "ls", "--storage", str(tmp_path / "empty"))[1]
        == f"no runs in {tmp_path / 'empty'}\n"
    )
    assert as_json(capsys, "ls", "--storage", str(tmp_path / "empty")) == []


@pytest.mark.usefixtures("storage")
def test_why_says_what_led_to_what(capsys: pytest.CaptureFixture[str]) -> None:
    lines = called(capsys, "why", "tiny-1", "--all")[1].splitlines()
    notice = next(i for i, line in enumerate(lines) if "notice: node" in line)
    assert "=> " in lines[notice + 1]
    assert called(capsys, "why", "tiny-1", "--all", "--last", "1")[1].splitlines() == lines[-1:]
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
    csv = Path("elastic_runs/tiny-1/metrics.csv").read_text()
    assert csv.startswith("step,at_s,generation,workers,train_loss,tokens")
    assert len(csv.splitlines()) == 1 + 30
    assert called(capsys, "report", "tiny-1", "--csv")[:2] == (0, csv)
    assert called(capsys, "report", "--csv", "tiny-1")[:2] == (0, csv)
    assert "two ways at once" in called(capsys, "report", "tiny-1", "--csv", "--json")[2]
    code, out, _ = called(capsys, "report", "tiny-1", "--csv", "curve.txt")
    assert (code, out) == (0, "steps: curve.txt (30 rows)\n")
    assert Path("curve.txt").read_text() == csv
    assert "No such file" in called(capsys, "report", "tiny-1", "--csv", "no/curve.csv")[2]
    for words in ((), ("--csv",), ("--csv", "curve.csv")):
        code, _, said = called(capsys, "report", *words)
        assert code == 2 and "of which run? elastic report RUN [--csv FILE]" in said
    place = Path("mine.html")
    code, out, _ = called(capsys, "report", "tiny-1", "--html", str(place), "--target-loss", "0.5")
    assert code == 0 and f"page:  {place}" in out and "Cost to a loss of 0.5" in place.read_text()
    for wrong in ("nan", "much"):
        with pytest.raises(SystemExit) as ended:
            called(capsys, "report", "tiny-1", "--target-loss", wrong)
        assert ended.value.code == 2 and "a number, as in 2.5" in capsys.readouterr().err
    data = as_json(capsys, "replay", "tiny-1")
    assert data["identical"] is True
    assert data["decisions"] > 5


def test_replay_of_an_altered_journal_is_found(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = storage / "tiny-1" / "journal.jsonl"
    path.write_text(
        re.sub(r',"crc":"\w+"', "", path.read_text()).replace('"Notice"', '"NoticeWithdrawn"')
    )
    code, out, _ = called(capsys, "replay", "tiny-1")
    assert code == 1
    assert "NOT identical" in out


@pytest.mark.usefixtures("idle")
def test_a_run_by_the_name_of_its_job_or_by_how_it_begins(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(word: str) -> str:
        code, out, err = called(capsys, "status", word, "--json")
        return err if code else str(find_runs.open_run(word).name)

    for name in ("tiny-20250101-000000", "tiny-20250102-000000", "tiny-3-20250103-000000"):
        (storage / name).mkdir()
        (storage / name / "journal.jsonl").write_bytes(
            (storage / "tiny-1" / "journal.jsonl").read_bytes()
        )
    assert named("tiny") == "tiny-20250102-000000", (
        "the newest of the job's, not of those of the job tiny-3"
    )
    assert named("tiny-3") == "tiny-3-20250103-000000"
    assert named("tiny-1") == "tiny-1"
    assert named("tiny-20250101") == "tiny-20250101-000000"
    assert "no run 'tiny-2' here or in" in named("tiny-2")
    assert (
        named("tiny-2")
        .rstrip()
        .endswith("several begin so: tiny-20250101-000000, tiny-20250102-000000")
    )
    assert "did you mean tiny-1?" in named("iny")
    assert "runs there: tiny-" in named("quite-another")
    assert "no run 'tiny'" in called(capsys, "checkpoint", "rm", "tiny", "--step", "3")[2], (
        "what removes asks for the whole name"
    )


@pytest.mark.usefixtures("idle")
def test_a_run_that_lies_elsewhere_and_one_called_otherwise_than_its_job(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `ElasticTrainer.fit()` with a `storage_path` leaves it, or `--run-name`."""
    elsewhere = tmp_path / "results" / "cnn"
    elsewhere.mkdir(parents=True)
    (storage / "tiny-1").rename(storage / "first")
    shutil.copy(storage / "first" / "journal.jsonl", elsewhere)
    assert "no run 'cnn'" in called(capsys, "status", "cnn")[2]
    find_runs.remember(RunFolder.of(open_storage(str(elsewhere))))
    assert find_runs.open_run("cnn").storage.uri == str(elsewhere)
    assert called(capsys, "status", "cnn")[0] == 0
    assert [name for name, _ in find_runs.all_runs()] == ["first", "cnn"]
    assert [len(as_json(capsys, *words)) for words in (("ls", str(elsewhere.parent)), ("ls",))] == [
        1,
        2,
    ]
    find_runs.remember(RunFolder.of(open_storage(str(storage / "first"))))
    assert [file.name for file in (storage / ".elsewhere").iterdir()] == ["cnn"]
    assert find_runs.open_run("tiny").name == "cnn", "the newest of the job"
    assert find_runs.open_run("tiny", str(storage)).name == "first", "a storage that was named"
    shutil.rmtree(elsewhere)
    assert [name for name, _ in find_runs.all_runs()] == ["first"], "it is not there any more"


@pytest.mark.parametrize("ended", [True, False])
def test_a_status_waits_for_a_sign_of_life_only_of_a_run_that_has_not_ended(
    ended: bool, storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock of the driver's machine may be another one."""
    asked, journal = list[bool](), storage / "tiny-1" / "journal.jsonl"
    if not ended:
        journal.write_text("".join(journal.read_text().splitlines(True)[:-1]))

    def holder(run: Storage, *, patient: bool = True) -> str:
        asked.append(patient)
        return "process 7 on elsewhere"

    monkeypatch.setattr(api, "holder", holder)
    for words in (("status", "tiny-1"), ("status", "-q", "tiny-1"), ("why", "tiny-1")):
        assert called(capsys, *words)[0] == 0
    assert asked == [not ended] * 3


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


@pytest.mark.usefixtures("storage")
def test_a_step_to_export_is_a_number_or_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("checkpoint", "export", "tiny-1", "--to", "weights", "--step")
    code, _, told = called(capsys, *words, "best")
    assert code == 2 and "--step best: this run has made no validation" in told
    assert called(capsys, *words, "7")[2].rstrip().endswith("of step 7; steps there: none")
    with pytest.raises(SystemExit):
        called(capsys, *words, "last")
    assert "--step: 'last' must be a step, or best" in capsys.readouterr().err
