"""Nodes are admitted: who may be asked as a neighbor, and what the run's versions are. The checks
are the workers' own (elastic.worker.profile.node_checks); here is what needs Ray.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elastic.cluster.workers.neighbor_links import doors
from elastic.cluster.workers.worker_group import WorkerGroup
from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.types import (
    APART,
    Admission,
    Event,
    Mark,
    Node,
    NodePrepared,
    NodeRefused,
    Plan,
    Prepare,
    Terms,
    WorkerId,
    apart,
    version_differences,
)
from elastic.types.admission import PLACE, Entry
from elastic.types.orders import WorkerOrder
from elastic.version import versions

log = logging.getLogger(__name__)

NEIGHBORS = 2  # a node that reaches the second one is not at fault
DOUBT_S = 5.0  # within which a node that is gone is seen to be


@dataclass
class Entrance:
    """The driver's side. `known`: versions of the run: the driver's own, and what only nodes know
    as the first one told it. `storage`: the run's, which a node may not share or not reach; None =
    it is known to be the same everywhere. `attached`: to workers that another driver has
    admitted. `training`: some of these were found. `lengths`: of the run's datasets; () = the
    first node that is admitted tells them; `may_change`: it does so anyway."""

    worker_group: WorkerGroup
    known: dict[str, str] = field(default_factory=versions)
    storage: Storage | None = None
    attached: bool = False
    training: bool = False
    lengths: tuple[int, ...] = ()
    may_change: bool = False
    _told_by: str = ""  # the node that has told the lengths; "" = they were known before
    # when the first node came with other data: from which one with the right data may still come
    _hoped: frozenset[str] = frozenset()
    _refused: set[str] = field(default_factory=set)
    _mark: str = ""
    _inside: dict[str, None] = field(default_factory=dict)  # nodes that were admitted, in order
    _asked: dict[str, Prepare] = field(default_factory=dict)  # the last of each node
    # refusals that wait, until when
    _doubted: dict[str, tuple[NodeRefused, float]] = field(default_factory=dict)

    def preparation(
        self, action: Prepare, plan: Plan | None, *, on_gpu: bool = False
    ) -> WorkerOrder:
        """What the workers of a node are told."""
        self._asked[action.node_id] = action
        mark = self._mark_for(action.node_id)
        far = "" if action.node_id in self._inside else self._far
        terms = Terms(dict(self.known), action.gpu_bytes, action.host_bytes, mark, on_gpu, far)
        neighbors = tuple(self._neighbors(action.node_id, plan))
        return WorkerOrder(action, entry=Entry(terms, partial(doors, neighbors)))

    @property
    def _far(self) -> str:
        """Object storage that nodes must reach."""
        return self.storage.uri if self.storage is not None and self.storage.remote else ""

    def _neighbors(self, node_id: str, plan: Plan | None) -> Iterable[Any]:
        """Workers of other nodes: of the plan's first, then of those that are admitted."""
        workers = [
            *(plan.ranks if plan is not None else ()),
            *(w for name in self._inside for w in self.worker_group.workers(name)),
        ]
        first: dict[str, WorkerId] = {}  # of each other node
        for worker in workers:
            if worker.node_id not in (node_id, ""):
                first.setdefault(worker.node_id, worker)
        actors = map(self.worker_group.actor, first.values())
        return [actor for actor in actors if actor is not None][:NEIGHBORS]

    def _mark_for(self, node_id: str) -> Mark | None:
        """What a worker of the node shall find in storage and answer. A failure to write it says
        nothing of the node."""
        if self.storage is None or self._far or node_id in self._inside:
            return None
        try:
            if not self._mark:
                self.storage.delete_folder(PLACE)  # of earlier drivers
                text = secrets.token_hex(16)
                self.storage.put(f"{PLACE}/{text}", text.encode())
                self._mark = text
        except OSError as error:
            text = "%s cannot be written, so that no node is asked whether it sees it: %s"
            log.warning(text, self.storage.uri, error)
            return None
        return Mark(
            self.storage.uri, f"{PLACE}/{self._mark}", f"{PLACE}/{self._mark}.{node_id}", self._mark
        )

    def _unanswered(self, node_id: str, admission: Admission | None) -> str:
        """Why the node's storage is not this driver's; '' = it is, or the node was not asked: of
        one that was admitted, workers that remain repeat what they found then."""
        asked = self._mark and admission is not None and admission.mark == self._mark
        if self.storage is None or not asked or node_id in self._inside:
            return ""
        key = f"{PLACE}/{self._mark}.{node_id}"
        try:
            found = self.storage.get(key) == self._mark.encode()
            self.storage.delete(key)
        except FileNotFoundError:
            found = False
        except OSError as error:
            text = "%s cannot be read, so that it is not known whether %s writes there: %s"
            log.warning(text, key, node_id, error)
            return ""
        what = "a file that the node has written is not there on the driver's host, in"
        return "" if found else apart(self.storage.uri, what)

    def passed(self, event: Event, nodes: dict[str, Node]) -> Event:
        """The event as the policy is to hear it: nodes that came together are held against each
        other here. Raises SpecError where not even the first node has the driver's storage, or no
        node the run's data."""
        heard = self._heard(event, nodes)
        if isinstance(heard, NodeRefused):
            self._refused.add(heard.node_id)
        return heard

    def _heard(self, event: Event, nodes: dict[str, Node]) -> Event:
        node = nodes.get(getattr(event, "node_id", ""))
        if (
            isinstance(event, NodePrepared)
            and node is not None
            and (why := self._unanswered(node.node_id, event.admission))
        ):
            event = NodeRefused(node.node_id, why)
        if isinstance(event, NodeRefused) and node is not None:
            if event.reason.startswith(APART) and not self._inside and not self.attached:
                raise SpecError(f"node {node.node_id}: {event.reason}")
            return replace(event, pool=node.pool)
        if not isinstance(event, NodePrepared) or node is None:
            return event
        found = event.admission.versions if event.admission is not None else {}
        if different := version_differences(self.known, found):
            return NodeRefused(node.node_id, different, node.pool)
        first = not self._inside and not self.training
        if first and self.may_change:
            self.lengths, self.may_change = (), False
        if not self.lengths:
            self.lengths, self._told_by = event.lengths, node.node_id
        if other := _other_lengths(self.lengths, event.lengths, self._told_by):
            if first and not self._others_come(node.node_id, nodes):
                raise SpecError(
                    f"node {node.node_id}: {other}: samples would come up twice, or never; bring "
                    "back the data that the run had, or continue with --allow-changed"
                )
            return NodeRefused(node.node_id, other, node.pool)
        self.known = {**found, **self.known}
        self._inside[node.node_id] = None
        return event

    def _others_come(self, node_id: str, nodes: dict[str, Node]) -> bool:
        """Of those that come later none is waited for: they take the place of refused ones."""
        self._hoped = self._hoped or frozenset(nodes)
        return bool((self._hoped & nodes.keys()) - self._refused - {node_id})

    def doubts(self, event: Event, now_s: float) -> tuple[str, ...]:
        """The neighbors that a refused node did not reach. They may be the ones that are gone: the
        refusal waits."""
        if not isinstance(event, NodeRefused) or not event.neighbors:
            return ()
        self._doubted[event.node_id] = (event, now_s + DOUBT_S)
        return event.neighbors

    def settled(self, nodes: Mapping[str, Node], now_s: float) -> tuple[list[Prepare], list[Event]]:
        """Nodes to be prepared again, since a neighbor that they did not reach is gone or has lost
        a worker; refusals that hold."""
        again: list[Prepare] = []
        refused: list[Event] = []
        for node_id, (event, until_s) in list(self._doubted.items()):
            if not all(
                name in nodes and len(self.worker_group.workers(name)) >= nodes[name].gpus
                for name in event.neighbors
            ):
                text = "%s is looked at once more: %s, and a node that it did not reach is gone"
                log.info(text, node_id, event.reason)
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

    def close(self) -> None:
        """Takes away what was written to storage."""
        if self.storage is not None and self._mark:
            with suppress(OSError):
                self.storage.delete(f"{PLACE}/{self._mark}")


def _other_lengths(run: tuple[int, ...], found: tuple[int, ...], told_by: str) -> str:
    """Why a node with datasets of these lengths is none for the run; '' = nothing is known."""
    if not run or not found or run == found:
        return ""
    was, now = (" and ".join(map(str, lengths)) for lengths in (run, found))
    where = f"on node {told_by}, the first one" if told_by else "before"
    return f"its data is not the run's: {now} samples in the dataset, {was} {where}"
