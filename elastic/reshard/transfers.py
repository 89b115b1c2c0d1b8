"""Old boxes x new boxes -> Transfers: own memory first, then the same node, then spread over the senders. Integers only.

The distinct pieces of a tensor under the old layout are a partition of it, so each new box is the union of its overlaps with
them: every overlap becomes one Transfer from one of the piece's holders, and coverage is exact by construction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from elastic.errors import StateLost
from elastic.mesh import coordinates
from elastic.reshard.shards import Kind, Placed, Region, check_layers, meet, placements, region, stages_of
from elastic.types import DTYPE_BYTES, Layout, ModelProfile, Transfer

Cut = tuple[Layout, tuple[int, ...]]  # a layout and its layers per stage
Index = tuple[int, int]  # tp and fsdp index of a piece; 0 on an axis that does not cut the tensor


@dataclass(frozen=True)
class _Holders:
    """Who can give a piece: `by_participant` -> the source rank whose boxes it holds, `by_node` -> participants."""

    by_participant: dict[int, int] = field(default_factory=dict)
    by_node: dict[str, list[int]] = field(default_factory=dict)
    everyone: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Overlap:
    """A part of a new piece that lies in the old piece `index`."""

    index: Index
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    n_elements: int


class _Side:
    """Ranks of one layout that hold a tensor, by pieces; remembered per kind of placement."""

    def __init__(self, model: ModelProfile, cut: Cut) -> None:
        self.model, (self.layout, self.layers) = model, cut
        check_layers(model, *cut)
        self.fsdp = self.layout.dp_shard * self.layout.cp
        self.at = [coordinates(self.layout, rank) for rank in range(self.layout.world_size)]
        self._ranks: dict[Kind, dict[Index, list[int]]] = {}

    def ranks(self, placed: Placed) -> dict[Index, list[int]]:
        """Piece -> the ranks that hold it."""
        if placed.kind not in self._ranks:
            stages = stages_of(placed.blocks, self.model, self.layout, self.layers)
            out: dict[Index, list[int]] = {}
            for rank, at in enumerate(self.at):
                if at.pp in stages:
                    index = (at.tp if placed.tp_cut else 0, at.fsdp(self.layout) if placed.fsdp_cut else 0)
                    out.setdefault(index, []).append(rank)
            self._ranks[placed.kind] = out
        return self._ranks[placed.kind]

    def pieces(self, placed: Placed) -> dict[Index, Region]:
        """Piece -> its region, empty ones left out."""
        tps = range(self.layout.tp if placed.tp_cut else 1)
        fsdps = range(self.fsdp if placed.fsdp_cut else 1)
        out = {(t, f): region(placed, (t, self.layout.tp), (f, self.fsdp)) for t in tps for f in fsdps}
        return {index: part for index, part in out.items() if 0 not in part[1]}


def plan_transfers(
    model: ModelProfile, old: Cut, new: Cut, holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]
) -> tuple[Transfer, ...]:
    """Where each rank of the new layout gets its boxes from: every element of each of its boxes exactly once.

    `holders`: rank of the old layout -> participants that hold its boxes. `nodes`: node of each participant, ranks of the new
    layout first. The order is that of the state's tensors, then of the destinations; equal input gives equal output.
    Raises StateLost, naming the tensor, when a part has no holder.
    """
    source, target = _Side(model, old), _Side(model, new)
    sent = [0] * len(nodes)
    overlaps: dict[tuple[object, ...], dict[Index, list[_Overlap]]] = {}
    givers: dict[Kind, dict[Index, _Holders]] = {}
    out: list[Transfer] = []
    for placed in placements(model):
        spec = placed.spec
        shape = (spec.shape, spec.tp_dim, placed.tp_cut, placed.fsdp_cut)
        if shape not in overlaps:
            overlaps[shape] = _overlaps(source.pieces(placed), target.pieces(placed))
        old_ranks = source.ranks(placed)
        if placed.kind not in givers:
            givers[placed.kind] = {index: _holders(ranks, holders, nodes) for index, ranks in old_ranks.items()}
        wanted = [(rank, index) for index, ranks in target.ranks(placed).items() for rank in ranks]
        for rank, index in sorted(wanted):
            for part in overlaps[shape].get(index, ()):
                giver = givers[placed.kind][part.index]
                if not giver.everyone:
                    raise _lost(placed, old, old_ranks[part.index])
                sender = _sender(giver, rank, nodes[rank], sent)
                if sender != rank:
                    sent[sender] += part.n_elements * DTYPE_BYTES[spec.dtype]
                held = giver.by_participant[sender]
                out.append(Transfer(spec.fqn, part.offsets, part.sizes, spec.dtype, sender, rank, held))
    return tuple(out)


def lost_tensor(model: ModelProfile, old: Cut, ranks: Collection[int]) -> str | None:
    """Name of the first tensor of which `ranks` of the old layout together do not hold every element, else None."""
    side, held = _Side(model, old), set(ranks)
    for placed in placements(model):
        holders = side.ranks(placed)
        if any(held.isdisjoint(holders[index]) for index in side.pieces(placed)):
            return placed.spec.fqn
    return None


def _sender(giver: _Holders, rank: int, node: str, sent: list[int]) -> int:
    if rank in giver.by_participant:
        return rank
    return min(giver.by_node.get(node) or giver.everyone, key=lambda participant: (sent[participant], participant))


def _holders(ranks: list[int], holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]) -> _Holders:
    out = _Holders()
    for rank in ranks:
        for participant in holders.get(rank, ()):
            if participant not in out.by_participant:
                out.by_participant[participant] = rank
                out.by_node.setdefault(nodes[participant], []).append(participant)
                out.everyone.append(participant)
    return out


def _overlaps(old: dict[Index, Region], new: dict[Index, Region]) -> dict[Index, list[_Overlap]]:
    """For each new piece its parts, one for each old piece that it meets."""
    out: dict[Index, list[_Overlap]] = {}
    for index, wanted in new.items():
        out[index] = []
        for old_index, held in old.items():
            common = meet(wanted, held)
            if common is not None:
                out[index].append(_Overlap(old_index, *common, prod(common[1])))
    return out


def _lost(placed: Placed, old: Cut, ranks: list[int]) -> StateLost:
    who = ", ".join(map(str, ranks))
    return StateLost(
        f"{placed.spec.fqn}: its part on rank {who} of the layout {old[0]} has no living holder; "
        "an older peer or durable copy is needed"
    )
