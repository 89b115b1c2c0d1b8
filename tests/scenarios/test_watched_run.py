"""A run that is watched: what is read of its journal, how it ends, and what is found of it
afterwards."""

from __future__ import annotations

import json
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.child import child

from elastic.cluster.ray import processes
from elastic.scenarios import watched_run
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.watched_run import Seen, Stage, WatchedRun

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def watched(folder: Path, seconds: float = 20.0, **more: Any) -> WatchedRun:
    return WatchedRun(Stage(folder, {}, 3, "r"), Limit.after(seconds), **more)


def step(generation: int, loss: float, number: int = 1) -> dict[str, Any]:
    return {
        "kind": "StepDone", "generation": generation, "step": number, "train_loss": loss,
        "digest": "d",
    }  # fmt: skip


def test_a_process_that_is_left_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_run, "GONE_S", 0.3)
    with child(SLEEP, text=True) as root, child(SLEEP) as orphan:
        started = processes.started(orphan.pid)
        assert started is not None
        temporary = tmp_path / "temporary"
        (temporary / "forgotten").mkdir(parents=True)
        run = watched(tmp_path, process=root, processes={orphan.pid: started}, temporary=temporary)
        process, file = run.end()
        assert process.startswith(f"process {orphan.pid}: ")
        assert file == f"temporary {temporary / 'forgotten'}" and not temporary.exists()
        assert orphan.wait(60) == -9
        assert root.returncode == -9


def test_a_run_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "err.log").write_text("elastic: no such thing")
    with child([sys.executable, "-c", ""], text=True) as ended:
        run = watched(tmp_path, process=ended)
        with pytest.raises(Failed, match="the run ended: elastic: no such thing"):
            run.calm(3)
        assert run.end() == []


def test_compiled_code_of_all_runs_lies_in_one_folder_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = watched(tmp_path)
    there = Path(run._environment()["TORCHINDUCTOR_CACHE_DIR"])
    assert there.parent == tmp_path and stat.S_IMODE(there.stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    assert run._environment()["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"


def test_only_whole_lines_of_the_journal_are_read(tmp_path: Path) -> None:
    run = watched(tmp_path)
    run.journal.parent.mkdir(parents=True)
    events = (step(1, 2.0), step(2, 3.0))
    text = "".join(json.dumps({"events": [[0.0, event]]}) + "\n" for event in events)
    run.journal.write_text(text[:-5])
    run.look()
    assert run.seen.curve() == {1: (2.0, "d")}
    run.journal.write_text(text)
    run.look()
    assert run.seen.curve() == {1: (3.0, "d")}


def test_a_drill_that_could_not_be_carried_out_fails_at_once() -> None:
    asked = {"kind": "DrillAsked", "drill": {"kill": "x", "error": "drill: there is no node x"}}
    with pytest.raises(Failed, match="there is no node x"):
        Seen().take([{"events": [[0.0, asked]]}])


def test_steps_that_the_killed_driver_had_written_are_none_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(WatchedRun, "start", lambda self: None)
    monkeypatch.setattr(WatchedRun, "until", lambda self, holds, what: held.append(holds()))
    with child(SLEEP, text=True) as driver:
        run = watched(tmp_path, process=driver)
        run.seen.take([{"events": [[0.0, step(1, 0.0)]]}])
        run.journal.parent.mkdir(parents=True)
        run.journal.write_text(json.dumps({"events": [[0.0, step(1, 2.0, number=5)]]}) + "\n")
        run.driver_killed()
        assert driver.returncode == -9
    assert held == [False]


def test_the_driver_of_a_run_is_given_no_address_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:1")
    run = watched(tmp_path)
    assert "RAY_ADDRESS" not in run._environment()
