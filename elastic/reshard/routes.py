"""Who sends what to whom, for all tensors at once: own memory first, then the same node, then the
sender with the least to do.

The distinct pieces of a tensor under the old layout are a partition of it, so each new box is the
union of its overlaps with them: every overlap gets one sender among the piece's holders, and
coverage is exact by construction.

Tensors of equal shape and placement (the blocks of a stage, parameter and moments) have equal
overlaps: they are one bundle.

Balance: parts with few possible senders are placed first, the largest of them first, each on the
sender with the fewest bytes. Where the sets of possible senders are nested or disjoint, the busiest
sender then has at most the optimum and one part: when its last part was placed, every possible
sender of it had as much as the busiest less that part, all of it from parts that only these senders
could send. Sets overlap otherwise where replicas, nodes and tensor parallelism cut across each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.errors import StateLost
from elastic.reshard.pieces import Cut, Held, Ints, Overlaps, Side, TensorBundle, bundles, distinct
from elastic.reshard.rank_boxes import Placed, Region
from elastic.types import DTYPE_BYTES, Layout, ModelProfile
from elastic.types.grid import replica_keys

# parts that several could send are cut along dimension 0 to at most this, so that several do
SPREAD_BYTES = 64 << 20
# of those who could send a part, and of its tensors, on average of parts that others could send:
# below it arrays take longer than a loop
FEW = 64
TOGETHER_LEAST = 2500  # of senders and parts, below which arrays take longer than a loop


@dataclass(frozen=True)
class Routes:
    """Parts of each tensor of a bundle on their way, in the order of destinations and offsets.
    `n_bytes`: of one tensor; `senders`: [part, tensor], or [part, 1] where none has a choice;
    `old`: the piece of which it is a part."""

    bundle: TensorBundle
    destination: Ints
    start: Ints
    size: Ints
    across: Ints
    old: Ints
    regions: list[Region]
    n_bytes: Ints
    senders: Ints
    givers: Givers

    def region(self, i: int) -> Region:
        """Of part i."""
        offsets, sizes = self.regions[self.across[i]]
        if not self.bundle.first.spec.shape:
            return offsets, sizes
        return (int(self.start[i]), *offsets), (int(self.size[i]), *sizes)


def plan_routes(
    model: ModelProfile,
    old: Cut,
    new: Cut,
    *,
    holders: Mapping[int, tuple[int, ...]],
    nodes: Sequence[str],
) -> list[Routes]:
    """The routes of each bundle; equal input gives equal output.

    `holders`: rank of the old layout -> participants that hold its boxes. `nodes`: node of each
    participant, ranks of the new layout first. Raises StateLost, naming the tensor, when a part has
    no holder.
    """
    return routes_between(Side(model, old), Side(model, new), holders, nodes=nodes)


def routes_between(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], *, nodes: Sequence[str]
) -> list[Routes]:
    """As `plan_routes`."""
    overlaps, held = Overlaps(source, target), Holdings(source, holders, nodes)
    found = [routed(bundle, overlaps, held) for bundle in bundles(source, target)]
    spread(found, np.zeros(len(nodes), dtype=np.int64))
    return [routes for routes, _, _ in found]


def routed(bundle: TensorBundle, overlaps: Overlaps, held: Holdings) -> tuple[Routes, Ints, Ints]:
    """Routes, and for each the first of those that could send it, a place in the givers' `who`, and
    how many there are."""
    first, source, target = bundle.first, overlaps.source, overlaps.target
    parts, givers = overlaps.of(first), held.givers(bundle.old)
    numbers = target.numbers(bundle.new)
    begin = parts.new.searchsorted(numbers)
    n = parts.new.searchsorted(numbers, "right") - begin
    at, destination = runs(begin, n), np.arange(len(numbers)).repeat(n)
    place, able = givers.able(parts.old[at], destination)
    if not able.all():
        missing = source.numbers(bundle.old) == parts.old[at[able.argmin()]]
        raise _lost(first, source.layout, missing.nonzero()[0].tolist())
    start, size = parts.start[at], parts.size[at]
    row_bytes = parts.row_elements[parts.across[at]] * DTYPE_BYTES[first.spec.dtype]
    several = able > 1
    cut = several & (size * row_bytes > SPREAD_BYTES)
    if cut.any():  # in slices of a row at least
        step = np.where(cut, np.maximum(1, SPREAD_BYTES // row_bytes), size)
        slices = -(-size // step)
        k, each = runs(np.zeros_like(slices), slices), np.arange(len(slices)).repeat(slices)
        destination, at, place, able, row_bytes = (
            x[each] for x in (destination, at, place, able, row_bytes)
        )
        start, size = (
            start[each] + k * step[each],
            np.minimum(step[each], size[each] - k * step[each]),
        )
    senders = givers.who[place][:, None]
    if several.any():
        senders = senders.repeat(len(bundle.tensors), axis=1)
    where = (bundle, destination, start, size, parts.across[at], parts.old[at], parts.regions)
    return Routes(*where, size * row_bytes, senders, givers), place, able


def spread(found: Sequence[tuple[Routes, Ints, Ints]], sent: Ints) -> None:
    """Each tensor's part goes to the sender with the fewest bytes, of equal ones to the first.
    `sent`: of each participant, by routes that are not among these."""
    shared = [np.empty((5, 0), dtype=np.int64)]
    for b, (routes, place, able) in enumerate(found):
        alone = (able == 1) & (routes.senders[:, 0] != routes.destination)
        np.add.at(
            sent, routes.senders[alone, 0], routes.n_bytes[alone] * len(routes.bundle.tensors)
        )
        some = np.flatnonzero(able > 1)
        shared.append(
            np.array([able[some], -routes.n_bytes[some], np.full_like(some, b), place[some], some])
        )
    rows = np.concatenate(shared, axis=1)
    rows = rows[:, np.lexsort((rows[4], *rows[2::-1]))]
    n_pairs = int((rows[0] == 2).sum())
    if n_pairs:
        between_two([routes for routes, _, _ in found], rows[:, :n_pairs], sent)
        rows = rows[:, n_pairs:]
    widths = np.array([routes.senders.shape[1] for routes, _, _ in found], dtype=np.int64)
    groups = len(distinct(rows[2] + rows[3] * len(found)))
    if (rows[0] * widths[rows[2]]).sum() <= FEW * groups:
        in_turn([routes for routes, _, _ in found], rows, sent)
        return
    for equal in cut_where_new(rows, 3):
        n, minus_bytes, b = equal[:3, 0].tolist()
        routes = found[b][0]
        for first, parts in choices(equal[3], equal[4], n, who=routes.givers.who):
            who = routes.givers.who[first : first + n]
            loads, times = sent[who], routes.senders[parts].size
            choose = least_loaded if times * (n + 8) > TOGETHER_LEAST else one_by_one
            places = choose(loads, -minus_bytes, times)
            sent[who] = loads - minus_bytes * np.bincount(places, minlength=n)
            routes.senders[parts] = who[places].reshape(len(parts), -1)


def between_two(found: Sequence[Routes], rows: Ints, sent: Ints) -> None:
    """As `spread` of these rows, each of which two could send: the one with less sends first, until
    it has as much as the other, then both by turns. So who sends which follows from by how many
    parts they differ."""
    loads = sent.tolist()
    for equal in cut_where_new(rows, 3):
        _, minus_bytes, b = equal[:3, 0].tolist()
        who, senders, n_bytes = found[b].givers.who, found[b].senders, -minus_bytes
        n = senders.shape[1]
        # place 0 ... n - 1: so many more than one by the first; -1 ... -n: so many by the second
        turns = np.arange(n)
        lead = np.minimum(turns[:, None], turns)
        ahead = (turns - lead) % 2
        orders = np.concatenate([ahead, 1 - ahead[::-1]])
        seconds = orders.sum(axis=1)
        by_first, by_second = ((n_bytes * k).tolist() for k in (n - seconds, seconds))
        able = who[equal[3, :, None] + np.arange(2)]
        chosen = []
        for one, other in able.tolist():
            k = (loads[other] - loads[one]) // n_bytes
            k = k if -n <= k < n else n - 1 if k > 0 else -n
            chosen.append(k)
            loads[one] += by_first[k]
            loads[other] += by_second[k]
        senders[equal[4]] = np.take_along_axis(able, orders[chosen], axis=1)
    sent[:] = loads


def in_turn(found: Sequence[Routes], rows: Ints, sent: Ints) -> None:
    """As `spread` of these rows: one after the other, in plain numbers."""
    loads = sent.tolist()
    who = {b: found[b].givers.who.tolist() for b in distinct(rows[2]).tolist()}
    chosen: list[list[list[int]]] = [[] for _ in found]
    for n, minus_bytes, b, first, _ in rows.T.tolist():
        able = who[b][first : first + n]
        left, senders = [loads[one] for one in able], list[int]()
        for _ in range(found[b].senders.shape[1]):
            place = left.index(min(left))
            left[place] -= minus_bytes
            senders.append(able[place])
        for one, load in zip(able, left, strict=True):
            loads[one] = load
        chosen[b].append(senders)
    for b, routes in enumerate(found):
        if chosen[b]:
            routes.senders[rows[4, rows[2] == b]] = chosen[b]
    sent[:] = loads


def choices(first: Ints, parts: Ints, n: int, *, who: Ints) -> Iterator[tuple[int, Ints]]:
    """Parts of one size that n participants each could send, those from place `first` in `who`:
    such as can be chosen for at once, since the same could send them, and nobody who could send
    others before them."""
    several = distinct(first)
    members = who[several[:, None] + np.arange(n)].ravel()
    rows = np.array([first, parts])
    if len(distinct(members)) == len(members):
        rows = rows[:, first.argsort(kind="stable")]
    for same in cut_where_new(rows, 1):
        yield int(same[0, 0]), same[1]


def cut_where_new(rows: Ints, n: int) -> list[Ints]:
    """Columns that follow each other and are equal in the first n rows."""
    if not rows.shape[1]:
        return []
    ends = np.flatnonzero((rows[:n, 1:] != rows[:n, :-1]).any(axis=0)) + 1
    return np.split(rows, ends, axis=1)


def one_by_one(loads: Ints, amount: int, times: int) -> Ints:
    """As `least_loaded`, sooner where few choose among few."""
    left, places = loads.tolist(), []
    for _ in range(times):
        places.append(left.index(min(left)))
        left[places[-1]] += amount
    return np.array(places)


def least_loaded(loads: Ints, amount: int, times: int) -> Ints:
    """Places of `loads`: each time the one with the least, of equal ones the first, which then has
    so much more. All times at once: these are the least of what each would have after 0, 1, 2 ...
    times. None is chosen at more than what the m with the least would have if they alone were."""
    n, above = len(loads), loads - loads.min()
    together = np.cumsum(np.sort(above)) + times * amount
    most = int((together // np.arange(1, n + 1)).min()) + amount
    often = np.maximum(0, (most - above) // amount + 1)
    each = np.arange(n).repeat(often)
    after = above[each] + amount * runs(np.zeros_like(often), often)
    return np.sort(after * n + each)[:times] % n


def runs(first: Ints, n: Ints) -> Ints:
    """first[0], first[0] + 1, ... n[0] of them, then those from first[1], and so on."""
    ends: Ints = np.cumsum(n, dtype=np.int64)
    return (first - (ends - n)).repeat(n) + np.arange(ends[-1] if len(ends) else 0)


def alike(
    source: Side, holders: Mapping[int, tuple[int, ...]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Of ranks with equal boxes that the same participants hold (`holders_of` gives them the same
    tuple) the first: under plain data parallelism each of thousands has the boxes of each."""
    keys = replica_keys(source.layout, source.model.by_owners)
    if isinstance(keys, range):  # each has its own
        return list(holders.items())
    found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    for rank, held in holders.items():
        found.setdefault((keys[rank], id(held)), (rank, held))
    return list(found.values())


class Holdings:
    """Which participants have which old ranks' boxes; `nodes`: of each participant.

    `node`: of each participant the number of its own. `ranks`, `who`: an old rank and a participant
    that has its boxes."""

    def __init__(
        self,
        source: Side,
        holders: Mapping[int, tuple[int, ...]],
        nodes: Sequence[str] | Sequence[int],
    ) -> None:
        known = {rank: holders[rank] for rank in range(source.layout.world_size) if rank in holders}
        each = alike(source, known)
        self._source = source
        self.ranks = np.array([rank for rank, _ in each], dtype=np.int64).repeat(
            [len(held) for _, held in each]
        )
        self.who = np.array([who for _, held in each for who in held], dtype=np.int64)
        names: list[Any] = sorted(set(nodes))
        number = {name: i for i, name in enumerate(names)}
        self.node = np.array([number[name] for name in nodes], dtype=np.int64)
        self._found: dict[Held, Givers] = {}

    def givers(self, held: Held) -> Givers:
        if held not in self._found:
            pieces = self._source.numbers(held)[self.ranks]
            there = pieces >= 0
            self._found[held] = Givers(
                pieces[there], self.ranks[there], self.who[there], node=self.node
            )
        return self._found[held]


class Givers:
    """Who can give the pieces that tensors of one `Held` are cut into. `who`: each once for each
    piece by itself, then those of a node, then all, in the order given."""

    def __init__(self, pieces: Ints, ranks: Ints, who: Ints, *, node: Ints) -> None:
        self._node, self._n_nodes, self._n = node, int(node.max(initial=0)) + 1, len(node)
        # of several ranks with equal boxes the first
        own, first = np.unique(pieces * self._n + who, return_index=True)
        self._ranks = ranks[first]
        given = np.sort(first)
        pieces, everyone = pieces[given], who[given]
        near = pieces * self._n_nodes + node[everyone]
        by_node, by_piece = np.argsort(near, kind="stable"), np.argsort(pieces, kind="stable")
        self._keys = own, near[by_node], pieces[by_piece]
        self.who = np.concatenate([who[first], everyone[by_node], everyone[by_piece]])

    def only(self, n_pieces: int) -> Ints:
        """[piece]: the participant that alone has it; -1 where nobody or several do."""
        pieces, who = np.divmod(self._keys[0], self._n)
        found = np.full(n_pieces, -1, dtype=np.int64)
        found[pieces] = np.where(np.bincount(pieces, minlength=n_pieces)[pieces] == 1, who, -1)
        return found

    def able(self, pieces: Ints, destinations: Ints) -> tuple[Ints, Ints]:
        """Who could send each piece there: the first, as a place in `who`, and how many."""
        asked = (
            pieces * self._n + destinations,
            pieces * self._n_nodes + self._node[destinations],
            pieces,
        )
        first, n = np.zeros_like(pieces), np.zeros_like(pieces)
        for level, (keys, wanted) in enumerate(zip(self._keys, asked, strict=True)):
            begin = keys.searchsorted(wanted)
            found = keys.searchsorted(wanted, "right") - begin
            first, n = np.where(n, first, level * len(self._ranks) + begin), np.where(n, n, found)
        return first, n

    def holding(self, pieces: Ints, senders: Ints) -> Ints:
        """The old rank whose boxes the sender of a piece reads."""
        found: Ints = self._ranks[self._keys[0].searchsorted(pieces * self._n + senders)]
        return found


def _lost(placed: Placed, layout: Layout, ranks: Sequence[int]) -> StateLost:
    who = ", ".join(map(str, ranks))
    return StateLost(
        f"{placed.spec.fqn}: its part on rank {who} of the layout {layout} has no living holder; "
        "an older peer or checkpoint is needed"
    )
