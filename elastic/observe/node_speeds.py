"""What a person sees of the nodes' speeds: relative ones, samples of a step, and why a node is slow
or was quarantined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastic.policy.state.fold import Change
from elastic.types import (
    Decided,
    DeviceNoted,
    Node,
    NodeLost,
    NodeReady,
    Plan,
    Quarantine,
    RanksTimed,
    StepDone,
    WorkerId,
)
from elastic.types.grid import coordinates
from elastic.types.rank_timing import times_slower, unlike_stages

SLOW = 0.8  # of the speed of the faster ones: worth a line
ALIKE = 0.05


@dataclass
class NodeSpeeds:
    """Seconds per unit of work as last told, what GPUs say of themselves, and why nodes were
    quarantined."""

    unit_s: dict[WorkerId, float] = field(default_factory=dict)
    notes: dict[WorkerId, str] = field(default_factory=dict)
    aside: dict[str, str] = field(default_factory=dict)
    places: dict[WorkerId, int] = field(default_factory=dict)  # see unlike_stages

    def take(self, change: Change, plan: Plan | None) -> None:
        """`plan`: that was entered last."""
        match event := change.event:
            case StepDone():  # nearly all that there are
                pass
            case RanksTimed() if plan is not None and plan.generation == event.generation:
                told = zip(plan.ranks, event.unit_s)
                self.unit_s |= {worker: unit_s for worker, unit_s in told if unit_s > 0}
                self.places = unlike_stages(change.before.model, plan)
            case DeviceNoted(worker, note):
                self.notes[worker] = note
            case NodeReady(node):
                self._forget(node.node_id)
                self.aside.pop(node.node_id, None)
            case NodeLost(node_id):
                self._forget(node_id)
            case Decided(decision):
                self.aside |= {
                    action.node_id: action.reason
                    for action in decision.actions
                    if isinstance(action, Quarantine)
                }
            case _:
                pass

    def _forget(self, node_id: str) -> None:
        for known in (self.unit_s, self.notes):
            for worker in [worker for worker in known if worker.node_id == node_id]:
                del known[worker]

    def speeds(self, nodes: Mapping[str, Node]) -> dict[WorkerId, float]:
        """Of each measured worker, relative to the faster half of its pool: 0.5 = takes twice as
        long."""
        slower = times_slower(self.unit_s, lambda worker: _pool(nodes, worker), self.places)
        return {worker: 1 / times for worker, times in slower.items()}

    def by_node(self, nodes: Mapping[str, Node]) -> dict[str, list[float]]:
        """Relative speeds of its GPUs, in order; [] = not measured."""
        found: dict[str, list[float]] = {node_id: [] for node_id in nodes}
        for worker, speed in sorted(self.speeds(nodes).items()):
            found.setdefault(worker.node_id, []).append(round(speed, 3))
        return found

    def whys(self, speeds: Mapping[str, Sequence[float]]) -> dict[str, str]:
        """What is to be said of nodes of which there is something. `speeds`: see by_node."""
        notes: dict[str, dict[str, None]] = {}
        for worker, note in self.notes.items():
            if note:
                notes.setdefault(worker.node_id, {})[note] = None
        found = {name: self._why(name, mine, notes.get(name, ())) for name, mine in speeds.items()}
        return {name: why for name, why in found.items() if why}

    def _why(self, node_id: str, mine: Sequence[float], notes: Iterable[str]) -> str:
        """'' = nothing. `mine`: speeds of its GPUs; `notes`: what these say of themselves."""
        if node_id in self.aside:
            return f"quarantined: {self.aside[node_id]}"
        said = f" (the device says: {', '.join(notes)})" if notes else ""
        if not mine or min(mine) > SLOW:
            return said.strip(" ()")
        slow = [k for k, speed in enumerate(mine) if speed <= SLOW]
        which = (
            ""
            if len(mine) == 1
            else " on all GPUs"
            if len(slow) == len(mine)
            else f" on GPU {', '.join(map(str, slow))} only"
        )
        return f"{1 / min(mine):.2g} times slower than the faster ones of its pool{which}{said}"


def _pool(nodes: Mapping[str, Node], worker: WorkerId) -> str:
    node = nodes.get(worker.node_id)
    return node.pool if node else ""


def shown(speeds: list[float]) -> str:
    """`1.00`, or of GPUs that differ `1.00 0.50`."""
    if not speeds:
        return "-"
    if max(speeds) - min(speeds) <= ALIKE * max(speeds):
        return f"{median(speeds):.2f}"
    return " ".join(f"{speed:.2f}" for speed in speeds)


def samples_by_node(plan: Plan | None) -> Counter[str]:
    """Of a step, those that go through each node; none where the plan assigns none (a script reads
    its own)."""
    found: Counter[str] = Counter()
    if plan is None or not plan.samples:
        return found
    ranks = enumerate(plan.ranks)
    for node_id, dp in {
        (worker.node_id, coordinates(plan.layout, rank).dp(plan.layout)) for rank, worker in ranks
    }:
        found[node_id] += plan.samples[dp]
    return found
