"""How long a node takes from its request to the end of the first step that it takes part in, by
pool. Pure.

The request counts from the decision that asks for the node. Nodes answer the requests of their pool
in order, as the policy counts them; one that nobody asked for (it was there, or somebody else's) is
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from elastic.ledger.journal import Line
from elastic.policy.state.fold import Change, changes
from elastic.text import n_of
from elastic.types import DriverStarted, NodeLost, NodeReady, StepDone


@dataclass
class Launches:
    """`seconds`: pool -> of each of its nodes, in the order of their first steps."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    # nodes that were asked for and have no step yet -> pool, and when
    _coming: dict[str, tuple[str, float]] = field(default_factory=dict)

    def take(self, change: Change) -> None:
        event, before = change.event, change.before
        if isinstance(event, StepDone):
            plan = before.plans.get(event.generation) if self._coming else None
            for node_id in plan.nodes if plan is not None else ():
                pool, at_s = self._coming.pop(node_id, ("", 0.0))
                if pool:
                    self.seconds.setdefault(pool, []).append(change.at_s - at_s)
        elif isinstance(event, NodeReady):
            # what came has changed what is asked for: one that was there already has not
            answered = [
                known
                for name, known in before.requests.items()
                if change.after.requests.get(name) is not known
            ]
            for asked in answered:
                self._coming[event.node.node_id] = (asked.pool, asked.at_s)
        elif isinstance(event, NodeLost):
            self._coming.pop(event.node_id, None)
        elif isinstance(event, DriverStarted) and not event.attached:
            self._coming = {}

    def medians(self) -> dict[str, dict[str, float]]:
        """By pool: the median in seconds, and of how many nodes."""
        return {
            pool: {"median_s": round(median(found), 3), "nodes": len(found)}
            for pool, found in sorted(self.seconds.items())
        }


def launches(lines: Iterable[Line]) -> Launches:
    """Of a whole journal."""
    found = Launches()
    for change in changes(lines):
        found.take(change)
    return found


def sentence(medians: Mapping[str, Mapping[str, float]]) -> str:
    """`spot 42.1 s (3 nodes), fixed 63.0 s (1 node)`; '' = no node was asked for."""
    return ", ".join(
        f"{pool} {found['median_s']:.1f} s ({n_of(round(found['nodes']), 'node')})"
        for pool, found in medians.items()
    )
