"""The real main path: `elastic.api.run` on Ray nodes, a kill, a growth and a notice while it
trains.

On this host it has nodes of its own, which come and go. On a user's cluster the nodes stay: a kill
ends all worker processes of one node, which are then started again there, and a node with notice is
only left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.certify.checks.fault_checks import CONTENT, LOSS, NONE_LOST
from elastic.certify.harness import child, cluster_place
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Task
from elastic.data.order import digest, digest_text, sample_ids
from elastic.ledger.journal import Line, read
from elastic.ledger.run_folder import RunFolder
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.one_process import losses, program_file, worst_difference
from elastic.storage import Storage, open_storage

NAME, RUN = "main path", "certify"
CPU_NODES = 3
STEPS = 1_000_000  # until it is stopped
PEER_EVERY, IN_FLIGHT, CALM_STEPS = 4, 3, 12
N_SAMPLES = 512  # of programs/small.py
SOON_S = 16  # a notice so short that the node is left at once
LOOK_S, GONE_S = 0.3, 20.0
CAUSES = ("kill", "growth", "notice")
KEPT = Bound(
    "steps_lost",
    "the steps since the last acknowledged peer replica: one every 4 steps, up to 3 more while it "
    "is in flight",
    most=7,
)
FASTER = Bound(
    "pause_vs_start",
    "a change must take less than starting the run did, launch to first step, in the same run",
    most=1.0,
)
SAMPLES = Bound(
    "wrong_samples",
    "each step trains on the samples that seed and step give, whatever the nodes",
    most=0,
)
REPLAY = Bound(
    "decisions_that_differ", "every decision of the run taken again from its journal alone", most=0
)
LEFT = Bound("processes_left", "nothing that the run started may outlive it", most=0)
BOUNDS = {
    "kill": [KEPT, CONTENT, LOSS, FASTER],
    "growth": [NONE_LOST, CONTENT, LOSS, FASTER],
    "notice": [NONE_LOST, CONTENT, LOSS, FASTER],
}


NAMES = (
    *(f"{NAME}: {cause}" for cause in CAUSES),
    f"{NAME}: samples",
    f"{NAME}: replay",
    f"{NAME}: nothing left",
)


def task(lab: Lab) -> Task:
    place = lab.place
    where = (
        place.where
        if place.address
        else f"{sum(p['max_nodes'] for p in pools_of(place))} Ray nodes of its own on this host"
    )
    return Task(NAMES, lambda limit: _work(lab, limit), least_s=60.0, weight=3.5, where=where)


def why_not(place: Place) -> str:
    """Why it cannot be run here; '' = it can."""
    if not place.ray:
        return "without Ray (not installed, or --no-ray)"
    if place.address:
        return (
            ""
            if len(place.nodes) > 1
            else "it needs two nodes of the cluster at least; --local runs it on this host's own"
        )
    return (
        "nodes that join and leave need two GPUs at least; --gpus 0 runs it on the CPU"
        if place.kind == "one-gpu"
        else ""
    )


def _work(lab: Lab, limit: Limit) -> Iterator[Check]:
    lab.drop()  # its processes take no time from the run
    place = lab.place
    with lab.room() as (name, storage):
        pools = cluster_place.pools(place) if place.address else pools_of(place)
        # not on nodes of its own: Ray would start a cluster for whoever asks it without being
        # connected
        where = Where(
            name, storage, place.address, cluster_place.world(place), connected=bool(place.address)
        )
        trial = Trial(lab.folder / "main-path", pools, limit, where)
        try:
            summary = trial.go()
        finally:
            left = trial.end()
        steps, lines = trial.curve(), read(trial.journal)
    job = {
        "seed": trial.job["seed"],
        "global_batch": GLOBAL_BATCH,
        "clip_grad_norm": trial.job["clip_grad_norm"],
    }
    alone = losses("unpaced", job, max(steps), limit=limit)
    worst = worst_difference({step: loss for step, (loss, _) in steps.items()}, alone)
    yield from judged(summary, worst)
    figures = {
        "steps": max(steps),
        "wrong_samples": wrong_samples({s: d for s, (_, d) in steps.items()}, int(job["seed"])),
    }
    yield judge(f"{NAME}: samples", figures, [SAMPLES])
    yield replayed(lines)
    yield judge(
        f"{NAME}: nothing left",
        {"processes_left": len(left), "processes_seen": len(trial.seen)},
        [LEFT],
    )


def pools_of(place: Place) -> list[dict[str, Any]]:
    """One worker a node: all but one node may leave."""
    n = place.ranks if place.gpus else min(CPU_NODES, place.ranks)
    kind = {"accelerator_type": "GPU" if place.gpus else "CPU", "gpus_per_node": 1}
    return [
        {"name": "spot", "market_type": "spot", "max_nodes": n - 1, "notice_s": 20, **kind},
        {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1, **kind},
    ]


def judged(summary: Mapping[str, Any], worst: float) -> Iterator[Check]:
    """The checks of kill, growth and notice, from the summary of the run."""
    start_s = float(summary["launch_to_first_step_s"] or float("nan"))
    causes = {"kill": "loss", "growth": "growth", "notice": "notice"}
    for name in CAUSES:
        found = [t for t in summary["transitions"] if t["cause"] == causes[name]]
        if len(found) != 1:
            had = [t["cause"] for t in summary["transitions"]]
            raise Failed(f"one transition by {name} was expected; the run's transitions were {had}")
        one = found[0]
        figures = {
            "pause_s": one["pause_s"], "steps_lost": one["steps_lost"],
            "content_equal": int(one["digest_ok"] is True), "worst_loss_difference": worst,
            "launch_to_first_step_s": start_s, "pause_vs_start": one["pause_s"] / start_s,
            "source": one["source"], "bytes_moved": one["bytes_moved"],
        }  # fmt: skip
        yield judge(f"{NAME}: {name}", figures, BOUNDS[name])


def wrong_samples(digests: Mapping[int, str], seed: int) -> int:
    """How many of the steps 1 .. last were not done, or not on exactly their own samples."""
    wanted = {
        step: digest_text(digest(sample_ids(N_SAMPLES, GLOBAL_BATCH, seed, step=step - 1)))
        for step in range(1, max(digests, default=0) + 1)
    }
    return sum(digests.get(step) != text for step, text in wanted.items())


def replayed(lines: Iterable[Line]) -> Check:
    """All decisions replayed from the journal, without a cluster."""
    from elastic.sim.replay import replay

    found = replay(lines)
    figures = {"decisions": found.n_decisions, "decisions_that_differ": int(not found.identical)}
    return judge(f"{NAME}: replay", figures, [REPLAY])


@dataclass(frozen=True)
class Where:
    """Name and storage of the run; on a Ray cluster that was there its `address` and how many ranks
    all of its nodes have.

    `connected`: this process is, too, and can look whether an actor is left. `environment`: of the
    driver, over this one's.
    """

    name: str = RUN
    storage: str = ""
    address: str = ""
    world: int = 0
    connected: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


TRAINS = {
    "steps": STEPS, "global_batch": GLOBAL_BATCH, "seed": 7, "clip_grad_norm": 1.0,
    "peer_every": PEER_EVERY, "durable_every": 0,
}  # fmt: skip


@dataclass
class Trial:
    """The run, watched through its journal. `way`: what it trains, as keys of its job."""

    folder: Path
    pools: list[dict[str, Any]]
    limit: Limit
    where: Where = field(default_factory=Where)
    way: Mapping[str, Any] = field(
        default_factory=lambda: {**TRAINS, "program": program_file("paced")}
    )
    process: subprocess.Popen[str] | None = None
    # pid -> start time of every process below it
    seen: dict[int, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)  # of all workers that there were
    first_pids: set[int] = field(default_factory=set)  # when the first driver was killed
    worlds: dict[int, int] = field(default_factory=dict)  # generation -> ranks
    # generation, step, loss, digest
    steps: list[tuple[int, int, float, str]] = field(default_factory=list)
    at_byte: int = 0

    @property
    def job(self) -> dict[str, Any]:
        return {**self.way, "name": self.where.name, "pools": self.pools, "storage": self.storage}

    @property
    def storage(self) -> str:
        return self.where.storage or str(self.folder / "runs")

    @property
    def run(self) -> Storage:
        return open_storage(f"{self.storage}/{self.where.name}")

    @property
    def journal(self) -> Path:
        """On this host, wherever the storage is."""
        return RunFolder.of(self.run).journal

    def go(self) -> dict[str, Any]:
        """Start, kill, growth, notice, stop; the run's summary."""
        self._start()
        if self.where.address:
            self._on_a_cluster(self.where.world)
        else:
            self._on_own_nodes(sum(int(pool["max_nodes"]) for pool in self.pools))
        return self._stopped()

    def without_driver(self) -> float:
        """Start; SIGKILL of the driver; the next one of the same run. Seconds from the kill to a
        new step in the journal."""
        self._start()
        self._calm(self.where.world)
        assert self.process is not None
        self.first_pids = set(self.pids)
        killed_s = time.monotonic()
        self.process.kill()
        self.process.wait()
        self._read()  # what it had written since the last look
        last = max(step for _, step, _, _ in self.steps)
        self._start()
        self._until(
            lambda: max(step for _, step, _, _ in self.steps) > last,
            "the next driver hears of a new step",
        )
        return time.monotonic() - killed_s

    def notice_and_stop(self) -> dict[str, Any]:
        """The run's summary."""
        self._calm(self.where.world)
        self._drill("notice=any", f"deadline_s={SOON_S}")
        return self._fewer_then_stopped("the node without notice trains")

    def kill_and_stop(self) -> dict[str, Any]:
        """Start, kill of a node, stop; the run's summary."""
        self._start()
        self._calm(self.where.world)
        self._drill("kill=any")
        return self._fewer_then_stopped("the node that is left trains")

    def _fewer_then_stopped(self, what: str) -> dict[str, Any]:
        self._until(lambda: self._newest() < self.where.world and self._is_calm(), what)
        return self._stopped()

    def _stopped(self) -> dict[str, Any]:
        self._order("stop")
        self._until(
            lambda: self.process is not None and self.process.poll() is not None, "the run stopped"
        )
        text = (self.folder / "out.log").read_text()
        found = [line for line in text.splitlines() if line.startswith("{")]
        if not found:
            raise Failed(f"the run printed no summary: {self._tail()}")
        return dict(json.loads(found[-1]))

    def _on_own_nodes(self, world: int) -> None:
        self._calm(world)
        for after, words in (
            (world - 1, "kill=any-spot"),
            (world, "add=spot"),
            (world - 1, "notice=any-spot"),
        ):
            self._drill(words)
            self._calm(after)

    def _on_a_cluster(self, world: int) -> None:
        """The processes that were killed are started again on their node: that is the growth."""
        self._calm(world)
        self._drill("kill=any")
        self._until(lambda: self._fewer(world), "the processes that are left train")
        self._calm(world)
        self._drill("notice=any")
        self._until(
            lambda: self._newest() < world and self._is_calm(), "the nodes without notice train"
        )

    def curve(self) -> dict[int, tuple[float, str]]:
        """Loss and sample digest of each step, as it was done last."""
        return {
            step: (loss, digest)
            for _, step, loss, digest in sorted(self.steps, key=lambda one: one[0])
        }

    def end(self) -> list[int | str]:
        """Ends the run, whatever it does; the pids, and on a cluster the actors, that did not end
        by themselves."""
        from elastic.cluster.ray import processes

        if self.process is None:
            return []
        self._look_at_processes()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end_s = time.monotonic() + GONE_S
        while (
            left := [pid for pid, at in self.seen.items() if processes.started(pid) == at]
        ) and time.monotonic() < end_s:
            time.sleep(0.1)
        processes.send(left)
        return [*left, *self._actors_left(end_s)]

    def _actors_left(self, end_s: float) -> list[str]:
        if not self.where.connected:
            return []
        from elastic.cluster.backend.ray_run import namespace_of
        from elastic.cluster.workers import remote_processes

        namespace = namespace_of(self.run.uri)
        while (left := remote_processes.actors_left(namespace)) and time.monotonic() < end_s:
            time.sleep(0.1)
        remote_processes.end_actors(namespace)
        return left

    # -------------------------------------------------------------------------------------- the run

    def _start(self) -> None:
        job = self.folder / "job"
        job.mkdir(parents=True, exist_ok=True)
        (job / "job.yaml").write_text(json.dumps(self.job))  # JSON is YAML
        with (self.folder / "out.log").open("w") as out, (self.folder / "err.log").open("w") as err:
            words = [
                "elastic.certify.checks.main_path_process",
                str(job),
                self.where.name,
                self.where.address,
            ]
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                text=True, env=child.environment_of(self.where.environment), start_new_session=True,
            )  # fmt: skip

    def _drill(self, *words: str) -> None:
        from elastic import api

        api.drill(self.run, words)

    def _order(self, what: str) -> None:
        from elastic import api

        api.stop(self.run, f"certify has seen what it wanted: {what}")

    def _calm(self, world: int) -> None:
        """Waits until the newest generation has that many ranks and has done some steps."""
        self._until(lambda: self._newest() == world and self._is_calm(), f"{world} workers train")

    def _newest(self) -> int:
        """Ranks of the newest generation."""
        return self.worlds.get(max(self.worlds, default=0), 0)

    def _is_calm(self) -> bool:
        newest = max(self.worlds, default=0)
        return sum(1 for generation, _, _, _ in self.steps if generation == newest) >= CALM_STEPS

    def _fewer(self, world: int) -> bool:
        """Has a generation of less ranks done a step?"""
        return any(self.worlds.get(generation, world) < world for generation, _, _, _ in self.steps)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        while not holds():
            self.limit.look(what)
            ended = self.process is not None and self.process.poll() is not None
            self._read()
            self._look_at_processes()
            if ended and not holds():
                raise Failed(f"while waiting for '{what}': the run ended: {self._tail()}")
            time.sleep(LOOK_S)

    def _tail(self) -> str:
        return " ".join((self.folder / "err.log").read_text(errors="replace")[-1200:].split())

    def _look_at_processes(self) -> None:
        from elastic.cluster.ray import processes

        if self.process is not None:
            for pid in (self.process.pid, *processes.descendants(self.process.pid)):
                started = processes.started(pid)
                if started is not None:
                    self.seen[pid] = started

    def _read(self) -> None:
        """What is new in the journal, in whole lines; plain JSON, so that the watcher costs
        little."""
        journal = self.journal
        if not journal.is_file():
            return
        with journal.open("rb") as file:
            file.seek(self.at_byte)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at_byte += len(whole)
        self.take(json.loads(line) for line in whole.splitlines() if line)

    def take(self, lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
        for line in lines:
            for _, event in line["events"]:
                if event["kind"] == "NodePrepared":
                    self.pids |= set(event["pids"])
                if event["kind"] == "StepDone":
                    self.steps.append(
                        (event["generation"], event["step"], event["train_loss"], event["digest"])
                    )
            for action in (line.get("decision") or {}).get("actions", ()):
                if action["kind"] == "EnterPlan":
                    self.worlds[action["plan"]["generation"]] = len(action["plan"]["ranks"])
