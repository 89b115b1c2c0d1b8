"""SIGKILL of the driver: embedded the next one resumes from storage; with a node it resumes from
memory; without one the workers save and go. That it attaches is a scenario (test_scenarios.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.places import ROOT
from support.waiting import until

from elastic.cluster.backend.ray_run import namespace_of
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import processes
from elastic.ledger.journal import read
from elastic.storage import open_storage
from elastic.types import CopyStored, NodePrepared, PlanEntered, StepDone
from elastic.worker.checkpoint import checkpoint_index

pytestmark = pytest.mark.e2e


def events(shell: Shell, run: str, kind: type) -> list[Any]:
    path = shell.root / "elastic_runs" / run / "journal.jsonl"
    lines = read(path) if path.is_file() else []
    return [event for line in lines for _, event in line.events if isinstance(event, kind)]


def kill_driver(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=300)


# test_numbers_told.py tells the same of a run that is told to trackers
@pytest.mark.whole
def test_embedded_the_next_driver_resumes_from_the_newest_durable_copy(shell: Shell) -> None:
    name = shell.job(
        steps=60,
        durable_every=10,
        program=str(PROGRAMS / "tiny_slow.py"),
        drill=[{"at_step": 25, "kill_driver": True}],
    )
    first = shell.start("run", name, "--run-name", "again")
    first.communicate(timeout=600)
    assert first.returncode == -signal.SIGKILL
    pids = [pid for e in events(shell, "again", NodePrepared) for pid in e.pids]
    assert pids
    until(
        lambda: not any(processes.started(pid) for pid in pids),
        "the end of the workers of the killed driver",
    )
    newest = checkpoint_index.find(open_storage(str(shell.root / "elastic_runs" / "again")))[0].step
    assert newest in (10, 20)
    code, out, err = shell.call("run", name, "--run-name", "again", "--json")
    assert code == 0, err
    found = last_line(out)
    assert (found["steps"], found["samples_exact"]) == (60, True)
    back = next(t for t in found["transitions"] if t["source"] == "durable")
    assert back["at_step"] == newest
    assert back["digest_ok"] is True


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A Ray cluster that somebody else started: two nodes of one worker."""
    python_path = (str(ROOT),)
    with LocalCluster(python_path) as made:
        for node in ("x", "y"):
            labels = {"elastic-node": node, "elastic-pool": "spot", "ray.io/market-type": "spot"}
            made.add(NodeOrder(node, 1, labels)).result(180)
        yield made


@pytest.fixture
def on_cluster(shell: Shell, cluster: LocalCluster) -> Shell:
    shell.environment |= {**cluster.environment, "RAY_ADDRESS": cluster.address}
    return shell


def start_and_wait(
    shell: Shell, name: str, run: str, step: int
) -> tuple[subprocess.Popen[str], list[int]]:
    """A run on the cluster that has got to `step`, and the process ids of its workers."""
    process = shell.start("run", name, "--run-name", run)
    done = lambda: any(e.step >= step for e in events(shell, run, StepDone))  # noqa: E731
    until(lambda: done() or process.poll() is not None, f"step {step}")
    assert process.poll() is None, process.communicate()[1]
    return process, [pid for e in events(shell, run, NodePrepared) for pid in e.pids]


@pytest.mark.whole
def test_a_script_that_is_restarted_trains_on_without_its_driver(on_cluster: Shell) -> None:
    shell = on_cluster
    (shell.root / "state").mkdir()
    pools = '[{"name": "spot", "market_type": "spot", "max_nodes": 2}]'
    words = (
        "run", "--script", str(PROGRAMS / "plain_ddp.py"), "--run-name", "script", "--json",
        "--set", f"pools={pools}", "--", str(shell.root / "state"), "150",
    )  # fmt: skip
    first = shell.start(*words)
    until(lambda: any(e.step >= 20 for e in events(shell, "script", StepDone)), "step 20")
    kill_driver(first)
    code, out, err = shell.call(*words)
    assert code == 0, err
    found = last_line(out)
    assert (found["outcome"], found["steps"]) == ("succeeded", 150)
    assert [t["generation"] for t in found["transitions"]] == [1], "its processes are the same"
    steps = [e.step for e in events(shell, "script", StepDone)]
    assert sorted(set(steps)) == list(range(1, 151))
    assert len(events(shell, "script", PlanEntered)) == 1


@pytest.mark.whole
def test_the_driver_and_a_node_are_lost_at_once(on_cluster: Shell) -> None:
    """The next driver finds the survivors waiting and resumes from the copies in their memory:
    nothing was ever stored."""
    shell = on_cluster
    name = shell.job(
        steps=120, program=str(PROGRAMS / "tiny_slow.py"), durable_every=0, peer_every=4
    )
    first, _ = start_and_wait(shell, name, "both", 20)
    until(lambda: bool(events(shell, "both", CopyStored)), "a peer replica")
    there = {e.node_id: e.pids for e in events(shell, "both", NodePrepared)}
    for pid in there["y"]:
        os.kill(pid, signal.SIGKILL)
    kill_driver(first)
    copied = max(e.copy.step for e in events(shell, "both", CopyStored))
    code, out, err = shell.call("run", name, "--run-name", "both", "--json")
    assert code == 0, err
    found = last_line(out)
    assert (found["steps"], found["samples_exact"]) == (120, True)
    back = found["transitions"][1]
    assert (back["source"], back["digest_ok"]) == ("peer", True)
    assert back["at_step"] >= copied > 0, "the newest copy that was acknowledged"
    pids = {frozenset(e.pids) for e in events(shell, "both", NodePrepared) if e.node_id == "x"}
    assert pids == {frozenset(there["x"])}, "a survivor was restarted"


# on the same nodes with a session of the test's: tests/cluster/backend/test_attach.py
@pytest.mark.whole
def test_without_a_driver_the_workers_save_and_leave(on_cluster: Shell) -> None:
    shell = on_cluster
    name = shell.job(
        steps=100_000, program=str(PROGRAMS / "tiny_slow.py"), durable_every=0, orphan_lease_s=6.0
    )
    first, pids = start_and_wait(shell, name, "orphan", 10)
    storage = open_storage(str(shell.root / "elastic_runs" / "orphan"))
    assert checkpoint_index.find(storage) == []
    kill_driver(first)
    until(
        lambda: not any(processes.started(pid) for pid in pids), "the end of the orphaned workers"
    )
    found = checkpoint_index.find(storage)
    assert len(found) == 1
    assert found[0].meta["orphan"] is True
    assert checkpoint_index.open_checkpoint(found[0].uri).verify() == []
    assert found[0].step >= max(e.step for e in events(shell, "orphan", StepDone))
    assert not names_in(shell, namespace_of(storage.uri)), "an actor of ours is left"


def names_in(shell: Shell, namespace: str) -> list[str]:
    """Names of the living actors of a namespace, asked in a process of its own."""
    code = f"""
import json, logging, ray, ray.util
ray.init(logging_level=logging.ERROR, log_to_driver=False)
actors = ray.util.list_named_actors(all_namespaces=True)
print(json.dumps([actor["name"] for actor in actors if actor["namespace"] == {namespace!r}]))
"""
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **shell.environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    return list(json.loads(out.stdout.strip().splitlines()[-1]))
