"""What the cluster itself says of nodes that will be taken: Ray's draining nodes, as Notice and NoticeWithdrawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.types import Event, Notice, NoticeWithdrawn


@dataclass
class Drains:
    """Turns what is draining now into news. `usual_s`: the deadline where Ray names none."""

    usual_s: float = 120.0
    _told: dict[str, float] = field(default_factory=dict)

    def news(self, draining: Mapping[str, float], now_s: float) -> list[Event]:
        """`draining`: node id -> deadline in epoch seconds, 0 = not known."""
        events: list[Event] = []
        for node_id, deadline_s in draining.items():
            if node_id not in self._told or (deadline_s and abs(deadline_s - self._told[node_id]) > 1.0):
                self._told[node_id] = deadline_s or now_s + self.usual_s
                events.append(Notice(node_id, self._told[node_id], "Ray drains the node"))
        for node_id in [n for n in self._told if n not in draining]:
            del self._told[node_id]
            events.append(NoticeWithdrawn(node_id))
        return events

    def forget(self, node_id: str) -> None:
        """The node is gone: no news of it."""
        self._told.pop(node_id, None)
