"""The checks of the other ways in: which can be tried where, and two real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.certify.roomy import wrong
from support.waiting import until

from elastic.certify.checks import ways_in
from elastic.certify.harness import child
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Tasks
from elastic.cluster.ray import processes
from elastic.scenarios.limit import Failed, Limit, OutOfTime
from elastic.scenarios.programs import plain_script
from elastic.scenarios.stories import LOOP_SCRIPT
from elastic.scenarios.watched_run import last_json

LOOP = set(LOOP_SCRIPT.checks)
ALL = {*LOOP, ways_in.OBJECTS, ways_in.TORCHRUN, ways_in.RAY_TRAIN, ways_in.RESTARTED}


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
    assert "two nodes of the cluster" in left["driver loss"] and ways_in.RAY_TRAIN in tried
    monkeypatch.setattr(ways_in.util, "find_spec", lambda name: None)
    tried, left = names(Place("cpu-gloo", 4, ray=True))
    assert tried == {*LOOP, ways_in.RESTARTED}
    assert left[ways_in.RAY_TRAIN].startswith(
        "Ray Train is not installed (pandas, pyarrow, fsspec missing)"
    )


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
    assert last_json(
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
        last_json("nothing")


def run(task: Any) -> dict[str, Any]:
    done = Tasks(lambda check: None)
    done.run([task], 720.0)
    return {check.name: check for check in done.checks}


@pytest.mark.whole  # ranks of torchrun: tests/worker/standalone
def test_torchrun_for_real() -> None:
    with Lab(Place("cpu-gloo", 2)) as lab:
        (task,) = ways_in.tasks(lab)
        found = run(task)
    assert not wrong(found["torchrun"])
    assert found["torchrun"].figures["ranks"] == 2


@pytest.mark.whole
def test_ray_train_and_a_plain_script_for_real() -> None:
    with Lab(Place("cpu-gloo", 2, ray=True)) as lab:
        found = {
            name: check for task in ways_in.tasks(lab)[2:] for name, check in run(task).items()
        }
    assert set(found) == {ways_in.RAY_TRAIN, ways_in.RESTARTED}
    assert {check.verdict for check in found.values()} == {"pass"}, found
