"""A run that is watched: a kill, a driver that is killed and another that goes on are one run for a
tracker, with each step once; its numbers are where Prometheus looks; it is profiled while it
trains, its losses are what they are without, and Ctrl-C saves it.

Each tracker: tests/observe/trackers/test_tracking.py. Ranks under torchrun:
tests/worker/standalone/test_standalone_run.py."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.e2e.shell import PROGRAMS, Shell
from support.observe.read_trackers import WHERE, read_back
from support.observe.scraped import scraped
from support.places import ROOT
from support.reference import train_alone
from support.waiting import until

from elastic.ledger.journal import read
from elastic.program import load_program
from elastic.scenarios.check import TOLERANCE
from elastic.scenarios.kept_steps import events, plans
from elastic.types import StepDone

SLOW = str(PROGRAMS / "tiny_slow.py")


@pytest.mark.e2e
def test_a_run_of_two_drivers_is_one_run_is_profiled_and_saved_by_ctrl_c(shell: Shell) -> None:
    store, library = shell.root / "of-mlflow", "mlflow"
    there = find_spec(library) is not None
    shell.environment |= WHERE[library](store)
    shell.environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT))
    name = shell.job(
        steps=100_000, program=SLOW, layout={"2": "pp=2", "1": "dp_shard=1"},
        trackers={library: {"experiment": "tiny"}} if there else None,
    )  # fmt: skip
    journal = shell.root / "elastic_runs" / "one" / "journal.jsonl"
    first = shell.start("run", name, "--run-name", "one", "--metrics-port", "0")
    try:
        _is_found_by_prometheus(first)
        assert shell.here("drill", "one", "kill=any")[0] == 0
        until(lambda: _steps_behind_a_loss(journal) > 5, "steps behind the loss")
    finally:
        first.kill()
    said, err = first.communicate()
    assert first.returncode == -signal.SIGKILL, said + err
    second = shell.start("run", name, "--run-name", "one", "-q")
    undone = max(event.step for event in events(read(journal), StepDone))
    until(
        lambda: (
            _steps_on_both_nodes(journal, 2) > 2
            and events(read(journal), StepDone)[-1].step > undone
        ),
        "steps under the second driver behind those of the first",
    )
    _is_profiled(shell)
    err += _is_saved_by_ctrl_c(shell, second)
    assert "tracker" not in said + err, "nothing was wrong with one"
    last = shell.status("one")["step"]
    kept = {event.step: event.train_loss for event in events(read(journal), StepDone)}
    alone = train_alone(load_program(SLOW), {"seed": 1, "global_batch": 8}, last)
    assert sorted(kept) == list(range(1, last + 1))
    assert [kept[step] for step in sorted(kept)] == pytest.approx(alone, abs=TOLERANCE)
    code, replayed, _ = shell.here("replay", "one", "--json")
    assert (code, json.loads(replayed)["identical"]) == (0, True)
    code, _, err = shell.here("profile", "one")
    assert (code, err) == (2, f"elastic: run 'one' is not running (stopped at step {last})\n")
    if there:
        (told,) = read_back(library, store, "tiny").values()
        assert [step for step, _ in told["train/train_loss"]] == list(range(1, last + 1))
        assert all(2 < loss < 8 for _, loss in told["train/train_loss"])
        assert len(told["elastic/transition/pause_s"]) >= 3, "start, kill, driver"
        assert told["elastic/goodput"] and len(told["elastic/nodes"]) == last


def _steps_behind_a_loss(journal: Path) -> int:
    lines = read(journal)
    lost = {plan.generation for plan in plans(lines) if plan.cause == "loss"}
    return sum(event.generation in lost for event in events(lines, StepDone))


def _steps_on_both_nodes(journal: Path, epoch: int) -> int:
    """Those that this driver has heard of, and not of a plan that another one is to follow."""
    lines = [line for line in read(journal) if line.epoch == epoch]
    both = {plan.generation for plan in plans(lines) if len(plan.ranks) == 2}
    return sum(event.generation in both for event in events(lines, StepDone))


def _is_profiled(shell: Shell) -> None:
    code, out, err = shell.here("profile", "one", "--steps", "2", "--ranks", "all", "--json")
    assert (code, err) == (0, "")
    found, profiled = json.loads(out), shell.status("one")["step"]
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert {"compute", "pp", "bubble", "commit", "optimizer"} <= set(found["total"]["parts"])
    for one in found["ranks"]:
        assert len(one["steps"]) == 2
        assert sum(one["parts"].values()) == pytest.approx(one["step_s"])
        trace = json.loads(gzip.decompress(Path(one["trace"]).read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"elastic.commit", "elastic.pp schedule", f"elastic.step {one['steps'][0]}"} <= names
    until(lambda: shell.status("one")["step"] > profiled, "a step behind those")


def _is_saved_by_ctrl_c(shell: Shell, driver: subprocess.Popen[str]) -> str:
    """What it says on standard error."""
    driver.send_signal(signal.SIGINT)
    said, ended = driver.communicate(timeout=300)
    assert (driver.returncode, said) == (3, "") and "Traceback" not in ended, ended
    assert "elastic: to resume it: elastic run " in ended and "--run-name one" in ended
    status = shell.status("one")
    assert status["phase"] == "stopped" and status["durable_step"] == status["step"] > 3
    return ended


def _is_found_by_prometheus(process: subprocess.Popen[str]) -> None:
    """Its numbers, while it trains on both nodes."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if "metrics for Prometheus" in line)
    url = re.findall(r"http://127.0.0.1:\d+/metrics", line)[0]
    found: dict[str, float] = {}

    def trains() -> bool:
        found.update(scraped(url))
        return found.get("elastic_step", 0) > 2 and found["elastic_workers"] == 2

    until(trains, "steps on both nodes")
    assert 0 < found["elastic_goodput_ratio"] <= 1 and 2 < found["elastic_train_loss"] < 8


def test_a_port_or_a_tracker_that_is_not_to_be_had_is_one_line_before_anything_starts(
    shell: Shell,
) -> None:
    name = shell.job(trackers=["wandbb"])
    code, _, err = shell.here("run", name)
    assert code == 2 and "unknown key 'trackers.wandbb'; did you mean 'wandb'?" in err
    name = shell.job("other")
    code, _, err = shell.here("run", name, "--metrics-port", "nowhere")
    assert code == 2 and "--metrics-port: must be a port" in err and err.count("\n") == 1
    assert not (shell.root / "elastic_runs").exists()
