"""Nodes are let in: who may be asked as a neighbour, and what the run's versions are. The checks are the workers' own
(elastic.worker.admission); here is what needs Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic.cluster.crew import Crew
from elastic.types import Event, Node, NodePrepared, NodeRefused, Plan, Prepare, Terms, version_differences
from elastic.version import versions
from elastic.worker.link import Door, listen

log = logging.getLogger(__name__)

NEIGHBOURS = 2  # a node that reaches the second one is not at fault
HEAR_MOST_S = 5.0  # of a neighbour, which trains meanwhile
DOUBT_S = 5.0  # within which a node that is gone is seen to be


@dataclass
class Entrance:
    """The driver's side. `known`: versions of the run: the driver's own, and what only nodes know as the first one told it."""

    crew: Crew
    known: dict[str, str] = field(default_factory=versions)
    _inside: dict[str, None] = field(default_factory=dict)  # nodes that were let in, in order
    _asked: dict[str, Prepare] = field(default_factory=dict)  # the last of each node
    _doubted: dict[str, tuple[NodeRefused, float]] = field(default_factory=dict)  # refusals that wait, until when

    def preparation(self, action: Prepare, plan: Plan | None) -> tuple[Any, ...]:
        """What the workers of a node are told (Worker.prepare)."""
        self._asked[action.node_id] = action
        terms = Terms(dict(self.known), action.gpu_bytes, action.host_bytes)
        return action.rehearse, terms, tuple(self._neighbours(action.node_id, plan))

    def _neighbours(self, node_id: str, plan: Plan | None) -> Iterable[Any]:
        """Workers of other nodes: of the plan's first, then of those that are let in."""
        workers = [*(plan.ranks if plan is not None else ()), *(w for name in self._inside for w in self.crew.workers(name))]
        first = {worker.node_id: worker for worker in reversed(workers) if worker.node_id not in (node_id, "")}
        names = [name for name in dict.fromkeys(worker.node_id for worker in workers) if name in first]
        actors = (self.crew.actor(first[name]) for name in names)
        return [actor for actor in actors if actor is not None][:NEIGHBOURS]

    def passed(self, event: Event, nodes: dict[str, Node]) -> Event:
        """The event as the policy is to hear it: nodes that came together are held against each other here."""
        node = nodes.get(getattr(event, "node_id", ""))
        if isinstance(event, NodeRefused) and node is not None:
            return replace(event, pool=node.pool)
        if not isinstance(event, NodePrepared) or node is None:
            return event
        found = event.admission.versions if event.admission is not None else {}
        if different := version_differences(self.known, found):
            return NodeRefused(node.node_id, different, node.pool)
        self.known = {**found, **self.known}
        self._inside[node.node_id] = None
        return event

    def doubts(self, event: Event, now_s: float) -> tuple[str, ...]:
        """The neighbors that a refused node did not reach. They may be the ones that are gone: the refusal waits."""
        if not isinstance(event, NodeRefused) or not event.neighbors:
            return ()
        self._doubted[event.node_id] = (event, now_s + DOUBT_S)
        return event.neighbors

    def settled(self, nodes: Mapping[str, Node], now_s: float) -> tuple[list[Prepare], list[Event]]:
        """Nodes to be prepared again, since a neighbor that they did not reach is gone or has lost a worker; refusals that
        hold."""
        again: list[Prepare] = []
        refused: list[Event] = []
        for node_id, (event, until_s) in list(self._doubted.items()):
            if not all(name in nodes and len(self.crew.workers(name)) >= nodes[name].gpus for name in event.neighbors):
                log.info("%s is looked at once more: %s, and a node that it did not reach is gone", node_id, event.reason)
                again.append(self._asked[node_id])
            elif now_s >= until_s:
                refused.append(event)
            else:
                continue
            del self._doubted[node_id]
        return again, refused

    def forget(self, node_id: str) -> None:
        for known in (self._inside, self._asked, self._doubted):
            known.pop(node_id, None)


def entry(terms: Terms, neighbours: tuple[Any, ...]) -> Any:
    """In the worker's process: what its session is given."""
    from elastic.worker.admission import Entry

    return Entry(terms, partial(doors, neighbours))


def doors(neighbours: Iterable[Any]) -> list[Door]:
    """Where these actors listen; one that does not answer is left out: it may be ending, and says nothing of this node."""
    found = []
    for ref in [actor.hear.remote() for actor in neighbours]:
        try:
            found.append(ray.get(ref, timeout=HEAR_MOST_S))
        except (RayError, GetTimeoutError, OSError) as error:
            log.info("a neighbour does not answer: %s", error)
    return found


def open_door(node_id: str) -> Door:
    """At the address by which the others know this node."""
    return listen(node_id, ray.util.get_node_ip_address())
