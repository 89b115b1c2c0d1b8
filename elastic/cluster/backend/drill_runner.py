"""Carries out drills: lets happen to nodes and workers what the entry says, and reports it with the
names resolved."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.cluster.backend import drills
from elastic.cluster.nodes.providers import NodeProvider
from elastic.cluster.notices.merged_notices import DRILL
from elastic.cluster.workers.worker_group import WorkerGroup
from elastic.config.drill import (
    EACH_OTHER,
    ON_NODES,
    ON_WORKERS,
    PARTITION_S,
    SIDES,
    Scene,
    resolve,
)
from elastic.errors import SpecError
from elastic.types import Action, DrillAsked, Event, Node, Notice, Plan, Pool
from elastic.types.orders import InjectFault, Isolate, WorkerOrder


@dataclass
class DrillRunner:
    """`nodes`: those that stand, kept by the backend. `die`: the driver itself is to be killed,
    once that is written down. `own_code`: the workers train by our code, and can be told to hurt
    themselves; else a script does what it wants."""

    schedule: drills.Schedule
    provider: NodeProvider
    worker_group: WorkerGroup
    nodes: Mapping[str, Node]
    pools: Sequence[Pool]
    own_code: bool = True
    die: bool = False
    _deadlines: dict[str, float] = field(default_factory=dict)

    def at_step(self, step: int, plan: Plan | None, now_s: float) -> list[Event]:
        """What the job's drill has for this step."""
        return [
            event
            for entry in self.schedule.due(step)
            for event in self.carry_out(entry, plan, now_s)
        ]

    def carry_out(self, entry: Mapping[str, Any], plan: Plan | None, now_s: float) -> list[Event]:
        if entry.get("kill_driver"):
            self.die = True
            return [DrillAsked(dict(entry))]
        if entry.get("wrong_layout"):
            return self._wrong_layout(entry)
        if "add" in entry:
            if all(pool.name != entry["add"] for pool in self.pools):
                return [_failed(entry, f"there is no pool '{entry['add']}'")]
            self.provider.change_capacity(entry["add"], 1)
            self.provider.request(entry["add"], 1, f"drill-{time.monotonic_ns()}")
            return [DrillAsked(dict(entry))]
        kind = next(kind for kind in ON_NODES if kind in entry)
        markets = {node_id: self._pool(node_id).market_type for node_id in self.nodes}
        try:
            names = resolve(entry[kind], Scene(plan, markets, frozenset(self._deadlines)))
        except SpecError as error:
            return [DrillAsked({**entry, "error": str(error)})]
        entry = {**entry, kind: list(names)}
        events: list[Event] = [DrillAsked(entry)]
        for node_id in names:
            if kind in ON_WORKERS:
                events += self._inject(node_id, kind, entry)
            else:
                events += getattr(self, f"_{kind}")(node_id, entry, now_s)
        return events

    def pass_deadlines(self, now_s: float) -> None:
        """Takes the nodes whose time has come, if they are still there."""
        for node_id in [node_id for node_id, at_s in self._deadlines.items() if now_s >= at_s]:
            self._take(node_id)

    def forget(self, node_id: str) -> None:
        self._deadlines.pop(node_id, None)

    def _notice(self, node_id: str, entry: Mapping[str, Any], now_s: float) -> list[Event]:
        self._lower_capacity(node_id)
        at_s = now_s + entry.get("deadline_s", self._pool(node_id).notice_s)
        self._deadlines[node_id] = at_s
        return [Notice(node_id, at_s, DRILL)]

    def _kill(self, node_id: str, entry: Mapping[str, Any], now_s: float) -> list[Event]:
        self._lower_capacity(node_id)
        self._take(node_id)
        return []

    def _hang(self, node_id: str, entry: Mapping[str, Any], now_s: float) -> list[Event]:
        self.worker_group.signal(self.worker_group.workers(node_id), signal.SIGSTOP)
        return []

    def _partition(self, node_id: str, entry: Mapping[str, Any], now_s: float) -> list[Event]:
        """Its workers leave their peers and storage alone, and then this driver them."""
        for_s, sides = entry.get("for_s", PARTITION_S), entry.get("from", SIDES)
        sides = [sides] if isinstance(sides, str) else sides
        nodes, storage, cut = "nodes" in sides, "storage" in sides, False
        if sides == [EACH_OTHER]:  # its workers leave those of the entry's other nodes alone
            others = tuple(name for name in entry["partition"] if name != node_id)
            cut = self._ordered(Isolate(for_s, apart_from=others), node_id)
        elif nodes or storage:
            cut = self._ordered(Isolate(for_s, nodes, storage), node_id)
        if "driver" in sides:
            cut |= self.worker_group.cut(node_id, for_s)
        return [] if cut else [_failed(entry, f"no worker of {node_id} can be cut off")]

    def _wrong_layout(self, entry: Mapping[str, Any]) -> list[Event]:
        """Told to all workers that there are: which of them are in the next layout is not known
        yet."""
        asked = self._ordered(InjectFault("layout"))
        return [DrillAsked(dict(entry)) if asked else _failed(entry, "no worker can be told")]

    def _inject(self, node_id: str, kind: str, entry: Mapping[str, Any]) -> list[Event]:
        """What its workers do to themselves."""
        options = {
            key: entry[key] for key in ("factor", "unit_s", "jitter", "place") if key in entry
        }
        if self._ordered(InjectFault(kind, **options), node_id, entry.get("gpu")):
            return []
        return [_failed(entry, f"no worker of {node_id} can be told to {kind}")]

    def _ordered(self, action: Action, node_id: str | None = None, gpu: int | None = None) -> bool:
        """Of the workers (of that node, with that GPU alone); False = there was none to be told."""
        told = [
            self.worker_group.order(worker, WorkerOrder(action))
            for worker in self.worker_group.workers(node_id)
            if self.own_code and gpu in (None, worker.local_rank)
        ]
        return any(told)

    def _lower_capacity(self, node_id: str) -> None:
        if node_id not in self._deadlines:  # else the notice has done it
            self.provider.change_capacity(self.nodes[node_id].pool, -1)

    def _take(self, node_id: str) -> None:
        self._deadlines.pop(node_id, None)
        pids = [
            pid for pid in map(self.worker_group.pid, self.worker_group.workers(node_id)) if pid
        ]
        self.provider.kill(node_id, pids)

    def _pool(self, node_id: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == self.nodes[node_id].pool)


def _failed(entry: Mapping[str, Any], why: str) -> DrillAsked:
    return DrillAsked({**entry, "error": f"drill: {why}"})
