"""`elastic profile`: which of its three uses is meant, what it prints of a run, and what is
refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli.calls import as_json, called

from elastic import api
from elastic.api import control
from elastic.observe import find_runs
from elastic.storage import LocalStorage
from elastic.types.replacing import replace

SAID = {
    "schema": 1, "worker": "spot-1/0", "at": "tp 0/2", "generation": 1, "steps": [4, 5, 6],
    "step_s": 0.1, "parts": {"compute": 0.06, "tp": 0.03, "idle": 0.01},
    "collectives": {"tp": 0.03}, "on_device": False,
}  # fmt: skip


def profiled(storage: Path, monkeypatch: pytest.MonkeyPatch, error: str = "") -> None:
    """Profile p of the run is there, as if its ranks 0 and 2 had just written it."""
    run = LocalStorage(storage / "tiny-1")
    for rank, step_s in ((2, 0.2), (0, 0.1)):
        said = SAID | {"rank": rank, "step_s": step_s, "parts": {"compute": step_s}}
        run.put(
            f"profiles/p/rank-{rank}.json",
            json.dumps(said if rank else SAID | {"rank": 0}).encode(),
        )
    now = find_runs.now

    def seen(place: Any) -> Any:
        found = now(place)
        found.state = replace(found.state, profiles={"p": error})
        return found

    monkeypatch.setattr(find_runs, "now", seen)
    monkeypatch.setattr(control, "profile", lambda run, profile_id, steps, ranks: "p")


def test_a_run_is_told_of_by_bars_a_table_and_where_its_traces_are(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(storage, monkeypatch)
    code, out, err = called(capsys, "profile", "tiny-1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "run tiny-1 is asked for profile p; it trains on"
    assert lines[1].startswith("run tiny-1, profile p: steps 4 to 6, ")
    bars = {line.split(" [")[0].strip(): line.split(" [")[1] for line in lines if " [" in line}
    assert list(bars) == ["rank 0 tp 0/2", "rank 2 tp 0/2", "all"]
    compute, tp = (bars["rank 0 tp 0/2"].count(letter) for letter in "Ct")
    assert compute == pytest.approx(2 * tp, abs=2) and tp > 4
    assert bars["rank 2 tp 0/2"].count("C") > 3 * bars["rank 0 tp 0/2"].count("C")
    rows = {line.split()[1]: line.split()[2:5] for line in lines if line[1:3] == "  "}
    assert (rows["compute"], rows["tp"]) == (["130", "ms", "86.7%"], ["15", "ms", "10.0%"])
    assert f"traces for Perfetto (https://ui.perfetto.dev): {storage}/tiny-1/profiles/p" in out


def test_the_same_as_json(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(storage, monkeypatch)
    found = as_json(capsys, "profile", "tiny-1")
    assert [one["rank"] for one in found["ranks"]] == [0, 2]
    assert found["total"]["parts"]["compute"] == pytest.approx(0.13)
    assert found["ranks"][0]["trace"].endswith("/tiny-1/profiles/p/rank-0.trace.json.gz")
    assert (found["profile_id"], found["error"]) == ("p", "")


def test_one_that_ended_early_says_why_and_shows_what_there_is(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(storage, monkeypatch, "generation 2 follows")
    code, out, _ = called(capsys, "profile", "tiny-1")
    assert code == 1
    assert "run tiny-1: profile p ended early: generation 2 follows" in out and "rank 2" in out


@pytest.mark.usefixtures("live")
def test_the_order_lies_in_the_inbox_and_a_run_that_ends_meanwhile_says_so(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "too_late", lambda state, steps: "")
    answers = iter(["somebody", ""])
    monkeypatch.setattr(control, "holder", lambda run: next(answers))
    code, _, err = called(capsys, "profile", "tiny-1", "--steps", "2", "--ranks", "0")
    run = LocalStorage(storage / "tiny-1")
    (order,) = [json.loads(run.get(key))["profile"] for key in run.list("inbox/")]
    assert (order["steps"], order["ranks"]) == (2, "0")
    said = f"run 'tiny-1' has ended at step 30, before profile {order['profile_id']} was whole"
    assert (code, err) == (1, f"elastic: {said}\n")


@pytest.mark.usefixtures("live")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "run 'tiny-1': only 0 steps are left to be traced, not 5"),
        (("--ranks", "7"), "run 'tiny-1': there is no rank 7: they are 0 to "),
        (("--ranks", "first"), "--ranks first: must be numbers with commas, as in 0,3, or all"),
        (("--steps", "0"), "--steps 0: a profile is of 1 to 100 steps"),
        (("--steps", "101"), "--steps 101: a profile is of 1 to 100 steps"),
        (("--out", "f.json"), "--out says nothing to run 'tiny-1'"),
        (("--scale", "1,2"), "--scale says nothing to run 'tiny-1'"),
        (("--set", "steps=3"), "--set says nothing to run 'tiny-1'"),
    ],
)
def test_what_a_run_cannot_do(
    storage: Path, words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(capsys, "profile", "tiny-1", *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and why in err
    assert not LocalStorage(storage / "tiny-1").list("inbox/")


@pytest.mark.usefixtures("storage", "idle")
def test_a_run_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(capsys, "profile", "tiny-1")
    assert (code, err) == (2, "elastic: run 'tiny-1' is not running (succeeded at step 30)\n")


@pytest.mark.usefixtures("live")
def test_a_second_profile_is_refused_while_one_is_under_way(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from elastic.policy.state.state import Profiling
    from elastic.types import ProfileAsked

    now = find_runs.now

    def seen(place: Any) -> Any:
        found = now(place)
        found.state = replace(found.state, profiling=Profiling(ProfileAsked("first", 3), 0.0))
        return found

    monkeypatch.setattr(find_runs, "now", seen)
    code, _, err = called(capsys, "profile", "tiny-1")
    said = "profile: run 'tiny-1': profile first is under way; ask again when it has ended"
    assert (code, err) == (2, f"elastic: {said}\n")
    assert not LocalStorage(storage / "tiny-1").list("inbox/")


def test_a_name_of_both_a_run_and_a_job(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says how each of them is named; and so they are."""
    job = Path("tiny-1")
    job.mkdir()
    (job / "job.yaml").write_text("steps: 3\n")
    code, _, err = called(capsys, "profile", "tiny-1")
    both = f"'tiny-1' is a run in {storage}/tiny-1 and the folder of a job"
    assert (code, err.count("\n")) == (2, 1)
    assert f"{both}; say {storage}/tiny-1, or ./tiny-1 for the job" in err
    asked: list[str] = []
    monkeypatch.setattr(api, "profile", lambda what, wishes: asked.append(what) or ())
    assert called(capsys, "profile", "./tiny-1")[0] == 0
    assert asked == ["./tiny-1"]
    profiled(storage, monkeypatch)
    assert called(capsys, "profile", f"{storage}/tiny-1")[0] == 0
    assert asked == ["./tiny-1"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("nix",), "no run 'nix' here or in "),
        (("job", "--ranks", "0"), "--ranks says nothing to the job job"),
        (("job", "--steps", "2"), "--steps says nothing to the job job"),
        (("job", "--png", "a.png"), "--png says nothing to the job job"),
        (("job", "--scale", "1,x"), "--scale 1,x: must be numbers of workers with commas"),
        (("job", "--scale", "0"), "--scale 0: must be numbers of workers with commas"),
        (("job", "--scale", "4,2"), "--scale 4,2: must be up to 16 numbers, each larger"),
        (("job", "--scale", "1,2", "--out", "f"), "--out says nothing to a scaling study"),
    ],
)
@pytest.mark.usefixtures("storage")
def test_what_a_job_cannot_do(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job").mkdir()
    Path("job/job.yaml").write_text("steps: 3\nglobal_batch: 4\n")
    Path("job/program.py").write_text("")
    code, out, err = called(capsys, "profile", *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and why in err
