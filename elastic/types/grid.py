"""Layout -> rank grid, coordinates, rank lists per axis. Integers only.

Rank order is that of torchtitan's meshes: pp is the outermost axis, then dp_replicate, dp_shard,
cp, tp innermost, so that neighboring ranks (one node) share a tp group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.types import AXES, Layout
from elastic.types import parse_layout as parse_layout

MESH_MOST = 16  # ranks that all are connected with each other for control: two nodes of eight
ROW = 8  # neighboring ranks that are, where there are more: those of a node


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


def axes_text(layout: Layout, rank: int) -> str:
    """`pp stage 1/2 fsdp 0/4 tp 1/2`: its coordinates on the axes that have more ranks than one;
    fsdp is dp_shard x cp."""
    own = coordinates(layout, rank)
    each = (
        ("pp stage", own.pp, layout.pp),
        ("dp_replicate", own.dp_replicate, layout.dp_replicate),
        ("fsdp", own.fsdp(layout), layout.dp_shard * layout.cp),
        ("cp", own.cp, layout.cp),
        ("tp", own.tp, layout.tp),
    )
    return " ".join(f"{axis} {at}/{size}" for axis, at, size in each if size > 1)


def stages_and_shares(layout: Layout) -> list[tuple[int, int]]:
    """Of each rank its place on the pp axis and its data-parallel rank, as `coordinates` tells."""
    inner = layout.cp * layout.tp
    return [(p, d) for p in range(layout.pp) for d in range(layout.dp) for _ in range(inner)]


def rank_of(layout: Layout, at: Coordinates) -> int:
    """The inverse of `coordinates`."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(layout, axis) + getattr(at, axis)
    return rank


def axes_of(layout: Layout) -> frozenset[str]:
    """The axes with more than one rank, of pp, dp (replicas and shards), cp, tp, ep."""
    return frozenset(axis for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(layout, axis) > 1)


def axis_groups(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Rank lists of the groups that vary along `axes` and agree on all other axes, in order of
    their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        key = tuple(getattr(at, axis) for axis in AXES if axis not in axes)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def expert_groups(layout: Layout, rank: int) -> tuple[list[int], list[list[int]]]:
    """The ranks among which the rank's tokens go to their experts (ep neighbors along dp_shard x
    cp), and a grid [dp_replicate, rest of dp_shard x cp] of those that have parts of the same
    experts as the rank."""
    line = next(g for g in axis_groups(layout, ("dp_shard", "cp")) if rank in g)
    at = line.index(rank)
    first, alike = at - at % layout.ep, line[at % layout.ep :: layout.ep]
    apart, mine = len(line) * layout.tp, coordinates(layout, rank).dp_replicate
    replicas = [(i - mine) * apart for i in range(layout.dp_replicate)]
    return line[first : first + layout.ep], [[r + far for r in alike] for far in replicas]


def fullest_experts(layout: Layout, tokens: Sequence[float]) -> float:
    """Of what came to the experts of each rank, the most over the mean of its pipeline stage; 0
    where nothing is known of it."""
    found = [0.0]
    for pp in range(layout.pp if tokens else 0):
        here = [tokens[rank] for rank in stage_ranks(layout, pp)]
        if sum(here):
            found.append(max(here) * len(here) / sum(here))
    return max(found)


def stage_ranks(layout: Layout, pp: int) -> list[int]:
    """Ranks at one place of the pp axis, in order: a grid [dp_replicate, dp_shard x cp, tp] when
    reshaped."""
    size = layout.world_size // layout.pp
    return list(range(pp * size, (pp + 1) * size))


def stages_at(layout: Layout, pp: int) -> range:
    """The pipeline stages that the ranks at this place of the pp axis have."""
    return range(pp, layout.n_stages, layout.pp)


def fills_rounds(pp: int, n_stages: int, n_microbatches: int) -> bool:
    """interleaved1f1b sends microbatches through the stages of a rank in rounds of about pp: are
    the rounds of equal size?"""
    return n_stages <= pp or n_microbatches % max(1, n_microbatches // pp) == 0


def each_microbatches(
    layout: Layout, samples: Sequence[int], n_microbatches: int, *, together: int = 1
) -> tuple[int, ...]:
    """Microbatches per step of every data-parallel rank. Where shares are unequal and the layout
    gives microbatches a size, a replica with more samples has more of them and one with fewer has
    fewer, so that none is larger; else all have `n_microbatches`. Shards of a replica need equally
    many; pipeline stages need them of one size, and no fewer than that. `together`: see
    ModelProfile; none is cut within such a group."""
    unit, shard = max(1, together), layout.dp_shard
    most, samples = layout.microbatch_size // unit, [n // unit for n in samples]
    even = max(samples) - min(samples) <= n_microbatches
    if not most or layout.dp_replicate == 1 or not together or even:
        return (n_microbatches,) * layout.dp
    found: list[int] = []
    for first in range(0, layout.dp, shard):
        mine = samples[first : first + shard]
        if layout.pp == 1:
            n = max(1, min(-(-max(mine) // most), min(mine)))  # none without a sample
        else:
            rows = [size // n_microbatches for size in mine]
            more = next(
                (
                    k
                    for k in range(1, max(rows) + 1)
                    if not any(n % k for n in rows) and max(rows) // k <= most
                ),
                1,
            )
            n = n_microbatches * (
                more if fills_rounds(layout.pp, layout.n_stages, n_microbatches * more) else 1
            )
        found += [n] * shard
    return tuple(found)


def replica_key(layout: Layout, rank: int, alone: bool = False) -> int:
    """Ranks with equal keys hold equal boxes: they differ in dp_replicate only. `alone`: no two do,
    since optimizers step whole tensors at owners (ModelProfile.by_owners)."""
    inner = layout.dp_shard * layout.cp * layout.tp
    return rank if alone else rank // (layout.dp_replicate * inner) * inner + rank % inner


def replica_keys(layout: Layout, alone: bool = False) -> Sequence[int]:
    """Of each rank."""
    ranks = range(layout.world_size)
    if alone or layout.dp_replicate == 1:
        return ranks
    return [replica_key(layout, rank) for rank in ranks]


def stage_blocks(layers: tuple[int, ...], stage: int) -> range:
    """Block indices of a stage; `layers[i]` = number of blocks of stage i."""
    start = sum(layers[:stage])
    return range(start, start + layers[stage])


def control_tree(n: int) -> list[list[tuple[int, ...]]]:
    """The groups in which numbers of n ranks are added up, by levels, the lowest first: rows of ROW
    neighbors, then rows of these rows' first ranks, until MESH_MOST are left, which are one row.
    The last row of a level may be shorter."""
    ranks, levels = list(range(n)), []
    while len(ranks) > MESH_MOST:
        levels.append([tuple(ranks[at : at + ROW]) for at in range(0, len(ranks), ROW)])
        ranks = ranks[::ROW]
    return [*levels, [tuple(ranks)]]
