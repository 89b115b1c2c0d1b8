"""ClusterSpec: a cluster file as everybody else sees it: its pools, their node types, and the
problems found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.types import MarketType, Pool

MARKETS: tuple[MarketType, ...] = ("spot", "on-demand", "reserved", "owned")
CLOUDS = ("aws", "gcp", "azure", "kubernetes")

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """Something wrong in a cluster file: where, what, and what would be right."""

    place: Place
    what: str
    right: str
    warning: bool = False

    def line_number(self, lines: Mapping[Place, int]) -> int:
        """Where it stands, or what it would stand in; the file's first line where neither is
        there."""
        return next(
            (
                lines[self.place[:n]]
                for n in range(len(self.place), 0, -1)
                if self.place[:n] in lines
            ),
            1,
        )

    def line(self, file: str, lines: Mapping[Place, int]) -> str:
        """`FILE:LINE: error: PLACE: what; what would be right`."""
        near = self.line_number(lines)
        where = ".".join(map(str, self.place))
        kind = "warning" if self.warning else "error"
        return f"{file}:{near}: {kind}: {where + ': ' if where else ''}{self.what}; {self.right}"


@dataclass(frozen=True)
class ClusterNodeType:
    """One entry of `available_node_types`, or a worker group of KubeRay. `market_type`: as labeled,
    else as it is bought."""

    name: str
    place: Place
    instance_type: str = ""
    market_type: MarketType = "owned"
    bought_as: MarketType | None = None  # as its node_config says; None = that does not say
    region: str = ""
    zone: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    node_config: Mapping[str, Any] = field(default_factory=dict)
    min_nodes: int = 0
    max_nodes: int = 0
    head: bool = False

    def problem(self, *keys: str | int, what: str, right: str, warning: bool = False) -> Problem:
        """Something wrong in it, at these keys."""
        return Problem((*self.place, *keys), what, right, warning)


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster file. `name`: the cluster's, in the tags of its machines; `data`: the file as it
    was read; `on_demand_floor`: nodes that its section for this package wants kept where no one can
    reclaim them; `lines`: where things stand in it."""

    file: str
    name: str
    provider: str
    region: str
    zones: tuple[str, ...]
    node_types: tuple[ClusterNodeType, ...]  # the head's too
    pools: tuple[Pool, ...]
    data: Mapping[str, Any]
    on_demand_floor: int = 0
    # pool -> where its price comes from, in words
    prices_of: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[Place, int] = field(default_factory=dict)
    head_usd_per_h: float = 0.0  # 0 = not known, or nothing

    @property
    def head(self) -> ClusterNodeType | None:
        return next((found for found in self.node_types if found.head), None)

    @property
    def workers(self) -> tuple[ClusterNodeType, ...]:
        return tuple(found for found in self.node_types if not found.head)
