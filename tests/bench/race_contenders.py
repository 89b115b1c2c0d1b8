"""The ways through the race, each with its nodes on this machine: elastic, a script that elastic
restarts, Ray Train, torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from race_figures import Done, finished
from trial import LEFT_OUT, ROOT, Clock, Failed, Trial

from elastic.cluster.local.local_cluster import HOST
from elastic.cluster.ray import processes
from elastic.types import EnterPlan, NodeLost, NodeReady, StepDone

JOB = Path(__file__).resolve().parent / "race_job"
STEPS = "steps.jsonl"
NEWEST = 16  # lines: some steps of all workers
WORDS = 1500  # of a log, into an error
# as a user would tune it for losses; the defaults (2, 60, 5) are measured by ray_train.py
RAY_TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}  # fmt: skip
TORCHRUN_SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it no loss is survived
RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=600"
)


@dataclass(frozen=True)
class Length:
    """How far the race goes, and with how many workers: `world` at the start, not fewer than
    `least`."""

    steps: int
    save_every: int
    world: int = 4
    least: int = 2


class Contender(Protocol):
    """`nodes`: (at_s, how many stand since then)."""

    nodes: list[tuple[float, int]]

    def start(self) -> None: ...
    def done(self) -> int:
        """The newest step."""

    def ended(self) -> bool: ...
    def kill(self) -> None: ...
    def notice(self, deadline_s: float) -> None:
        """From now on; the node goes at the deadline, by itself or by `gone`."""

    def gone(self) -> None: ...
    def add(self) -> None: ...
    def steps(self) -> Sequence[Done]: ...
    def end(self) -> None: ...
    def words(self) -> str: ...


def counted(nodes: list[tuple[float, int]], by: int) -> None:
    """There are `by` more from now on."""
    nodes.append((time.time(), (nodes[-1][1] if nodes else 0) + by))


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    paths = (str(ROOT), str(JOB), str(JOB.parent))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def common(length: Length, usd_per_node_h: float) -> dict[str, Any]:
    """Keys of both jobs of elastic: one on-demand node, the others spot."""
    pool = {"usd_per_node_h": usd_per_node_h, "notice_s": 30}
    return {
        "name": "race", "min_workers": length.least, "budget_usd": 1e6, "pools": [
            {"name": "spot", "market_type": "spot", "max_nodes": length.world - 1, **pool},
            {"name": "on-demand", "market_type": "on-demand", "max_nodes": 1, **pool},
        ],
    }  # fmt: skip


class Drilled:
    """What happens to the nodes of a run of elastic: drills, as a user would give them."""

    trial: Trial
    length: Length
    nodes: list[tuple[float, int]]

    def start(self) -> None:
        counted(self.nodes, self.length.world)
        self.trial.start()

    def ended(self) -> bool:
        return self.trial.process is not None and self.trial.process.poll() is not None

    def kill(self) -> None:
        self.trial.drill("kill=any-spot")

    def notice(self, deadline_s: float) -> None:
        self.trial.drill("notice=any-spot", f"deadline_s={deadline_s:.0f}")

    def gone(self) -> None:
        """The drill takes it by itself, at the deadline."""

    def add(self) -> None:
        self.trial.drill("add=spot")

    def end(self) -> None:
        self.trial.end()

    def words(self) -> str:
        log = self.trial.folder / "run.log"
        return log.read_text(errors="replace")[-WORDS:] if log.is_file() else ""

    def came_and_went(self, steps: Sequence[Done]) -> Sequence[Done]:
        """Notes when each node came and went, by the journal, until the last of the steps; returns
        the steps until then."""
        for line in self.trial.lines():
            for at_s, event in line.events:
                if isinstance(event, NodeLost) or (
                    isinstance(event, NodeReady) and steps and at_s > steps[0].at_s
                ):
                    self.nodes.append(
                        (at_s, self.nodes[-1][1] + (1 if isinstance(event, NodeReady) else -1))
                    )
        last = next(
            (i for i, done in enumerate(steps) if done.step == self.length.steps), len(steps) - 1
        )
        self.nodes[:] = [entry for entry in self.nodes if entry[0] <= steps[last].at_s]
        return steps[: last + 1]


@dataclass
class Elastic(Drilled):
    folder: Path
    length: Length
    clock: Clock
    usd_per_node_h: float
    nodes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.length.world
        layout = {n: f"dp_replicate={n}" if n > 1 else "dp_shard=1" for n in range(1, world + 1)}
        job = {
            **common(self.length, self.usd_per_node_h), "program": str(JOB / "program.py"),
            "steps": self.length.steps, "global_batch": 12, "seed": 1, "layout": layout,
            "durable_every": self.length.save_every,
        }  # fmt: skip
        self.trial = Trial(self.folder, job, self.clock)

    def done(self) -> int:
        self.trial.look()
        self.trial.trees[-1].look()
        return max((step for _, step, _ in self.trial.steps), default=0)

    def steps(self) -> Sequence[Done]:
        worlds: dict[int, int] = {}
        found: list[Done] = []
        for line in self.trial.lines():
            found += [
                Done(event.generation, worlds[event.generation], event.step, at_s, event.train_loss)
                for at_s, event in line.events
                if isinstance(event, StepDone)
            ]
            for action in line.decision.actions if line.decision else ():
                if isinstance(action, EnterPlan):
                    worlds[action.plan.generation] = len(action.plan.ranks)
        return self.came_and_went(found)


@dataclass
class Marked:
    """What all have in common that run peer.py: the lines that it writes."""

    folder: Path
    length: Length
    clock: Clock
    nodes: list[tuple[float, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    at_byte: int = 0
    leaving: Any = None

    def look(self) -> None:
        path = self.folder / STEPS
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self.at_byte)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.at_byte += len(whole)
            self.lines += whole.decode().splitlines()

    def done(self) -> int:
        self.look()
        return max((json.loads(line)["step"] for line in self.lines[-NEWEST:]), default=0)

    def steps(self) -> Sequence[Done]:
        self.look()
        return finished(self.lines)

    def of_last_rank(self, roots: dict[Any, int]) -> Any:
        """The node below whose process the newest group's last rank runs; the newest node where
        there is none now. Rank 0's stays, which is the easier case for both."""
        marks = [json.loads(line) for line in self.lines[-NEWEST:]]
        pid = max(marks, key=lambda mark: (mark["group"], mark["rank"]))["pid"] if marks else 0
        return next(
            (name for name, root in roots.items() if pid in processes.descendants(root)),
            list(roots)[-1],
        )

    def words(self) -> str:
        logs = [file for file in self.folder.rglob("*.log") if file.is_file()]
        newest = sorted(logs, key=lambda file: file.stat().st_mtime)[-3:]
        return " ".join(file.read_text(errors="replace")[-WORDS // 3 :] for file in newest)


@dataclass
class Torchrun(Marked):
    """A node is an agent. The store where they meet stands in this process, which nobody kills."""

    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0
    store: Any = None
    n_started: int = 0

    def start(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        counted(self.nodes, self.length.world)
        for _ in range(self.length.world):
            self._agent()

    def _agent(self) -> None:
        self.n_started += 1
        words = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={self.length.least}:{self.length.world}", "--nproc-per-node=1",
            "--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=race", f"--rdzv-conf={RENDEZVOUS}", "--local-addr=127.0.0.1",
            str(JOB / "peer.py"), str(self.folder), str(self.length.steps),
            str(self.length.save_every),
        ]  # fmt: skip
        with (self.folder / f"agent{self.n_started}.log").open("ab") as log:
            self.agents[self.n_started] = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=environment() | TORCHRUN_SETTINGS,
            )  # fmt: skip

    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents.values())

    def _roots(self) -> dict[Any, int]:
        return {name: agent.pid for name, agent in self.agents.items() if agent.poll() is None}

    def kill(self) -> None:
        self._take(self.of_last_rank(self._roots()))

    def _take(self, name: int) -> None:
        agent = self.agents.pop(name)
        processes.end_tree(agent.pid)
        agent.wait()
        counted(self.nodes, -1)

    def notice(self, deadline_s: float) -> None:
        """What a watcher on the node does: SIGTERM to the agent, which passes it on."""
        self.leaving = self.of_last_rank(self._roots())
        self.agents[self.leaving].send_signal(signal.SIGTERM)

    def gone(self) -> None:
        self._take(self.leaving)

    def add(self) -> None:
        counted(self.nodes, 1)
        self._agent()

    def end(self) -> None:
        for agent in self.agents.values():
            processes.end_tree(agent.pid)
            agent.wait()


@dataclass
class RayTrain(Marked):
    """Real raylets of one worker each, and a head, with Ray's own defaults."""

    peer: Any = None

    def start(self) -> None:
        from ray_train_peer import Peer  # imports Ray

        counted(self.nodes, self.length.world)
        os.environ |= RAY_TRAIN_SETTINGS
        self.peer = Peer(self.folder, self.clock)
        for _ in range(self.length.world):
            self.peer.add()
        words = [
            sys.executable,
            str(JOB / "ray_peer.py"),
            str(self.peer.cluster.address),
            HOST,
            str(self.folder),
        ]
        with (self.folder / "job.log").open("ab") as log:
            self.peer.process = subprocess.Popen(
                [*words, *map(str, (self.length.steps, self.length.save_every, self.length.least,
                self.length.world))], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=environment() | RAY_TRAIN_SETTINGS,
            )  # fmt: skip

    def ended(self) -> bool:
        return self.peer.process.poll() is not None

    def kill(self) -> None:
        self.peer.kill(self.of_last_rank(self.peer.raylets))
        counted(self.nodes, -1)

    def notice(self, deadline_s: float) -> None:
        self.leaving = self.of_last_rank(self.peer.raylets)
        self.peer.drain(self.leaving, time.time() + deadline_s)

    def gone(self) -> None:
        self.peer.kill(self.leaving)
        counted(self.nodes, -1)

    def add(self) -> None:
        self.peer.add()
        counted(self.nodes, 1)

    def end(self) -> None:
        if self.peer is not None and self.peer.process is not None:
            self.peer.process.kill()
            self.peer.process.wait()


@dataclass
class Script(Drilled, Marked):
    """The file that torchrun runs, unchanged, under `elastic run --script`, which restarts it."""

    usd_per_node_h: float = 0.0

    def __post_init__(self) -> None:
        script = (
            "--script", str(JOB / "peer.py"), "--", str(self.folder), str(self.length.steps),
            str(self.length.save_every),
        )  # fmt: skip
        job = {**common(self.length, self.usd_per_node_h), "program": None}
        self.trial = Trial(self.folder, job, self.clock, script)

    def done(self) -> int:
        self.trial.trees[-1].look()
        return super().done()

    def steps(self) -> Sequence[Done]:
        return self.came_and_went(super().steps())


def contender(
    name: str, folder: Path, length: Length, clock: Clock, usd_per_node_h: float
) -> Contender:
    if name == "elastic":
        return Elastic(folder, length, clock, usd_per_node_h)
    if name == "script":
        return Script(folder, length, clock, usd_per_node_h=usd_per_node_h)
    kinds: dict[str, Callable[[Path, Length, Clock], Contender]] = {
        "ray_train": RayTrain,
        "torchrun": Torchrun,
    }
    if name not in kinds:
        raise Failed(f"'{name}' does not take part")
    return kinds[name](folder, length, clock)
