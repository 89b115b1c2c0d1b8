"""An embedded cluster that several backends use, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder


@dataclass
class Borrowed:
    """A LocalCluster that outlives the backend which closes it: only the nodes that were started
    through it end."""

    cluster: LocalCluster
    started: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def add(self, order: NodeOrder) -> Any:
        self.started.append(order.name)
        return self.cluster.add(order)

    def close(self) -> None:
        for name in self.started:
            self.cluster.kill(name).result(60)
