"""Notices from all who give them, as one per node: the node's own sources, Ray's drain, the end of
a reservation.

The earliest deadline counts, and its teller is the origin. A notice is withdrawn when nobody gives
it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.cluster.notices.sources.watch import NoticeReport
from elastic.types import Event, Node, NodeWarned, Notice, NoticeWithdrawn, Pool

SAME_S = 1.0  # deadlines that differ by less are the same
# before its end a reservation becomes a notice; the policy knows it from the pool all the time
RESERVED_S = 600.0
RAY, RESERVATION, DRILL = "Ray drains the node", "its reservation ends", "drill"


@dataclass
class Notices:
    """`usual_s`: until the deadline, where Ray names none. All times are of the backend's clock."""

    usual_s: float = 120.0
    # node -> teller -> what -> deadline
    _given: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    _told: dict[str, float] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set)
    _ours: set[str] = field(default_factory=set)  # nodes that this run drains in Ray itself

    def heard(self, node_id: str, report: NoticeReport, now_s: float) -> list[Event]:
        """What the node itself knows. A source that has not answered yet changes nothing. Returns
        new warnings."""
        events: list[Event] = []
        for source, findings in report.said.items():
            self._give(
                node_id, source, {f.what: now_s + f.in_s for f in findings if f.in_s is not None}
            )
            warnings = {f.what: f for f in findings if f.in_s is None}
            events += [
                NodeWarned(node_id, w.what, w.risk)
                for w in warnings.values()
                if (node_id, w.what) not in self._warned
            ]
            self._warned |= {(node_id, what) for what in warnings}
        return events

    def also(self, event: Notice) -> None:
        """A notice that somebody else has told the policy."""
        self._give(event.node_id, event.origin, {})
        self._give(event.node_id, event.origin, {event.origin: event.deadline_s})
        self._told[event.node_id] = event.deadline_s

    def left(self, node_id: str) -> None:
        """The policy leaves the node, and Ray is told to drain it. That Ray does is no news then,
        and it cannot be taken back: the node's notice is not withdrawn any more."""
        self._ours.add(node_id)

    def drains(self, draining: Mapping[str, float], now_s: float) -> None:
        """`draining`: all nodes that Ray drains -> deadline, 0 = not known."""
        for node_id in dict.fromkeys((*self._given, *draining)):
            at_s = None if node_id in self._ours else draining.get(node_id)
            known_s = self._given.get(node_id, {}).get(RAY, {}).get(RAY)
            if at_s and known_s is not None and abs(at_s - known_s) > SAME_S:
                self._give(node_id, RAY, {})  # another one
            self._give(node_id, RAY, {} if at_s is None else {RAY: at_s or now_s + self.usual_s})

    def ends(self, nodes: Iterable[Node], pools: Iterable[Pool], now_s: float) -> None:
        """Nodes of pools that end soon."""
        ending = {pool.name: pool for pool in pools if pool.ends_at_s is not None}
        for node in nodes:
            pool = ending.get(node.pool)
            if (
                pool is not None
                and pool.ends_at_s is not None
                and now_s >= pool.ends_at_s - max(RESERVED_S, pool.notice_s)
            ):
                self._give(node.node_id, RESERVATION, {RESERVATION: pool.ends_at_s})

    def news(self) -> list[Event]:
        """What has changed since it was told last."""
        events: list[Event] = []
        for node_id in [*self._given]:
            all_given = (
                (at_s, what)
                for said in self._given[node_id].values()
                for what, at_s in said.items()
            )
            first = min(all_given, default=None)
            told_s = self._told.get(node_id)
            if first is not None and (told_s is None or abs(first[0] - told_s) > SAME_S):
                self._told[node_id] = first[0]
                events.append(Notice(node_id, first[0], first[1]))
            elif first is None and told_s is not None and node_id not in self._ours:
                del self._told[node_id]
                events.append(NoticeWithdrawn(node_id))
        return events

    def deadline_s(self, node_id: str) -> float | None:
        """As it was told last; None = there is no notice."""
        return self._told.get(node_id)

    def announced_s(self, node_id: str) -> float | None:
        """The deadline that somebody gives who can take the node; a drill only plays one."""
        said = self._given.get(node_id, {})
        return min(
            (at_s for teller, what in said.items() if teller != DRILL for at_s in what.values()),
            default=None,
        )

    def forget(self, node_id: str) -> None:
        """The node is gone: no news of it."""
        self._given.pop(node_id, None)
        self._told.pop(node_id, None)
        self._ours.discard(node_id)
        self._warned = {(name, what) for name, what in self._warned if name != node_id}

    def _give(self, node_id: str, teller: str, said: Mapping[str, float]) -> None:
        """Replaces what the teller has said of the node; what it continues saying keeps its
        deadline, whatever clocks do."""
        before = self._given.get(node_id, {}).get(teller, {})
        if said or before:
            self._given.setdefault(node_id, {})[teller] = {
                what: before.get(what, at_s) for what, at_s in said.items()
            }
