"""A run with a notice, a kill, a driver that is killed and another that goes on: one run in each
tracker, with each step once; and its numbers where Prometheus and Ray's own exporter look."""

from __future__ import annotations

import os
import re
import signal
from importlib.util import find_spec

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.observe.read_trackers import WHERE, needed, read_back
from support.observe.scraped import scraped
from support.places import ROOT
from support.waiting import until

THERE = [library for library in WHERE if find_spec(library) is not None]
STEPS = 60
DRILL = [
    {"at_step": 8, "notice": "any-spot", "deadline_s": 5},
    {"at_step": 20, "kill": "any"},
    {"at_step": 40, "kill_driver": True},
]


@pytest.mark.e2e
@needed("mlflow")
def test_a_run_of_two_drivers_is_one_run_in_each_tracker(shell: Shell) -> None:
    stores = {library: shell.root / f"of-{library}" for library in THERE}
    for library, folder in stores.items():
        folder.mkdir()
        shell.environment |= WHERE[library](folder)
    shell.environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT))
    name = shell.job(
        steps=STEPS, program=str(PROGRAMS / "tiny_slow.py"), drill=DRILL,
        trackers={one: {"experiment" if one == "mlflow" else "project": "tiny"} for one in THERE},
        layout="auto", pools=[{"name": "spot", "market_type": "spot", "max_nodes": 3}],
    )  # fmt: skip
    first = shell.start("run", name, "--run-name", "one")
    said, err = first.communicate(timeout=600)
    assert first.returncode == -signal.SIGKILL, said + err
    code, out, err = shell.call("run", name, "--run-name", "one", "--json")
    assert code == 0 and last_line(out)["steps"] == STEPS, err
    assert "tracker" not in said + err, "nothing was wrong with one"
    for library, folder in stores.items():
        (told,) = read_back(library, folder, "tiny").values()
        assert [step for step, _ in told["train/train_loss"]] == list(range(1, STEPS + 1)), library
        assert all(2 < loss < 8 for _, loss in told["train/train_loss"])
        assert len(told["elastic/transition/pause_s"]) >= 4, "start, notice, kill, driver"
        assert told["elastic/goodput"] and len(told["elastic/nodes"]) == STEPS


@pytest.mark.e2e
def test_prometheus_finds_the_numbers_while_it_runs(shell: Shell) -> None:
    name = shell.job(steps=40, program=str(PROGRAMS / "tiny_slow.py"))
    process = shell.start("run", name, "--run-name", "seen", "--metrics-port", "0")
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "metrics for Prometheus" in line)
        url = re.findall(r"http://127.0.0.1:\d+/metrics", line)[0]
        until(lambda: scraped(url).get("elastic_step", 0) > 5, "five steps")
        found = scraped(url)
        assert found["elastic_workers"] == 2 and 0 < found["elastic_goodput_ratio"] <= 1
        assert 2 < found["elastic_train_loss"] < 8
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0


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
