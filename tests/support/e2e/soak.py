"""A run on a Ray cluster to which capacity events happen by chance, and what must not be left of it
afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from support.e2e.runs import MARK, SLOW, processes

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import processes as of_machine
from elastic.ledger.journal import Line, parse_line
from elastic.types import DrainNode, EnterPlan, NodeLost, NodePrepared, Plan, PlanEntered, StepDone

Kind = Literal["notice", "withdrawn", "node", "raylet", "worker", "stop", "add"]
KINDS: list[Kind] = [
    "notice",
    "notice",
    "withdrawn",
    "withdrawn",
    "node",
    "raylet",
    "worker",
    "worker",
    "stop",
    "add",
    "add",
]
NODES_LEAST, NODES_FIRST, NODES_MOST = 1, 4, 6
# steps after the last event, and for each that has to wait: steps are slow then
TAIL, WAITING = 20, 6
WORKERS_MOST = 3  # of a node, until the policy calls it worn out
NEXT_PLAN_STEPS = 8  # an event that waits for a transition waits no longer
LOOK_S = 0.02
START_MOST_S = 180.0


@dataclass(frozen=True)
class Happening:
    """`after`: steps since the one before; 0 = together with it. `in_plan`: it waits for a plan
    that is ordered and not yet entered. `pick` chooses among the nodes that stand; `seconds`: until
    the node is taken, or the notice withdrawn."""

    kind: Kind
    after: int
    in_plan: bool
    pick: int
    seconds: float


def happenings(seed: int, n: int) -> list[Happening]:
    chance = Random(seed)
    found = []
    for _ in range(n):
        kind = chance.choice(KINDS)
        seconds = chance.uniform(0.3, 4.0) if kind == "withdrawn" else chance.uniform(5.0, 14.0)
        after = chance.choice([0, 2, 3, 4, 6, 8])
        found.append(Happening(kind, after, chance.random() < 0.3, chance.randrange(60), seconds))
    return found


def steps_of(script: list[Happening]) -> int:
    return 10 + sum(one.after for one in script) + TAIL + WAITING * len(script)


@dataclass
class Standing:
    """A node that the test started. `workers_hit`: processes that were ended or stopped there."""

    name: str
    file: Path
    raylet: int = 0
    workers_hit: int = 0
    taken_at_s: float | None = None
    back_at_s: float | None = None


@dataclass
class Seen:
    """What the run's journal says so far."""

    journal: Path
    step: int = 0
    plan: Plan | None = None
    entered: int = 0
    pids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    _at_byte: int = 0

    def look(self) -> None:
        if not self.journal.is_file():
            return
        with self.journal.open("rb") as file:
            file.seek(self._at_byte)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at_byte += len(whole)
        for line in whole.decode().splitlines():
            self._take(parse_line(line))

    def _take(self, line: Line) -> None:
        for _, event in line.events:
            if isinstance(event, StepDone):
                self.step = max(self.step, event.step)
            elif isinstance(event, NodePrepared):
                self.pids[event.node_id] = event.pids
            elif isinstance(event, NodeLost):
                self.pids.pop(event.node_id, None)
            elif isinstance(event, PlanEntered):
                self.entered = max(self.entered, event.generation)
        for action in line.decision.actions if line.decision else ():
            if isinstance(action, EnterPlan):
                self.plan = action.plan
            elif isinstance(action, DrainNode):
                self.drained.add(action.node_id)

    @property
    def in_transition(self) -> bool:
        return self.plan is not None and self.plan.generation > self.entered > 0


class Chance(threading.Thread):
    """Lets the script happen to the cluster while the run continues. `played`: what was done, for a
    person."""

    def __init__(
        self, cluster: LocalCluster, folder: Path, journal: Path, script: list[Happening]
    ) -> None:
        super().__init__(name="chance", daemon=True)
        self.cluster, self.folder, self.script = cluster, folder, list(script)
        self.seen, self.slow = Seen(journal), folder / "slow"
        self.nodes: dict[str, Standing] = {}
        self.coming: dict[str, Any] = {}
        self.played: list[str] = []
        self.ended = threading.Event()
        self.error = ""
        self._count = 0
        self._due = 10

    def add(self) -> None:
        name = f"n{self._count}"
        self._count += 1
        file = self.folder / f"{name}.notice"
        labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
        environment = {"ELASTIC_NOTICE_FILE": str(file)}
        self.coming[name] = (
            Standing(name, file),
            self.cluster.add(NodeOrder(name, 1, labels, environment=environment)),
        )

    def arrived(self, wait_s: float = 0.0) -> None:
        for name, (node, answer) in list(self.coming.items()):
            if wait_s or answer.done():
                node.raylet = answer.result(wait_s or 1.0)["pid"]
                self.nodes[name] = node
                del self.coming[name]

    def run(self) -> None:
        try:
            while not self.ended.wait(LOOK_S):
                self.arrived()
                self.seen.look()
                self._pass_deadlines()
                self._play()
        except Exception as error:  # noqa: BLE001 - told to the test
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.slow.unlink(missing_ok=True)

    def close(self) -> None:
        self.ended.set()
        self.join()
        self.arrived(START_MOST_S)

    def _play(self) -> None:
        while self.script and self.seen.step >= self._due + self.script[0].after:
            one = self.script[0]
            waits_for_plan = one.in_plan and not self.seen.in_transition
            if waits_for_plan and self.seen.step < self._due + one.after + NEXT_PLAN_STEPS:
                break
            if not self._can(one):
                self.slow.touch()
                return
            self.script.pop(0)
            self._due += one.after
            self._do(one)
            self._replace()
        self.slow.unlink(missing_ok=True)

    def _can(self, one: Happening) -> bool:
        """Enough nodes stay; else the event waits for others."""
        return one.kind == "add" or len(self._whole()) > NODES_LEAST

    def _replace(self) -> None:
        """Nodes that are gone, or soon will be."""
        while len(self._whole(prepared=False)) + len(self.coming) < NODES_FIRST:
            self.add()

    def _whole(self, prepared: bool = True) -> list[Standing]:
        """Nodes to which something can happen: nobody is about to take them."""
        return [
            node
            for node in self.nodes.values()
            if node.taken_at_s is None
            and node.name not in self.seen.drained
            and (node.name in self.seen.pids or not prepared)
        ]

    def _do(self, one: Happening) -> None:
        if one.kind == "add":
            if len(self.nodes) + len(self.coming) < NODES_MOST:
                self._say(one, "a node")
                self.add()
            return
        whole = self._whole()
        node = whole[one.pick % len(whole)]
        kind: str = one.kind
        if kind in ("worker", "stop"):
            node.workers_hit += 1
            kind = kind if node.workers_hit <= WORKERS_MOST else "node"
        self._say(one, f"{node.name} {kind}")
        if kind in ("notice", "withdrawn"):
            node.file.write_text(f"{max(one.seconds, 9.0):.1f}")
            at_s = time.monotonic() + one.seconds
            node.taken_at_s, node.back_at_s = (
                (at_s, None) if kind == "notice" else (at_s + 12.0, at_s)
            )
        elif kind in ("worker", "stop"):
            number = signal.SIGKILL if kind == "worker" else signal.SIGSTOP
            of_machine.send(self.seen.pids[node.name], number)
        else:
            self._take(node, raylet_alone=kind == "raylet")

    def _take(self, node: Standing, raylet_alone: bool = False) -> None:
        del self.nodes[node.name]
        if raylet_alone:
            of_machine.send([node.raylet])
        else:
            self.cluster.kill(node.name)

    def _pass_deadlines(self) -> None:
        now_s = time.monotonic()
        for node in list(self.nodes.values()):
            if node.back_at_s is not None and now_s >= node.back_at_s:
                node.file.unlink()
                node.back_at_s = None
                # else it stays
                node.taken_at_s = None if node.name not in self.seen.drained else node.taken_at_s
            if node.taken_at_s is not None and now_s >= node.taken_at_s:
                self._take(node)

    def _say(self, one: Happening, what: str) -> None:
        when = " in a transition" if self.seen.in_transition else ""
        self.played.append(
            f"step {self.seen.step}{when}: {what}"
            + (" with the one before" if one.after == 0 else "")
        )


# ------------------------------------------------------------------------------------- what is left


@dataclass
class Before:
    """What this machine had before the run. `mark`: in the environment of all that the run
    starts."""

    mark: str
    temp: Path
    shared: frozenset[str] = frozenset()

    @classmethod
    def now(cls, mark: str, temp: Path) -> Before:
        return cls(mark, temp, frozenset(os.listdir("/dev/shm")))

    def left_on_cluster(
        self, cluster: LocalCluster, stay: set[str], drained: frozenset[str] = frozenset()
    ) -> list[str]:
        """Of a run that is over, on a cluster that continues: nodes beyond `stay`, actors, their
        processes, placement groups. Who was `drained` (a notice may be taken back a moment too late
        for that) need not be there any more."""
        import ray

        from elastic.cluster.nodes.providers import NODE_LABEL, living

        cluster.connect("looks")
        try:
            there = {node.labels.get(NODE_LABEL, node.ray_id) for node in living() if not node.head}
            found = [f"node {name} is left" for name in there - stay] + [
                f"node {name} is gone" for name in stay - there - drained
            ]
            found += [
                f"actor {a['namespace']}/{a['name']}"
                for a in ray.util.list_named_actors(all_namespaces=True)
            ]
            groups = ray.util.placement_group_table().values()
            found += [
                f"placement group {group['name']}"
                for group in groups
                if group["state"] != "REMOVED"
            ]
        finally:
            cluster.disconnect()
        titles = {
            pid: " ".join(of_machine.command(pid)).strip()
            for pid in of_machine.descendants(cluster.pid)
        }
        return found + [
            f"{title} ({pid})"
            for pid, title in titles.items()
            if title.startswith("ray::") and "IDLE" not in title
        ]

    def left_on_machine(self) -> list[str]:
        """Of a cluster that was ended: processes, temporary folders, shared memory that no living
        process has."""
        found = [
            f"process {pid}: {' '.join(of_machine.command(pid))[:120]}"
            for pid in processes(self.mark)
        ]
        found += [f"temporary {path}" for path in self.temp.iterdir()]
        return found + [f"shared memory {name}" for name in self.left_in_memory()]

    def left_in_memory(self) -> list[str]:
        """Names that are new in /dev/shm, of files that no living process has."""
        new = set(os.listdir("/dev/shm")) - self.shared
        return [name for name in sorted(new) if not _used(f"/dev/shm/{name}")]


def _used(path: str) -> bool:
    """A living process has the file open or mapped; or it is gone meanwhile. The maker of a
    semaphore has it mapped under a name that it had before."""
    try:
        inode = str(os.stat(path).st_ino)
    except FileNotFoundError:
        return True
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            mapped = Path(f"/proc/{name}/maps").read_text().splitlines()
            if any("/dev/shm/" in line and line.split()[4] == inode for line in mapped):
                return True
        with suppress(OSError):
            if any(
                os.readlink(f"/proc/{name}/fd/{fd}") == path
                for fd in os.listdir(f"/proc/{name}/fd")
            ):
                return True
    return not os.path.exists(path)


__all__ = [
    "MARK",
    "NODES_FIRST",
    "SLOW",
    "START_MOST_S",
    "Before",
    "Chance",
    "happenings",
    "steps_of",
]
