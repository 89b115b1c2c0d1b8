"""Layout -> rank grid, coordinates, rank lists per axis. Integers only.

Rank order is that of torchtitan's meshes: pp is the outermost axis, then dp_replicate, dp_shard, cp, tp innermost, so that
neighbouring ranks (one node) share a tp group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.types import AXES, Layout, WorkerId
from elastic.types import parse_layout as parse_layout


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    def dp(self, layout: Layout) -> int:
        """Index of the data-parallel rank: which share of the samples it reads."""
        return self.dp_replicate * layout.dp_shard + self.dp_shard

    def fsdp(self, layout: Layout) -> int:
        """Index on the merged axis dp_shard x cp that parameters are cut along."""
        return self.dp_shard * layout.cp + self.cp


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Coordinates of `rank`. Raises ValueError when the rank is not in the layout."""
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is not in a layout of {layout.world_size} ranks ({layout})")
    values = []
    for axis in reversed(AXES):
        rank, value = divmod(rank, getattr(layout, axis))
        values.append(value)
    return Coordinates(*reversed(values))


def rank_of(layout: Layout, at: Coordinates) -> int:
    """The inverse of `coordinates`."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(layout, axis) + getattr(at, axis)
    return rank


def axis_groups(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Rank lists of the groups that vary along `axes` and agree on all other axes, in order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        key = tuple(getattr(at, axis) for axis in AXES if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def stage_ranks(layout: Layout, stage: int) -> list[int]:
    """Ranks of one pipeline stage, in order: a grid [dp_replicate, dp_shard x cp, tp] when reshaped."""
    size = layout.world_size // layout.pp
    return list(range(stage * size, (stage + 1) * size))


def replica_key(layout: Layout, rank: int) -> tuple[int, int, int, int]:
    """Ranks with equal keys hold equal boxes (they differ in dp_replicate only)."""
    at = coordinates(layout, rank)
    return (at.pp, at.dp_shard, at.cp, at.tp)


def first_replica(layout: Layout, rank: int) -> int:
    """The lowest rank that holds the same boxes."""
    return rank_of(layout, replace(coordinates(layout, rank), dp_replicate=0))


def stage_blocks(layers: tuple[int, ...], stage: int) -> range:
    """Block indices of a stage; `layers[i]` = number of blocks of stage i."""
    start = sum(layers[:stage])
    return range(start, start + layers[stage])


def partners(ranks: tuple[WorkerId, ...]) -> tuple[int, ...]:
    """For each rank, the rank on another node that keeps its peer copy; empty when all ranks share one node.

    The k-th worker of a node sends to the (k mod n)-th worker of the next node in rank order, n = workers there.
    """
    by_node: dict[str, list[int]] = {}
    for rank, worker in enumerate(ranks):
        by_node.setdefault(worker.node_id, []).append(rank)
    nodes = list(by_node)
    if len(nodes) < 2:
        return ()
    out = [0] * len(ranks)
    for i, node in enumerate(nodes):
        there = by_node[nodes[(i + 1) % len(nodes)]]
        for k, rank in enumerate(by_node[node]):
            out[rank] = there[k % len(there)]
    return tuple(out)
