"""How long a node takes from its request to the end of the first step that it takes part in, by
pool. Pure: journal lines in.

The request counts from the decision that asks for the node. Nodes answer the requests of their pool
in order, as the policy counts them; one that nobody asked for (it was there, or somebody else's) is
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from elastic.ledger.journal import Line
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Event,
    NodeLost,
    NodeReady,
    RequestFailed,
    RequestNodes,
    StepDone,
)


@dataclass
class _Asked:
    pool: str
    missing: int
    at_s: float


@dataclass
class Launches:
    """Built by `add`. `seconds`: pool -> of each of its nodes, in the order of their first
    steps."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)  # by request
    # nodes that have no step yet, by the request that they answer
    _coming: dict[str, _Asked] = field(default_factory=dict)
    _there: set[str] = field(default_factory=set)
    _plans: dict[int, tuple[str, ...]] = field(default_factory=dict)  # generation -> nodes

    def add(self, line: Line) -> None:
        for at_s, event in line.events:
            self._event(event, at_s)
        for action in line.decision.actions if line.decision is not None else ():
            if isinstance(action, RequestNodes) and action.count > 0:
                self._asked.setdefault(
                    action.request_id, _Asked(action.pool, action.count, line.at_s)
                )
            elif isinstance(action, RequestNodes):
                self._asked.pop(action.request_id, None)
            elif isinstance(action, EnterPlan):
                self._plans[action.plan.generation] = action.plan.nodes

    def _event(self, event: Event, at_s: float) -> None:
        if isinstance(event, NodeReady):
            self._came(event.node.node_id, event.node.pool)
        elif isinstance(event, StepDone):
            for node_id in self._plans.get(event.generation, ()):
                asked = self._coming.pop(node_id, None)
                if asked is not None:
                    self.seconds.setdefault(asked.pool, []).append(at_s - asked.at_s)
        elif isinstance(event, NodeLost):
            self._there.discard(event.node_id)
            self._coming.pop(event.node_id, None)
        elif isinstance(event, RequestFailed):
            self._asked.pop(event.request_id, None)
        elif isinstance(event, DriverStarted):
            self._asked = {}
            if not event.attached:
                self._there, self._coming, self._plans = set(), {}, {}

    def _came(self, node_id: str, pool: str) -> None:
        found = next((name for name, asked in self._asked.items() if asked.pool == pool), None)
        again = node_id in self._there  # a driver that attached has found it
        self._there.add(node_id)
        if found is None or again:
            return
        asked = self._asked[found]
        self._coming[node_id] = asked
        asked.missing -= 1
        if asked.missing <= 0:
            del self._asked[found]

    def medians(self) -> dict[str, dict[str, float]]:
        """By pool: the median in seconds, and of how many nodes."""
        return {
            pool: {"median_s": round(median(found), 3), "nodes": len(found)}
            for pool, found in sorted(self.seconds.items())
        }


def launches(lines: Iterable[Line]) -> Launches:
    """Of a whole journal."""
    found = Launches()
    for line in lines:
        found.add(line)
    return found


def sentence(medians: Mapping[str, Mapping[str, float]]) -> str:
    """`spot 42.1 s (3 nodes), fixed 63.0 s (1 node)`; '' = no node was asked for."""
    return ", ".join(
        f"{pool} {found['median_s']:.1f} s ({found['nodes']:.0f} node{'s' * (found['nodes'] != 1)})"
        for pool, found in medians.items()
    )
