"""What a transition moves, as sums: all that a forecast needs, without a list of the parts.

Ranks of different stages get the same parts of other tensors: what is cut alike is laid out for one
stage, and counted for each. Where one participant alone has each old piece, who sends follows from
the piece, and only sums by sender's node are laid out for each rank. Integers only.
"""

from __future__ import annotations

import numpy as np

from elastic.reshard.pieces import Held, Ints, Overlaps, Side, StageBundles, TensorBundle, staged
from elastic.reshard.routes import Holdings, routed, runs, spread
from elastic.types import DTYPE_BYTES

DENSE = 4  # pairs of nodes for each key, up to which every pair has a place in a table


class Flows:
    """Bytes by participant: `own` stay with it, `sent` and `received` are exchanged with others,
    of these `near_sent` and `near_received` within its node. `node`: of each participant."""

    def __init__(self, node: Ints) -> None:
        self.node, self.n_nodes = node, int(node.max(initial=-1)) + 1
        shape = (5, len(node))
        self.own, self.sent, self.received, self.near_sent, self.near_received = np.zeros(
            shape, dtype=np.int64
        )
        self._links: list[tuple[Ints, Ints]] = []
        self._near: list[Ints] = []

    def add(self, senders: Ints, destinations: Ints, n_bytes: Ints) -> None:
        """From participant to participant."""
        own = senders == destinations
        np.add.at(self.own, destinations[own], n_bytes[own])
        senders, destinations, n_bytes = (x[~own] for x in (senders, destinations, n_bytes))
        np.add.at(self.sent, senders, n_bytes)
        self.add_received(self.node[senders], destinations, n_bytes)
        near = self.node[senders] == self.node[destinations]
        np.add.at(self.near_sent, senders[near], n_bytes[near])
        np.add.at(self.near_received, destinations[near], n_bytes[near])
        self._near.append(senders[near] * len(self.node) + destinations[near])

    def add_received(self, nodes: Ints, destinations: Ints, n_bytes: Ints) -> None:
        """From some participants of a node."""
        np.add.at(self.received, destinations, n_bytes)
        self._links.append((nodes * self.n_nodes + self.node[destinations], n_bytes))

    def links(self) -> tuple[Ints, Ints, Ints]:
        """Senders' nodes, receivers' nodes, bytes between them, in order."""
        keys, n_bytes = (np.concatenate(column) for column in zip(*self._links, strict=True))
        if self.n_nodes**2 > DENSE * len(keys):
            order = keys.argsort()
            keys, n_bytes = keys[order], n_bytes[order]
            first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
            keys, sums = keys[first], np.add.reduceat(n_bytes, first) if len(first) else n_bytes
        else:
            table = np.zeros(self.n_nodes**2, dtype=np.int64)
            np.add.at(table, keys, n_bytes)
            keys = np.flatnonzero(table)
            sums = table[keys]
        return *np.divmod(keys, self.n_nodes), sums

    def near_peers(self) -> Ints:
        """With how many others of its node each participant exchanges bytes."""
        n = len(self.node)
        one, other = np.divmod(np.concatenate(self._near), n)
        pairs = np.sort(np.concatenate([one * n + other, other * n + one]))
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
        return np.bincount(pairs // n, minlength=n)


def flows(source: Side, target: Side, held: Holdings) -> Flows:
    """Raises StateLost, naming the tensor, where a part has no holder."""
    overlaps, found = Overlaps(source, target), Flows(held.node)
    n_pieces = source.layout.tp * source.fsdp
    alone: dict[tuple[Held, Held], list[StageBundles]] = {}
    shared: list[TensorBundle] = []
    for same in staged(source, target):
        first = same.bundles[0]
        only = held.givers(first.old).only(n_pieces)
        if not first.new[3] and (only[overlaps.of(first.first).old] >= 0).all():
            alone.setdefault((first.old, ((), *first.new[1:])), []).append(same)
            continue
        routes, _, able = routed(same.together, overlaps, held)
        if (able > 1).any():
            shared += same.bundles
            continue
        times = same.counts[target.pp[routes.destination]]
        found.add(routes.senders[:, 0], routes.destination, routes.n_bytes * times)
    for (old, _), many in alone.items():
        _add_alone(found, many, overlaps, only=held.givers(old).only(n_pieces))
    if shared:
        _add_shared(
            found, sorted(shared, key=lambda bundle: bundle.tensors[0]), overlaps, held=held
        )
    return found


def _add_alone(found: Flows, many: list[StageBundles], overlaps: Overlaps, *, only: Ints) -> None:
    """Bundles that are held alike, whose pieces one participant each has (`only`)."""
    target = overlaps.target
    n_places = target.layout.pp
    # of one stage; in each other they follow in the same order
    numbers = target.numbers((tuple(range(n_places)), *many[0].bundles[0].new[1:]))
    numbers = numbers[: len(numbers) // n_places]
    alike: dict[tuple[int, ...], list[int]] = {}
    for place in range(n_places):
        counts = tuple(int(same.counts[place]) for same in many)
        alike.setdefault(counts, []).append(place)
    for counts, places in alike.items():
        rows = [
            (parts.new, only[parts.old], parts.elements * (DTYPE_BYTES[first.spec.dtype] * n))
            for same, n in zip(many, counts, strict=True)
            if n
            for first in (same.bundles[0].first,)
            for parts in (overlaps.of(first),)
        ]
        if any(len(new) for new, _, _ in rows):
            _add_stages(found, np.concatenate(rows, axis=1), numbers, places=np.array(places))


def _add_stages(found: Flows, rows: Ints, numbers: Ints, *, places: Ints) -> None:
    """`rows`: number of the new piece, who sends a part of it, bytes; `numbers`: of the piece that
    each rank of a stage holds; `places`: of the stages."""
    n_stages, n_nodes = len(places), found.n_nodes
    of_part = rows[0] * n_nodes + found.node[rows[1]]
    order = of_part.argsort(kind="stable")
    of_part, (new, senders, n_bytes) = of_part[order], rows[:, order]
    np.add.at(
        found.sent,
        senders,
        n_bytes * (np.bincount(numbers, minlength=int(new[-1]) + 1)[new] * n_stages),
    )
    # the parts of a new piece that a node has
    first = np.flatnonzero(np.append(True, of_part[1:] != of_part[:-1]))
    length = np.diff(np.append(first, len(of_part)))
    pieces, nodes = np.divmod(of_part[first], n_nodes)
    sums = np.add.reduceat(n_bytes, first)
    begin = pieces.searchsorted(numbers)
    n = pieces.searchsorted(numbers, "right") - begin
    at, ranks = runs(begin, n), np.arange(len(numbers)).repeat(n)
    destinations = (ranks + len(numbers) * places[:, None]).ravel()
    at = np.tile(at, n_stages)
    near = nodes[at] == found.node[destinations]
    far = ~near
    found.add_received(nodes[at[far]], destinations[far], sums[at[far]])
    # within its node part by part: who keeps and who sends
    at, destinations = at[near], destinations[near].repeat(length[at[near]])
    parts = runs(first[at], length[at])
    np.subtract.at(found.sent, senders[parts], n_bytes[parts])
    found.add(senders[parts], destinations, n_bytes[parts])


def _add_shared(
    found: Flows, several: list[TensorBundle], overlaps: Overlaps, *, held: Holdings
) -> None:
    """Bundles of which several participants could send parts."""
    chosen = [routed(bundle, overlaps, held) for bundle in several]
    spread(chosen, found.sent.copy())
    for routes, _, _ in chosen:
        each = len(routes.bundle.tensors) // routes.senders.shape[1]
        times = routes.senders.shape[1]
        found.add(
            routes.senders.ravel(),
            routes.destination.repeat(times),
            (routes.n_bytes * each).repeat(times),
        )
