"""SIGKILL of what the driver stands on: its own raylet, or the head's GCS. It ends by itself, in
one line; embedded, nothing is left of the run; on a cluster the workers are let go of and live
on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.places import ROOT
from support.waiting import until

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.nodes.survey import RECONNECT
from elastic.cluster.ray import processes
from elastic.errors import LostContact
from elastic.ledger.journal import read
from elastic.types import NodePrepared, NodeReady, StepDone

pytestmark = pytest.mark.e2e
WITHIN_S = 60.0
# of the head: its binary, and a word of it
PARTS = {"raylet": ("raylet/raylet", "/ray/r0"), "gcs": ("gcs/gcs_server", "")}
WHY = {"raylet": "own raylet has ended", "gcs": "GCS at 127.0.0.1:"}


def part_of_head(root: int, which: str) -> int:
    binary, word = PARTS[which]
    found = [
        pid
        for pid in processes.descendants(root)
        if (words := processes.command(pid)) and words[0].endswith(binary)
    ]
    (pid,) = [pid for pid in found if any(w.endswith(word) for w in processes.command(pid))]
    return pid


def events(shell: Shell, run: str, kind: type) -> list[Any]:
    path = shell.root / "elastic_runs" / run / "journal.jsonl"
    lines = read(path) if path.is_file() else []
    return [event for line in lines for _, event in line.events if isinstance(event, kind)]


def start(shell: Shell, kind: type = StepDone, **changes: Any) -> subprocess.Popen[str]:
    """A run that has come to its first event of that kind."""
    values: dict[str, Any] = {
        "steps": 60,
        "program": str(PROGRAMS / "tiny_slow.py"),
        "durable_every": 5,
    } | changes
    process = shell.start("run", shell.job(**values), "--run-name", "headless")
    until(
        lambda: bool(events(shell, "headless", kind)) or process.poll() is not None,
        what=kind.__name__,
    )
    assert process.poll() is None, process.communicate()[1]
    return process


def script_job(shell: Shell) -> str:
    (shell.root / "job").mkdir()
    pools = [{"name": "spot", "market_type": "spot", "max_nodes": 2}]
    (shell.root / "job" / "job.yaml").write_text(json.dumps({"pools": pools, "min_workers": 1}))
    return "job"


def ended(process: subprocess.Popen[str], which: str) -> None:
    """It does so within a minute, with one line."""
    try:
        _, err = process.communicate(timeout=WITHIN_S)
    finally:
        process.kill()
    assert process.returncode == LostContact.exit_code, err
    (line,) = [line for line in err.strip().splitlines() if not line.startswith("notices: ")]
    assert line.startswith("elastic: run 'headless': "), line
    assert WHY[which] in line and "run it again with this --run-name" in line, line


@pytest.mark.whole
@pytest.mark.parametrize("which", PARTS)
def test_the_embedded_run_ends_with_its_head(shell: Shell, which: str) -> None:
    process = start(shell)
    below = processes.descendants(process.pid)
    os.kill(part_of_head(process.pid, which), signal.SIGKILL)
    ended(process, which)
    until(
        lambda: not any(processes.started(pid) for pid in below),
        "the end of all its processes",
        5.0,
    )
    code, out, err = shell.call("run", "tiny", "--run-name", "headless", "--json")
    assert code == 0, err
    found = last_line(out)
    assert (found["steps"], found["samples_exact"]) == (60, True)


def test_also_while_actors_are_being_made(shell: Shell) -> None:
    """Calls to the head stand in threads then, and nobody waits for them."""
    process = start(shell, NodeReady, steps=100_000)
    os.kill(part_of_head(process.pid, "gcs"), signal.SIGKILL)
    ended(process, "gcs")


@pytest.mark.whole
@pytest.mark.parametrize("which", PARTS)
def test_so_does_a_script_that_is_restarted(shell: Shell, which: str) -> None:
    (shell.root / "state").mkdir()
    script = ("--script", str(PROGRAMS / "plain_ddp.py"), "--", str(shell.root / "state"), "100000")
    process = shell.start("run", script_job(shell), "--local", "--run-name", "headless", *script)
    until(
        lambda: bool(events(shell, "headless", StepDone)) or process.poll() is not None,
        what="its first step",
    )
    assert process.poll() is None, process.communicate()[1]
    os.kill(part_of_head(process.pid, which), signal.SIGKILL)
    ended(process, which)


@pytest.mark.whole
@pytest.mark.parametrize("which", PARTS)
def test_on_a_cluster_the_workers_are_let_go_of(shell: Shell, which: str) -> None:
    with LocalCluster((str(ROOT),)) as cluster:
        for node in ("x", "y"):
            labels = {"elastic-node": node, "elastic-pool": "spot", "ray.io/market-type": "spot"}
            cluster.add(NodeOrder(node, 1, labels)).result(180)
        away = {RECONNECT: "40"}  # of the driver only: the nodes wait for a minute
        shell.environment |= {**cluster.environment, **away, "RAY_ADDRESS": cluster.address}
        process = start(shell, steps=100_000, durable_every=0)
        workers = [pid for event in events(shell, "headless", NodePrepared) for pid in event.pids]
        os.kill(part_of_head(cluster.pid, which), signal.SIGKILL)
        ended(process, which)
        assert len(workers) == 2
        assert all(processes.started(pid) for pid in workers), "they may outlive the head"
