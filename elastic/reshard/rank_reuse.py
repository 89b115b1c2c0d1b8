"""Which worker becomes which rank, so that as many bytes as possible need not move at all. Integers
only.

Nodes change places with nodes of their kind only, and workers within their node, so that what the
planner put inside a node stays there. Each is an assignment problem: the Hungarian method (Kuhn
1955) with shortest augmenting paths, O(n**3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from elastic.reshard.pieces import Cut, Ints, Overlaps, Side, bundles
from elastic.types import DTYPE_BYTES, ModelProfile, WorkerId

MOST_WORKERS = 256  # above it the order is left as it is

UNSEEN = 1 << 61  # more bytes than there are


def place(
    model: ModelProfile,
    cuts: tuple[Cut, Cut],
    held: Mapping[WorkerId, Sequence[int]],
    *,
    ranks: Sequence[WorkerId],
    kinds: Mapping[str, Hashable],
) -> tuple[WorkerId, ...]:
    """The same workers in the order of ranks that keeps most bytes in place. `cuts`: old and new;
    `held`: worker -> old ranks whose boxes it has; `kinds`: node -> what it must have in common
    with a node that takes its place."""
    by_node: dict[str, list[int]] = {}
    for rank, worker in enumerate(ranks):
        by_node.setdefault(worker.node_id, []).append(rank)
    if len(ranks) > MOST_WORKERS or len(ranks) < 2:
        return tuple(ranks)
    kept = kept_bytes(model, cuts, [held.get(worker, ()) for worker in ranks])
    alike: dict[tuple[Hashable, int], list[list[int]]] = defaultdict(list)
    for node, slots in by_node.items():
        alike[kinds.get(node), len(slots)].append(slots)
    out = list(ranks)
    for of_kind in alike.values():
        group = np.array(of_kind)
        # [node, node]: which worker of the second becomes which rank of the first, and what it has
        gains = kept[group[:, None, :, None], group[None, :, None, :]]
        n_nodes, n = group.shape
        each, which = np.unique(gains.reshape(-1, n * n), axis=0, return_inverse=True)
        within = np.array([_best(gain.reshape(n, n)) for gain in each])
        totals = np.take_along_axis(each.reshape(-1, n, n), within[:, :, None], axis=2).sum((1, 2))
        which = which.reshape(n_nodes, n_nodes)
        for i, k in enumerate(_best(totals[which])):
            for rank, worker in zip(of_kind[i], group[k][within[which[i, k]]], strict=True):
                out[rank] = ranks[worker]
    return tuple(out)


def kept_bytes(model: ModelProfile, cuts: tuple[Cut, Cut], held: Sequence[Sequence[int]]) -> Ints:
    """[new rank][worker]: bytes of the rank's boxes that the worker has already; `held[w]`: the old
    ranks that it has."""
    source, target = Side(model, cuts[0]), Side(model, cuts[1])
    overlaps = Overlaps(source, target)
    pairs = [(worker, rank) for worker, ranks in enumerate(held) for rank in ranks]
    workers, ranks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    out = np.zeros((len(held), target.layout.world_size), dtype=np.int64)
    n_old, n_new = source.layout.tp * source.fsdp, target.layout.tp * target.fsdp
    for bundle in bundles(source, target):
        parts = overlaps.of(bundle.first)
        # the last one: of ranks that hold no piece
        n_bytes = np.zeros((n_old, n_new + 1), dtype=np.int64)
        n_bytes[parts.old, parts.new] = parts.elements * (
            DTYPE_BYTES[bundle.first.spec.dtype] * len(bundle.tensors)
        )
        pieces = source.numbers(bundle.old)[ranks]
        has = np.unique(np.stack([workers, pieces], axis=1)[pieces >= 0], axis=0)
        np.add.at(out, has[:, 0], n_bytes[has[:, 1]][:, target.numbers(bundle.new)])
    return out.T


def _best(gain: Ints) -> Ints:
    """Row -> column with the largest sum of gains; where several are as good, rows keep their own
    column."""
    n = len(gain)
    return _assigned(-gain * (n + 1) - np.eye(n, dtype=np.int64))


def _assigned(cost: Ints) -> Ints:
    """Row -> column with the smallest sum of costs."""
    n = len(cost)
    rows, columns = np.zeros((2, n), dtype=np.int64)  # potentials
    row_of = np.full(n + 1, -1)  # the last column is a place to start from
    for row in range(n):
        row_of[n], at, far = row, n, 0
        least, before, seen = np.full(n, UNSEEN), np.full(n, n), np.zeros(n, dtype=np.int64)
        while row_of[at] >= 0:  # the column that is next nearest by the rows of those before it
            here = row_of[at]
            through = cost[here] - columns + (far - rows[here])
            np.copyto(before, at, where=through < least)
            np.minimum(least, through, out=least)
            at = int((least + seen).argmin())
            far = least[at]
            seen[at] = UNSEEN
        closer = np.flatnonzero(seen)
        gained = far - least[closer]
        columns[closer] -= gained
        rows[row] += far
        rows[row_of[closer[gained > 0]]] += gained[gained > 0]
        while at != n:
            row_of[at] = row_of[before[at]]
            at = before[at]
    found = np.empty(n, dtype=np.int64)
    found[row_of[:n]] = np.arange(n)
    return found
