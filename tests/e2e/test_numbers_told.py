"""A run with a kill, a driver that is killed and another that goes on: one run in each tracker,
with each step once; and its numbers where Prometheus and Ray's own exporter look."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.observe.read_trackers import WHERE, needed, read_back
from support.observe.scraped import scraped
from support.places import ROOT
from support.waiting import until

from elastic.ledger.journal import read
from elastic.scenarios.kept_steps import events, plans
from elastic.types import StepDone

THERE = [library for library in WHERE if find_spec(library) is not None]


@pytest.mark.e2e
@needed("mlflow")
def test_a_run_of_two_drivers_is_one_run_in_each_tracker(shell: Shell) -> None:
    stores = {library: shell.root / f"of-{library}" for library in THERE}
    for library, folder in stores.items():
        folder.mkdir()
        shell.environment |= WHERE[library](folder)
    shell.environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT))
    name = shell.job(
        steps=100_000, program=str(PROGRAMS / "tiny_slow.py"),
        trackers={one: {"experiment" if one == "mlflow" else "project": "tiny"} for one in THERE},
    )  # fmt: skip
    first = shell.start("run", name, "--run-name", "one", "--metrics-port", "0")
    try:
        _is_found_by_prometheus(first)
        assert shell.here("drill", "one", "kill=any")[0] == 0
        journal = shell.root / "elastic_runs" / "one" / "journal.jsonl"
        until(lambda: _steps_behind_a_loss(journal) > 5, "steps behind the loss")
    finally:
        first.kill()
    said, err = first.communicate()
    assert first.returncode == -signal.SIGKILL, said + err
    last = shell.status("one")["step"] + 5
    words = ("--run-name", "one", "--set", f"steps={last}", "--json")
    code, out, err = shell.here("run", name, *words)
    assert code == 0 and last_line(out)["steps"] == last, err
    assert "tracker" not in said + err, "nothing was wrong with one"
    for library, folder in stores.items():
        (told,) = read_back(library, folder, "tiny").values()
        assert [step for step, _ in told["train/train_loss"]] == list(range(1, last + 1)), library
        assert all(2 < loss < 8 for _, loss in told["train/train_loss"])
        assert len(told["elastic/transition/pause_s"]) >= 3, "start, kill, driver"
        assert told["elastic/goodput"] and len(told["elastic/nodes"]) == last


def _steps_behind_a_loss(journal: Path) -> int:
    lines = read(journal)
    lost = {plan.generation for plan in plans(lines) if plan.cause == "loss"}
    return sum(event.generation in lost for event in events(lines, StepDone))


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
