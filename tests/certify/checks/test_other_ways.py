"""The checks of the other ways in: what they make of what they see, which can be tried where, and
two real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.certify.roomy import wrong
from support.waiting import until

from elastic.certify.checks import main_path, ways_in
from elastic.certify.checks.main_path import TRAINS, Trial, Where
from elastic.certify.harness import child
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Tasks
from elastic.cluster.ray import processes
from elastic.scenarios.limit import Failed, Limit, OutOfTime
from elastic.scenarios.programs import plain_script

ALL = {
    ways_in.LIVE,
    ways_in.DRIVER,
    ways_in.OBJECTS,
    ways_in.TORCHRUN,
    ways_in.RAY_TRAIN,
    ways_in.RESTARTED,
}


def names(place: Place, storage: str = "/s") -> tuple[set[str], dict[str, str]]:
    with Lab(place, storage=storage) as lab:
        return {name for task in ways_in.tasks(lab) for name in task.names}, ways_in.left_out(lab)


def test_each_way_is_tried_or_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, left = names(Place("cpu-gloo", 4, ray=True))
    assert tried == ALL - {ways_in.OBJECTS} and set(left) == {ways_in.OBJECTS}
    assert left[ways_in.OBJECTS] == (
        "the storage is a folder; give --storage s3://bucket/prefix (likewise gs://, az://)"
    )
    for uri in ("s3://b/p", "gs://b/p", "az://c/p"):
        assert names(Place("cpu-gloo", 4, ray=True), uri) == (ALL, {})
    tried, left = names(Place("cpu-gloo", 4), "s3://b/p")
    assert tried == {ways_in.TORCHRUN} and "without Ray" in left[ways_in.OBJECTS]
    tried, left = names(Place("cpu-gloo", 4, ray=True, address="a:1"))
    assert "two nodes of the cluster" in left[ways_in.DRIVER] and ways_in.RAY_TRAIN in tried
    monkeypatch.setattr(ways_in.util, "find_spec", lambda name: None)
    tried, left = names(Place("cpu-gloo", 4, ray=True))
    assert tried == {ways_in.LIVE, ways_in.DRIVER, ways_in.RESTARTED}
    assert left[ways_in.RAY_TRAIN].startswith(
        "Ray Train is not installed (pandas, pyarrow, fsspec missing)"
    )


def live(**more: Any) -> str:
    one = {
        "cause": "notice",
        "source": "live",
        "pause_s": 0.2,
        "steps_lost": 0,
        "digest_ok": True,
        **more,
    }
    return ways_in._live({"transitions": [one]}, float(more.get("worst", 0.0))).verdict


def test_a_loop_script_that_was_not_changed_live_fails() -> None:
    assert live() == "pass"
    assert [live(steps_lost=1), live(digest_ok=False), live(worst=1e-3)] == ["fail"] * 3
    for transitions in (
        [],
        [{"cause": "notice", "source": "peer"}],
        [{"cause": "loss", "source": "live"}],
    ):
        with pytest.raises(Failed, match="one live change by notice"):
            ways_in._live({"transitions": transitions}, 0.0)


def test_workers_that_were_started_again_are_counted(tmp_path: Path) -> None:
    trial = Trial(tmp_path, [], Limit.after(1), Where("r"), {**TRAINS, "script": "x.py"})
    assert "program" not in trial.job and trial.job["name"] == "r"
    prepared = {"kind": "NodePrepared", "node_id": "x", "pids": [1, 2]}
    trial.take([{"events": [[0.0, prepared]]}])
    trial.first_pids = set(trial.pids)
    trial.take([{"events": [[0.0, prepared], [0.0, {**prepared, "pids": [1, 3]}]]}])
    assert trial.pids - trial.first_pids == {3}


def test_steps_that_the_killed_driver_had_written_are_none_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    for name in ("_start", "_calm"):
        monkeypatch.setattr(Trial, name, lambda self, *more: None)
    monkeypatch.setattr(Trial, "_until", lambda self, holds, what: held.append(holds()))
    driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True)
    trial = Trial(tmp_path, [], Limit.after(5), process=driver, steps=[(1, 1, 0.0, "d")])
    trial.journal.parent.mkdir(parents=True)
    step = {"kind": "StepDone", "generation": 1, "step": 5, "train_loss": 2.0, "digest": "d"}
    trial.journal.write_text(json.dumps({"events": [[0.0, step]]}) + "\n")
    trial.without_driver()
    assert driver.returncode == -9
    assert held == [False]


def test_the_plain_script_learns_and_its_losses_do_not_depend_on_when_they_are_asked_for() -> None:
    found = plain_script.losses(60)
    assert found[-1] < 0.1 * found[0]
    assert plain_script.losses(5) == found[:5]


def _nested() -> list[Path]:
    return [
        p
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and "certify-nested" in processes.command(int(p.name))
    ]


@pytest.mark.e2e
def test_a_command_ends_with_its_time_and_says_why_it_failed(tmp_path: Path) -> None:
    setting = child.Setting(tmp_path, {"A_NAME": "x"})
    code = "import os; print('{\"a\": \"' + os.environ['A_NAME'] + '\"}')"
    assert child.last_json(
        child.run([sys.executable, "-c", code], setting, Limit.after(60), what="it")
    ) == {"a": "x"}
    with pytest.raises(Failed, match="it failed: no such thing"):
        child.run(
            [sys.executable, "-c", "raise SystemExit('no such thing')"],
            setting,
            Limit.after(60),
            what="it",
        )
    nested = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; "
        "time.sleep(60)', 'certify-nested'])"
    )
    with pytest.raises(OutOfTime):
        child.run([sys.executable, "-c", nested], setting, Limit.after(1.0), what="it")
    until(lambda: not _nested(), "the end of what was killed")
    with pytest.raises(Failed, match="it printed no result: nothing"):
        child.last_json("nothing")


def test_the_driver_of_a_run_is_given_no_address_by_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:1")
    assert "RAY_ADDRESS" not in child.environment_of({})
    assert child.environment_of({"RAY_ADDRESS": "b"})["RAY_ADDRESS"] == "b"


def run(task: Any) -> dict[str, Any]:
    done = Tasks(lambda check: None)
    done.run([task], 720.0)
    return {check.name: check for check in done.checks}


@pytest.mark.e2e
def test_torchrun_for_real() -> None:
    with Lab(Place("cpu-gloo", 2)) as lab:
        (task,) = ways_in.tasks(lab)
        found = run(task)
    assert not wrong(found["torchrun"])
    assert found["torchrun"].figures["ranks"] == 2


@pytest.mark.whole
def test_a_loop_script_without_its_driver_for_real() -> None:
    with Lab(Place("cpu-gloo", 2, ray=True)) as lab:
        found = run(ways_in.tasks(lab)[0])
    assert set(found) == {ways_in.LIVE, ways_in.DRIVER}
    assert not [text for text in map(wrong, found.values()) if text]
    assert found[ways_in.DRIVER].figures["steps"] > 2 * main_path.CALM_STEPS
    assert "2 Ray nodes of its own on this host" in found[ways_in.DRIVER].where


@pytest.mark.whole
def test_ray_train_and_a_plain_script_for_real() -> None:
    with Lab(Place("cpu-gloo", 2, ray=True)) as lab:
        found = {
            name: check for task in ways_in.tasks(lab)[2:] for name, check in run(task).items()
        }
    assert set(found) == {ways_in.RAY_TRAIN, ways_in.RESTARTED}
    assert {check.verdict for check in found.values()} == {"pass"}, found
