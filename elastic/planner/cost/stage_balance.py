"""Blocks that are not alike over the stages of a pipeline, so that the slowest one takes least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from elastic.types import Layout, grid


@lru_cache(4096)
def balanced(loads: tuple[float, ...], n_stages: int, ends: float = 0.0) -> tuple[int, ...]:
    """Blocks per stage: the cut whose slowest stage takes least, and of those one whose stages are
    more alike. `loads`: what each block takes, `ends`: what the head does besides."""
    total = [0.0, *accumulate(loads)]
    n = len(loads)
    # of the blocks before each: the slowest stage, the sum of squares, where the last one begins
    best = [(t, t * t, 0) for t in total]
    begins: list[list[tuple[float, float, int]]] = []
    for stage in range(2, n_stages + 1):
        more = ends if stage == n_stages else 0.0
        now = [(math.inf, math.inf, 0)] * (n + 1)
        for stop in range(stage, n + 1):
            for start in range(stop - 1, stage - 2, -1):
                own = total[stop] - total[start] + more
                slowest, squares, _ = best[start]
                now[stop] = min(now[stop], (max(slowest, own), squares + own * own, start))
                if own > now[stop][0]:
                    break
        best, begins = now, [*begins, now]
    cuts = [n]
    for found in reversed(begins):
        cuts.append(found[cuts[-1]][2])
    cuts = [*cuts, 0][::-1]
    return tuple(b - a for a, b in zip(cuts, cuts[1:]))


def loads_at(layout: Layout, layers: Sequence[int], loads: tuple[float, ...]) -> list[float]:
    """What the blocks of each place of the pp axis take, in mean blocks."""
    total, cuts = [0.0, *accumulate(loads)], [0, *accumulate(layers)]
    each = [total[b] - total[a] for a, b in zip(cuts, cuts[1:])]
    return [sum(each[stage] for stage in grid.stages_at(layout, p)) for p in range(layout.pp)]
