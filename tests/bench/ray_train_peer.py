"""Ray Train's run on several real Ray nodes of this machine, what happens to its nodes, and the end
of all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray_train_figures
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray_train_figures import PIDS, SAVE_EVERY, STEPS, Change, Done, Length
from trial import LOOK_S, PROGRAM, Clock, Failed

from elastic.cluster.local.local_cluster import HOST, STORE_BYTES
from elastic.cluster.ray import processes

JOB = Path(__file__).resolve().parent / "ray_train_job.py"
# the event comes half-way between two checkpoints
MIDDLE = range(SAVE_EVERY // 2 - 1, SAVE_EVERY // 2 + 2)
NOTICE_S = 30.0
AFTER_STEPS = 3
WORDS = 1500  # of a log, into an error


def progress(words: str) -> None:
    print(f"ray_train: {words}", file=sys.stderr, flush=True)


@dataclass
class Peer:
    """`folder`: sockets, logs, checkpoints. The cluster is Ray's own, with all its defaults."""

    folder: Path
    clock: Clock
    process: subprocess.Popen[bytes] | None = None
    raylets: dict[str, int] = field(default_factory=dict)  # Ray node id -> pid
    lines: list[str] = field(default_factory=list)
    at_byte: int = 0

    def __post_init__(self) -> None:
        (self.folder / "ray").mkdir()
        self.cluster = Cluster()
        self._start({"num_cpus": 0, "include_dashboard": False, "no_monitor": True})

    def _start(self, values: dict[str, Any]) -> Any:
        n = len(self.cluster.list_all_nodes())
        return self.cluster.add_node(
            node_ip_address=HOST, temp_dir=f"{self.folder}/ray", include_log_monitor=False,
            object_store_memory=STORE_BYTES, plasma_store_socket_name=f"{self.folder}/s{n}",
            raylet_socket_name=f"{self.folder}/r{n}", **values,
        )  # fmt: skip

    def add(self) -> None:
        """A node for one worker; returns when it is alive."""
        node = self._start({"num_cpus": 1})
        self.raylets[node.node_id] = node.all_processes["raylet"][0].process.pid

    def train(self, cause: str, length: Length) -> None:
        """Starts the user's script."""
        address = str(self.cluster.address)
        more = [str(n) for n in (min(2, *length.worlds[cause]), max(length.worlds[cause]))]
        more += [] if length.resize_s is None else [str(length.resize_s)]
        with (self.folder / "job.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), address, HOST, str(self.folder), str(PROGRAM), cause,
                *more], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def look(self) -> list[Done]:
        """All steps so far."""
        path = self.folder / STEPS
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self.at_byte)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.at_byte += len(whole)
            self.lines += whole.decode().splitlines()
        return ray_train_figures.finished(self.lines)

    def until(self, holds: Callable[[list[Done]], bool], what: str) -> list[Done]:
        while not holds(steps := self.look()):
            if self.process is not None and self.process.poll() is not None:
                raise Failed(
                    f"{what}: the trainer ended first (exit code {self.process.returncode}): "
                    f"{self.words()}"
                )
            try:
                self.clock.look(what)
            except Failed as error:
                raise Failed(f"{error}: {self.words()}") from error
            self.clock.loads.append(round(os.getloadavg()[0], 2))
            time.sleep(LOOK_S)
        return steps

    def words(self) -> str:
        """The end of what the script and Ray Train's controller wrote."""
        files = [
            self.folder / "job.log",
            *self.folder.glob("ray/session_latest/logs/train/ray-train-app-controller-*.log"),
        ]
        return " ".join(
            file.read_text(errors="replace")[-WORDS:] for file in files if file.is_file()
        )

    def node_of_last_rank(self) -> str:
        """Ray id of the node with the newest group's last worker: rank 0 stays, which is the easier
        case for Ray Train."""
        workers = [json.loads(line) for line in (self.folder / PIDS).read_text().splitlines()]
        pid = max(workers, key=lambda w: (w["group"], w["rank"]))["pid"]
        return next(
            name for name, raylet in self.raylets.items() if pid in processes.descendants(raylet)
        )

    def kill(self, name: str) -> None:
        """SIGKILL for the node's raylet and all below it at once."""
        processes.end_tree(self.raylets.pop(name))

    def drain(self, name: str, deadline_s: float) -> None:
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = GcsClient(address=str(self.cluster.address))
        accepted, why = client.drain_node(name, reason, "spot notice", int(deadline_s * 1000))
        if not accepted:
            raise Failed(f"Ray refused the notice: {why}")


def happen(peer: Peer, cause: str) -> float:
    """Lets it happen; returns when (epoch seconds)."""
    if cause == "growth":
        at_s = time.time()
        peer.add()
        return at_s
    name = peer.node_of_last_rank()
    at_s = time.time()
    if cause == "notice":
        peer.drain(name, at_s + NOTICE_S)
        peer.until(lambda steps: time.time() >= at_s + NOTICE_S - LOOK_S, "the notice's deadline")
        time.sleep(max(0.0, at_s + NOTICE_S - time.time()))
    peer.kill(name)
    return at_s


def run(peer: Peer, cause: str, length: Length) -> Change:
    """One run with one event. Raises Failed when it does not continue within the clock's time."""
    before, after = length.worlds[cause]
    for _ in range(before):
        peer.add()
    progress(f"{before} nodes stand")
    peer.train(cause, length)

    def settled(steps: list[Done]) -> bool:
        newest = steps[-1] if steps else None
        return (
            newest is not None
            and newest.step >= length.settle_steps
            and newest.step % SAVE_EVERY in MIDDLE
        )

    steps = peer.until(settled, f"{length.settle_steps} steps of {before} workers")
    if steps[-1].world != before:
        raise Failed(f"Ray Train began with {steps[-1].world} workers on {before} nodes")
    progress(f"{cause} after step {steps[-1].step}, load {os.getloadavg()[0]:.1f}")
    at_s = happen(peer, cause)

    def goes_on(steps: list[Done]) -> bool:
        new = ray_train_figures.first_after(steps, at_s, after)
        return new is not None and sum(d.group == new.group for d in steps) >= AFTER_STEPS

    steps = peer.until(goes_on, f"a step of {after} workers after {cause}")
    found = ray_train_figures.change(steps, at_s, after)
    progress(f"{found}, load {os.getloadavg()[0]:.1f}")
    return found
