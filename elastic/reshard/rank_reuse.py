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

from elastic.reshard.pieces import Cut, Overlaps, Side, bundles
from elastic.types import DTYPE_BYTES, ModelProfile, WorkerId

MOST_WORKERS = 256  # above it the order is left as it is: the method would take more than a second

Matrix = list[list[int]]


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

    def within(slots: Sequence[int], workers: Sequence[int]) -> list[tuple[int, int]]:
        """Which worker of a node becomes which rank of one: rank, worker."""
        best = _best([[kept[rank][w] for w in workers] for rank in slots])
        return [(slots[i], workers[k]) for i, k in enumerate(best)]

    for group in alike.values():
        if len(group[0]) == 1:  # a node's one worker has no choice
            totals = [[kept[rank][w] for (w,) in group] for (rank,) in group]
        else:
            totals = [
                [sum(kept[rank][w] for rank, w in within(slots, workers)) for workers in group]
                for slots in group
            ]
        for slots, b in zip(group, _best(totals), strict=True):
            for rank, w in within(slots, group[b]):
                out[rank] = ranks[w]
    return tuple(out)


def kept_bytes(model: ModelProfile, cuts: tuple[Cut, Cut], held: Sequence[Sequence[int]]) -> Matrix:
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
    found: Matrix = out.T.tolist()
    return found


def _best(gain: Matrix) -> list[int]:
    """Row -> column with the largest sum of gains; where several are as good, rows keep their own
    column."""
    n = len(gain)
    stay = n + 1
    cost = [[-(g * stay) - (i == j) for j, g in enumerate(row)] for i, row in enumerate(gain)]
    return _assigned(cost)


def _assigned(cost: Matrix) -> list[int]:
    """Row -> column with the smallest sum of costs."""
    n = len(cost)
    rows, columns = [0] * (n + 1), [0] * (n + 1)  # potentials; index 0 is a place to start from
    row_of = [0] * (n + 1)
    for row in range(1, n + 1):
        row_of[0], at = row, 0
        least: list[float] = [float("inf")] * (n + 1)
        before, seen = [0] * (n + 1), [False] * (n + 1)
        while True:
            seen[at] = True
            here, step, following = row_of[at], float("inf"), 0
            for column in range(1, n + 1):
                if not seen[column]:
                    reduced = cost[here - 1][column - 1] - rows[here] - columns[column]
                    if reduced < least[column]:
                        least[column], before[column] = reduced, at
                    if least[column] < step:
                        step, following = least[column], column
            for column in range(n + 1):
                if seen[column]:
                    rows[row_of[column]] += int(step)
                    columns[column] -= int(step)
                else:
                    least[column] -= step
            at = following
            if not row_of[at]:
                break
        while at:
            row_of[at], at = row_of[before[at]], before[at]
    out = [0] * n
    for column in range(1, n + 1):
        out[row_of[column] - 1] = column - 1
    return out
