"""Who sends what to whom, for all tensors at once: own memory first, then the same node, then the sender with the least to do.

The distinct pieces of a tensor under the old layout are a partition of it, so each new box is the union of its overlaps with
them: every overlap gets one sender among the piece's holders, and coverage is exact by construction.

Tensors of equal shape and placement (the blocks of a stage, parameter and moments) have equal overlaps: they are one bundle.

Balance: parts with few possible senders are placed first, the largest of them first, each on the sender with the fewest bytes.
Where the sets of possible senders are nested or disjoint, the busiest sender then has at most the optimum and one part: when
its last part was placed, every possible sender of it had as much as the busiest less that part, all of it from parts that
only these senders could send. Sets overlap otherwise where replicas, nodes and tensor parallelism cut across each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapreplace
from math import prod
from operator import itemgetter

from elastic.errors import StateLost
from elastic.mesh import coordinates
from elastic.reshard.shards import Placed, Region, check_layers, meet, placements, region, stages_of
from elastic.types import DTYPE_BYTES, Layout, ModelProfile

Cut = tuple[Layout, tuple[int, ...]]  # a layout and its layers per stage
Index = tuple[int, int]  # tp and fsdp index of a piece; 0 on an axis that does not cut the tensor
Stages = tuple[int, ...]
_Queue = list[tuple[int, int, int]]
Held = tuple[Stages, bool, bool]  # stages, cut by tp?, cut by fsdp?: tensors of equal value are held by the same ranks

Cutting = tuple[tuple[int, ...], int | None, bool, bool]  # tensors of equal value are cut into equal pieces

SPREAD_BYTES = 64 << 20  # parts that several could send are cut along dimension 0 to at most this, so that several do


@dataclass(frozen=True)
class Bundle:
    """Tensors (by their place in `placements`) of equal shape, dtype and placement under both layouts."""

    first: Placed
    tensors: tuple[int, ...]
    old: Held
    new: Held


@dataclass
class Route:
    """A part of each tensor of a bundle on its way to `destination`. `senders`: of each tensor, or one for all; `held_as`:
    sender -> the old rank whose boxes are read there."""

    destination: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    n_bytes: int  # of one tensor
    held_as: Mapping[int, int]
    senders: list[int]

    def sender(self, k: int) -> int:
        return self.senders[k] if len(self.senders) > 1 else self.senders[0]


@dataclass(frozen=True)
class _Holders:
    """Who can give a piece: `held_as`: participant -> the rank whose boxes it holds, `by_node` -> participants."""

    held_as: dict[int, int] = field(default_factory=dict)
    by_node: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def everyone(self) -> list[int]:
        return list(self.held_as)


class Side:
    """Which ranks of one layout hold a tensor, by pieces."""

    def __init__(self, model: ModelProfile, cut: Cut) -> None:
        self.model, (self.layout, self.layers) = model, cut
        check_layers(model, *cut)
        self.fsdp = self.layout.dp_shard * self.layout.cp
        self.at = [coordinates(self.layout, rank) for rank in range(self.layout.world_size)]
        self._stages: dict[tuple[int | None, ...], Stages] = {}
        self._ranks: dict[Held, dict[Index, list[int]]] = {}
        self._pieces: dict[Cutting, dict[Index, Region]] = {}

    @cached_property
    def state(self) -> tuple[Placed, ...]:
        return placements(self.model)

    def held(self, placed: Placed) -> Held:
        if placed.blocks not in self._stages:
            self._stages[placed.blocks] = stages_of(placed.blocks, self.model, self.layout, self.layers)
        return self._stages[placed.blocks], placed.tp_cut, placed.fsdp_cut

    def ranks(self, held: Held) -> dict[Index, list[int]]:
        """Piece -> the ranks that hold it."""
        if held not in self._ranks:
            stages, tp_cut, fsdp_cut = held
            out: dict[Index, list[int]] = {}
            for rank, at in enumerate(self.at):
                if at.pp in stages:
                    index = (at.tp if tp_cut else 0, at.fsdp(self.layout) if fsdp_cut else 0)
                    out.setdefault(index, []).append(rank)
            self._ranks[held] = out
        return self._ranks[held]

    def pieces(self, placed: Placed) -> dict[Index, Region]:
        """Piece -> its region, empty ones left out."""
        cutting = cutting_of(placed)
        if cutting not in self._pieces:
            out: dict[Index, Region] = {}
            for t in range(self.layout.tp if placed.tp_cut else 1):
                offsets, sizes = region(placed, (t, self.layout.tp), (0, 1))
                if 0 in sizes:
                    continue
                step = -(-sizes[0] // self.fsdp) if placed.fsdp_cut else 0
                for f, start in enumerate(range(0, sizes[0], step) if step else (0,)):  # as `chunk`, the empty ones left out
                    part = (min(step, sizes[0] - start), *sizes[1:]) if step else sizes
                    out[t, f] = (offsets[0] + start, *offsets[1:]) if step else offsets, part
            self._pieces[cutting] = out
        return self._pieces[cutting]


def cutting_of(placed: Placed) -> Cutting:
    return placed.spec.shape, placed.spec.tp_dim, placed.tp_cut, placed.fsdp_cut


def bundles(state: Sequence[Placed], source: Side, target: Side) -> list[Bundle]:
    """The state in bundles, in the order of their first tensors."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, placed in enumerate(state):
        spec = placed.spec
        key = (source.held(placed), target.held(placed), spec.shape, spec.tp_dim, spec.dtype)
        found.setdefault(key, []).append(i)
    firsts = [(state[tensors[0]], tuple(tensors)) for tensors in found.values()]
    return [Bundle(first, tensors, source.held(first), target.held(first)) for first, tensors in firsts]


def plan_routes(
    model: ModelProfile, old: Cut, new: Cut, holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]
) -> list[tuple[Bundle, list[Route]]]:
    """The routes of each bundle, in the order of destinations and offsets; equal input gives equal output.

    `holders`: rank of the old layout -> participants that hold its boxes. `nodes`: node of each participant, ranks of the new
    layout first. Raises StateLost, naming the tensor, when a part has no holder.
    """
    return routes_between(Side(model, old), Side(model, new), holders, nodes)


def routes_between(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]
) -> list[tuple[Bundle, list[Route]]]:
    """As `plan_routes`."""
    overlaps = Overlaps(source, target)
    sent = [0] * len(nodes)
    shared: list[tuple[int, int, int, Route, list[int]]] = []  # parts that several could send
    out: list[tuple[Bundle, list[Route]]] = []
    givers: dict[Held, dict[Index, _Holders]] = {}
    for bundle in bundles(source.state, source, target):
        if bundle.old not in givers:
            ranks = source.ranks(bundle.old)
            givers[bundle.old] = {index: _holders(who, holders, nodes) for index, who in ranks.items()}
        routes: list[Route] = []
        for route, able in _routes(bundle, overlaps, givers[bundle.old], nodes):
            routes.append(route)
            if len(able) > 1:
                shared.append((len(able), -route.n_bytes, len(shared), route, able))
                route.senders *= len(bundle.tensors)
            elif able[0] != route.destination:
                sent[able[0]] += route.n_bytes * len(bundle.tensors)
        out.append((bundle, routes))
    queues: dict[int, _Queue] = {}  # those that can send a part are one list for all parts of a piece
    for *_, route, able in sorted(shared, key=lambda job: job[:3]):
        queue = queues.setdefault(id(able), [(0, k, sender) for k, sender in enumerate(able)])
        _spread(route, queue, sent)
    return out


def _routes(
    bundle: Bundle, overlaps: Overlaps, givers: Mapping[Index, _Holders], nodes: Sequence[str]
) -> Iterator[tuple[Route, list[int]]]:
    """Routes with those that could send them, without a choice among several yet."""
    first, source, target = bundle.first, overlaps.source, overlaps.target
    parts = overlaps.of(first)
    item_bytes = DTYPE_BYTES[first.spec.dtype]
    wanted = [(rank, index) for index, ranks in target.ranks(bundle.new).items() for rank in ranks]
    for rank, index in sorted(wanted):
        for old_index, part in parts.get(index, ()):
            giver = givers[old_index]
            if not giver.held_as:
                raise _lost(first, source.layout, source.ranks(bundle.old)[old_index])
            able = [rank] if rank in giver.held_as else giver.by_node.get(nodes[rank]) or giver.everyone
            n_bytes = prod(part[1]) * item_bytes
            for offsets, sizes in rows(part, n_bytes, SPREAD_BYTES) if len(able) > 1 else (part,):
                yield Route(rank, offsets, sizes, prod(sizes) * item_bytes, giver.held_as, [able[0]]), able


def _spread(route: Route, queue: _Queue, sent: list[int]) -> None:
    """Each tensor's part goes to the sender with the fewest bytes, of equal ones to the first. `queue`: a heap of bytes when
    they were looked at, place among those that are able, sender; nobody's bytes become fewer."""
    for k in range(len(route.senders)):
        while (n_bytes := sent[queue[0][2]]) > queue[0][0]:
            heapreplace(queue, (n_bytes, *queue[0][1:]))
        sender = queue[0][2]
        sent[sender] += route.n_bytes
        route.senders[k] = sender


def rows(part: Region, n_bytes: int, limit: int) -> Iterator[Region]:
    """The region in slices along dimension 0 of at most `limit` bytes each (one row at least)."""
    offsets, sizes = part
    if n_bytes <= limit or not sizes or sizes[0] < 2:
        yield part
        return
    step = max(1, limit * sizes[0] // n_bytes)
    for start in range(0, sizes[0], step):
        yield (offsets[0] + start, *offsets[1:]), (min(step, sizes[0] - start), *sizes[1:])


def shard_bytes(model: ModelProfile, cut: Cut, padded: bool = False) -> list[int]:
    """Bytes of the training state that each rank of the layout holds. `padded`: as FSDP has them in memory, where each part of
    a parameter that is not empty has the size of the largest."""
    return bytes_of(Side(model, cut), padded)


def bytes_of(side: Side, padded: bool = False) -> list[int]:
    """As `shard_bytes`."""
    out = [0] * side.layout.world_size
    for bundle in bundles(side.state, side, side):
        item_bytes = DTYPE_BYTES[bundle.first.spec.dtype] * len(bundle.tensors)
        ranks = side.ranks(bundle.old)
        pieces = side.pieces(bundle.first)
        for index, (_, sizes) in pieces.items():
            if padded and bundle.first.fsdp_cut:
                sizes = pieces[index[0], 0][1]
            for rank in ranks.get(index, ()):
                out[rank] += prod(sizes) * item_bytes
    return out


def _holders(ranks: Sequence[int], holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]) -> _Holders:
    out = _Holders()
    for rank in ranks:
        for participant in holders.get(rank, ()):
            if participant not in out.held_as:
                out.held_as[participant] = rank
                out.by_node.setdefault(nodes[participant], []).append(participant)
    return out


class Overlaps:
    """Of each new piece of a tensor with the old ones, made once for all tensors that are cut alike."""

    def __init__(self, source: Side, target: Side) -> None:
        self.source, self.target = source, target
        self._found: dict[Cutting, Mapping[Index, Sequence[tuple[Index, Region]]]] = {}

    def of(self, placed: Placed) -> Mapping[Index, Sequence[tuple[Index, Region]]]:
        cutting = cutting_of(placed)
        if cutting not in self._found:
            self._found[cutting] = _overlaps(self.source.pieces(placed), self.target.pieces(placed))
        return self._found[cutting]


def _overlaps(old: Mapping[Index, Region], new: Mapping[Index, Region]) -> dict[Index, list[tuple[Index, Region]]]:
    """For each new piece its parts, one for each old piece that it meets, in the order of the old ones."""
    columns: dict[Region, list[tuple[int, int, Index]]] = {}  # beyond dimension 0 -> end and place of each piece, its index
    for place, (index, (offsets, sizes)) in enumerate(old.items()):
        end = offsets[0] + sizes[0] if sizes else 0
        columns.setdefault((offsets[1:], sizes[1:]), []).append((end, place, index))
    for column in columns.values():
        column.sort()  # pieces of a column do not meet: by their ends they are in order
    out: dict[Index, list[tuple[Index, Region]]] = {}
    for index, wanted in new.items():
        met = [item for across, column in columns.items() for item in _met(wanted, across, column)]
        out[index] = [(old_index, part) for _, old_index in sorted(met) if (part := meet(wanted, old[old_index])) is not None]
    return out


def _met(wanted: Region, across: Region, column: Sequence[tuple[int, int, Index]]) -> Iterator[tuple[int, Index]]:
    """Place and index of each piece of the column that `wanted` meets."""
    offsets, sizes = wanted
    if meet((offsets[1:], sizes[1:]), across) is None:
        return
    first = bisect_right(column, offsets[0], key=itemgetter(0)) if sizes else 0
    for i in range(first, len(column)):
        end, place, index = column[i]
        yield place, index
        if sizes and end >= offsets[0] + sizes[0]:
            return


def _lost(placed: Placed, layout: Layout, ranks: Sequence[int]) -> StateLost:
    who = ", ".join(map(str, ranks))
    return StateLost(
        f"{placed.spec.fqn}: its part on rank {who} of the layout {layout} has no living holder; "
        "an older peer or durable copy is needed"
    )
