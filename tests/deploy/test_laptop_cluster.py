"""The quickstart on a cluster launched from cluster_configs/laptop.yaml, in namespaces: Ray's
autoscaler starts its nodes, and all of them are released: at the end, by a driver that came after
one that was killed, at Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster.autoscaled import not_allowed
from support.cluster.namespace import Namespace, below
from support.e2e.runs import events, plans
from support.places import ROOT
from support.waiting import WITHIN_S, until

from elastic.ledger.journal import Line, read
from elastic.types import NodeReady, RequestFailed, StepDone

pytestmark = pytest.mark.whole
SCRIPT = str(ROOT / "deploy" / "laptop_cluster.sh")
FILE = str(ROOT / "cluster_configs" / "laptop.yaml")
# the floor of the file: one node on demand
QUICK = {"eval_every": 0, "durable_every": 0, "max_nodes": 1}
REQUESTED = """
import ray
from ray.autoscaler.v2.sdk import get_cluster_status
ray.init(log_to_driver=False)
demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.cluster_constraint_demand
print("requested", sum(entry.count for demand in demands for entry in demand.bundles_by_count))
"""


class Laptop:
    """The cluster inside, and runs on it."""

    def __init__(self, folder: Path) -> None:
        # sockets want a short path
        self.runs, self.folder = folder / "runs", Path("/tmp") / f"elastic-laptop-{os.getpid()}"
        environment = {
            "HOME": str(folder),
            "FOLDER": str(self.folder),
            "RAY": str(Path(sys.executable).parent / "ray"),
        }
        self.space = Namespace({**environment, "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)})

    def script(self, word: str) -> str:
        return self.space.run("bash", SCRIPT, word)

    def run(self, name: str, **values: Any) -> subprocess.Popen[str]:
        sets = [
            f"--set={key}={value}"
            for key, value in {**QUICK, "storage": self.runs, **values}.items()
        ]
        words = [
            "run",
            str(ROOT / "jobs" / "quickstart"),
            "--cluster",
            FILE,
            "--run-name",
            name,
            "--json",
            *sets,
        ]
        return self.space.start(
            sys.executable, "-m", "elastic", *words, RAY_ADDRESS="127.0.0.1:6399"
        )

    def lines(self, name: str) -> list[Line]:
        journal = self.runs / name / "journal.jsonl"
        return read(journal) if journal.is_file() else []

    def step(self, name: str, epoch: int = 1) -> int:
        """The last step that a driver has written down; 0 = none."""
        done = [
            event.step
            for line in self.lines(name)
            if line.epoch == epoch
            for event in events([line], StepDone)
        ]
        return max(done, default=0)

    def only_the_head(self) -> bool:
        return len(self.space.pids("raylet/raylet")) == 1

    def requested(self) -> str:
        out = self.space.run(sys.executable, "-c", REQUESTED, RAY_ADDRESS="127.0.0.1:6399")
        return out.strip().splitlines()[-1]


def a_driver_is_killed_and_another_is_stopped_by_hand(laptop: Laptop) -> None:
    """The second finds the workers of the first at work and continues with them; Ctrl-C gives their
    node back."""
    killed = laptop.run("second", steps=100_000)
    until(lambda: laptop.step("second") > 3 or killed.poll() is not None, "it trains")
    os.kill(below(killed), signal.SIGKILL)
    killed.communicate(timeout=WITHIN_S)
    attached = laptop.run("second", steps=100_000)
    until(
        lambda: laptop.step("second", epoch=2) > 3 or attached.poll() is not None,
        "a new driver continues",
    )
    assert attached.poll() is None, attached.communicate()[1][-3000:]
    assert [plan.generation for plan in plans(laptop.lines("second"))] == [1], (
        "with the workers that it found"
    )
    assert not laptop.only_the_head()
    os.kill(below(attached), signal.SIGINT)
    _, err = attached.communicate(timeout=WITHIN_S)
    assert attached.returncode == 3, err[-3000:]
    until(laptop.only_the_head, "its node has ended")
    assert laptop.requested() == "requested 0"


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    if why := not_allowed():
        pytest.skip(why)
    made = Laptop(tmp_path)
    yield made
    made.space.close()
    shutil.rmtree(made.folder, ignore_errors=True)


def test_the_quickstart_gets_its_nodes_and_gives_them_back(laptop: Laptop) -> None:
    assert "127.0.0.1:6399" in laptop.script("start")
    with pytest.raises(AssertionError, match="it runs already, at 127.0.0.1:6399; stop it first"):
        laptop.script("start")
    assert laptop.only_the_head()
    first = laptop.run("first", steps=4)
    out, err = first.communicate(timeout=WITHIN_S)
    assert first.returncode == 0, err[-3000:]
    found = json.loads(out.strip().splitlines()[-1])
    assert (found["steps"], found["samples_exact"]) == (4, True)
    # a busy machine: its raylet came too late
    failed = {event.pool for event in events(laptop.lines("first"), RequestFailed)}
    assert {event.node.pool for event in events(laptop.lines("first"), NodeReady)} == {
        "spot" if failed else "on-demand"
    }
    until(laptop.only_the_head, "its node has ended")
    assert laptop.requested() == "requested 0"
    a_driver_is_killed_and_another_is_stopped_by_hand(laptop)
    laptop.script("stop")
    until(
        lambda: not any(map(laptop.space.pids, ("raylet", "gcs_server", "ray::"))),
        "its last processes follow their raylets",
    )
    assert not laptop.folder.exists()
