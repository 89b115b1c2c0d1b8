"""The checks of the main path: what they make of a run's summary and journal, and one real run on
Ray."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic.certify.checks import main_path
from elastic.certify.checks.main_path import (
    NAMES,
    Trial,
    judged,
    pools_of,
    replayed,
    why_not,
    wrong_samples,
)
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Tasks
from elastic.cluster.ray import processes
from elastic.data.order import digest, digest_text, sample_ids
from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.scenarios.limit import Failed, Limit
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted, Job, ModelProfile, OptimizerSpec, Pool, TensorSpec


def transition(cause: str, **more: Any) -> dict[str, Any]:
    return {
        "cause": cause, "pause_s": 0.3, "steps_lost": 0, "digest_ok": True, "source": "live",
        "bytes_moved": 10, **more,
    }  # fmt: skip


SUMMARY: dict[str, Any] = {
    "launch_to_first_step_s": 10.0,
    "transitions": [
        transition("start"),
        transition("loss", steps_lost=3),
        transition("growth"),
        transition("notice"),
    ],
}


def verdicts(summary: dict[str, Any], worst: float = 1e-6) -> dict[str, str]:
    return {
        check.name.removeprefix("main path: "): check.verdict for check in judged(summary, worst)
    }


def changed(cause: str, **more: Any) -> dict[str, Any]:
    out = copy.deepcopy(SUMMARY)
    for one in out["transitions"]:
        if one["cause"] == cause:
            one.update(more)
    return out


def test_a_run_as_it_should_be_passes() -> None:
    assert verdicts(SUMMARY) == {"kill": "pass", "growth": "pass", "notice": "pass"}


@pytest.mark.parametrize(
    ("summary", "failing"),
    [
        (changed("loss", steps_lost=8), {"kill"}),
        (changed("notice", steps_lost=1), {"notice"}),
        (changed("growth", steps_lost=1), {"growth"}),
        (changed("growth", digest_ok=False), {"growth"}),
        (changed("loss", digest_ok=None), {"kill"}),
        (changed("notice", pause_s=10.1), {"notice"}),
        ({**SUMMARY, "launch_to_first_step_s": None}, {"kill", "growth", "notice"}),
    ],
)
def test_each_promise_that_is_broken_fails(summary: dict[str, Any], failing: set[str]) -> None:
    assert {name for name, verdict in verdicts(summary).items() if verdict == "fail"} == failing


def test_losses_of_another_run_fail() -> None:
    assert set(verdicts(SUMMARY, 6e-4).values()) == {"fail"}


def test_a_transition_too_many_or_too_few_fails() -> None:
    for transitions in (
        SUMMARY["transitions"][:-1],
        [*SUMMARY["transitions"], transition("growth")],
    ):
        with pytest.raises(Failed, match="one transition by"):
            verdicts({**SUMMARY, "transitions": transitions})


def test_samples_of_another_order_are_counted() -> None:
    right = {
        s: digest_text(digest(sample_ids(main_path.N_SAMPLES, GLOBAL_BATCH, 7, step=s - 1)))
        for s in range(1, 6)
    }
    assert wrong_samples(right, 7) == 0
    assert wrong_samples(right, 8) == 5
    assert wrong_samples({**right, 3: right[4]}, 7) == 1
    assert wrong_samples({s: text for s, text in right.items() if s != 2}, 7) == 1


def test_a_decision_that_comes_out_otherwise_fails() -> None:
    job = {
        "steps": 20,
        "global_batch": 12,
        "layout": "auto",
        "min_workers": 1,
        "peer_every": 1,
        "durable_every": 5,
    }
    pools = (Pool("p", max_nodes=3, market_type="spot"),)
    model = ModelProfile(
        4,
        1_000_000,
        (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
        (OptimizerSpec(("exp_avg",)),),
        tp_limit=2,
    )
    journal = MemoryJournal()
    drive(
        SimBackend(pools, Job.from_plain(job), (Fault(20.0, "loss", 1),)),
        journal,
        DriverStarted("r", 1, job, pools, model),
    )
    assert replayed(journal.lines).verdict == "pass"
    i, line = next(
        (i, line)
        for i, line in enumerate(journal.lines)
        if line.decision is not None and line.decision.actions
    )
    assert line.decision is not None
    journal.lines[i] = replace(line, decision=replace(line.decision, actions=()))
    assert replayed(journal.lines).verdict == "fail"


def test_a_process_that_is_left_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_path, "GONE_S", 0.3)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    root, orphan = subprocess.Popen(sleep, text=True), subprocess.Popen(sleep)
    try:
        started = processes.started(orphan.pid)
        assert started is not None
        trial = Trial(tmp_path, [], Limit.after(10), process=root, seen={orphan.pid: started})
        assert trial.end() == [orphan.pid]
        assert orphan.wait(60) == -9
        assert root.returncode == -9
    finally:
        orphan.kill()
        root.kill()


def test_a_run_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "err.log").write_text("elastic: no such thing")
    ended = subprocess.Popen([sys.executable, "-c", ""], text=True)
    trial = Trial(tmp_path, [], Limit.after(20), process=ended)
    with pytest.raises(Failed, match="the run ended: elastic: no such thing"):
        trial._calm(3)
    assert trial.end() == []


def test_only_whole_lines_of_the_journal_are_read(tmp_path: Path) -> None:
    trial = Trial(tmp_path, [], Limit.after(1))
    trial.journal.parent.mkdir(parents=True)
    step = {"kind": "StepDone", "generation": 1, "step": 1, "train_loss": 2.0, "digest": "d"}
    again = {**step, "generation": 2, "train_loss": 3.0}
    text = "".join(json.dumps({"events": [[0.0, event]]}) + "\n" for event in (step, again))
    trial.journal.write_text(text[:-5])
    trial._read()
    assert trial.curve() == {1: (2.0, "d")}
    trial.journal.write_text(text)
    trial._read()
    assert trial.curve() == {1: (3.0, "d")}


def test_where_it_can_be_run() -> None:
    assert why_not(Place("cpu-gloo", 4, ray=True)) == ""
    assert "without Ray" in why_not(Place("cpu-gloo", 4))
    assert "two GPUs" in why_not(Place("one-gpu", 4, ("0",), ray=True))
    assert [
        pool["max_nodes"]
        for pool in pools_of(Place("several-gpus", 8, tuple("01234567"), ray=True))
    ] == [7, 1]
    assert [pool["max_nodes"] for pool in pools_of(Place("cpu-gloo", 4, ray=True))] == [2, 1]


@pytest.mark.whole  # tests/certify/harness/test_on_a_cluster.py has one that CI runs
def test_a_real_run(tmp_path: Path) -> None:
    done = Tasks(lambda check: None)
    began = time.monotonic()
    with Lab(Place("cpu-gloo", 3, ray=True), folder=tmp_path / "lab") as lab:
        (tmp_path / "lab").mkdir()
        done.run([main_path.task(lab)], 240.0)
    assert not ray.is_initialized(), (
        "a cluster was started by asking for what is left of the run's own"
    )
    found = {check.name: check for check in done.checks}
    assert list(found) == list(NAMES)
    assert {check.verdict for check in done.checks} == {"pass"}, [
        check.line() for check in done.checks
    ]
    assert found["main path: kill"].figures["source"] == "peer"
    assert found["main path: samples"].figures["steps"] > 50
    assert time.monotonic() - began < 240
