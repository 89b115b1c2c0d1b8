"""Unequal batch shares for heterogeneous GPUs: samples per data-parallel rank, layers per stage.
Integers only."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from heapq import heapify, heappop, heapreplace

from elastic.errors import InfeasiblePlan
from elastic.planner.cost.stage_balance import balanced
from elastic.types import Layout, grid


def shares(
    n_units: int, speeds: Sequence[float], unit: int = 1, *, most: Sequence[int] = ()
) -> tuple[int, ...]:
    """Divides n_units x unit samples over the ranks: multiples of `unit`, at least one each, in
    proportion to the speeds.

    Each further unit goes where the rank would finish first; equal speeds get shares that differ by
    one unit at most. `most`: units that each rank can take.
    """
    if n_units < len(speeds):
        raise InfeasiblePlan(
            f"{n_units} shares of {unit} samples for {len(speeds)} data-parallel ranks: each "
            "needs at least one"
        )
    if most and (sum(most) < n_units or min(most) < 1):
        raise InfeasiblePlan(
            f"of {n_units * unit} samples the memory of {len(speeds)} ranks holds "
            f"{sum(most) * unit}"
        )
    if not most and min(speeds) == max(speeds):  # the first ones have one more
        base, more = divmod(n_units, len(speeds))
        return ((base + 1) * unit,) * more + (base * unit,) * (len(speeds) - more)
    # until then nobody is done with what it surely gets
    sure = (n_units - len(speeds)) / sum(speeds) * (1 - 1e-9)
    limits = most or [n_units] * len(speeds)
    units = [
        min(max(1, int(sure * speed)), limit) for speed, limit in zip(speeds, limits, strict=True)
    ]
    # with one more unit
    finish = [((units[i] + 1) / speed, i) for i, speed in enumerate(speeds) if units[i] < limits[i]]
    heapify(finish)
    for _ in range(n_units - sum(units)):
        _, i = finish[0]
        units[i] += 1
        if units[i] < limits[i]:
            heapreplace(finish, ((units[i] + 1) / speeds[i], i))
        else:
            heappop(finish)
    return tuple(n * unit for n in units)


def stage_layers(
    n_blocks: int, n_stages: int, loads: tuple[float, ...] = (), *, ends: float = 0.0
) -> tuple[int, ...]:
    """Blocks per stage, as equal as possible; the earlier stages take one more (the last one also
    has the head). `loads`: what each block takes, where they are not alike, and `ends` what the
    head does: the slowest stage is then as fast as it can be."""
    check_stages(n_blocks, n_stages)
    if loads and n_stages > 1:
        return balanced(loads, n_stages, ends)
    base, more = divmod(n_blocks, n_stages)
    return tuple(base + (stage < more) for stage in range(n_stages))


def check_stages(n_blocks: int, n_stages: int) -> None:
    """Raises InfeasiblePlan where there are too few blocks."""
    if not 1 <= n_stages <= max(1, n_blocks):
        raise InfeasiblePlan(
            f"{n_stages} pipeline stages need at least {n_stages} blocks, the model has {n_blocks}"
        )


def blocks_at(layout: Layout, layers: Sequence[int]) -> list[int]:
    """Blocks of each place of the pp axis, over all of its stages."""
    return [sum(layers[stage] for stage in grid.stages_at(layout, p)) for p in range(layout.pp)]


def busy_s(
    layout: Layout,
    samples: Sequence[int],
    layers: Sequence[int],
    *,
    n_microbatches: int,
    rates: Sequence[float],
) -> float:
    """Seconds of a step in which the busiest data-parallel rank computes, waiting for its
    pipeline's other stages included and collectives left out. `rates`: units of work that each rank
    gets done per second (the model's samples x blocks); a tp x cp group works as fast as its
    slowest member allows. Of stages that take t_p per microbatch, m microbatches take (m - 1) max
    t_p + sum t_p (1F1B, Narayanan et al. 2019, section 3.2)."""
    inner, stage, m = layout.cp * layout.tp, layout.world_size // layout.pp, max(1, n_microbatches)
    blocks = [n or 1 for n in blocks_at(layout, layers)]
    slowest = 0.0
    for d, n in enumerate(samples):
        groups = [
            rates[p * stage + d * inner : p * stage + (d + 1) * inner] for p in range(layout.pp)
        ]
        times = [n / m * blocks[p] / (inner * min(group)) for p, group in enumerate(groups)]
        slowest = max(slowest, (m - 1) * max(times) + sum(times))
    return slowest


def microbatches(global_batch: int, layout: Layout, together: int = 1) -> int:
    """Number of microbatches of a step, the same on every rank; it divides the global batch.
    `together`: see ModelProfile.

    With a microbatch size: the fewest whose largest share fits into it. Else 1 without pp; with pp
    the largest divisor that is at most 2 pp (from pp on the pipeline is full) and leaves each
    data-parallel rank a sample per microbatch.
    """
    dp, unit = layout.dp, max(1, together)
    n_units, of = global_batch // unit, f" in groups of {unit}" if unit > 1 else ""
    found = _feeding(n_units, dp)
    if (n_stages := layout.n_stages) > layout.pp:
        found = tuple(d for d in found if grid.fills_rounds(layout.pp, n_stages, d))
    if not together:
        found = tuple(n for n in found if n == 1)  # all that a rank has, at once
    if not found:
        raise InfeasiblePlan(
            f"a global batch of {global_batch} samples{of} cannot feed {layout.dp} data-parallel "
            "ranks"
        )
    if layout.microbatch_size:
        most = layout.microbatch_size // unit * dp
        fewest = bisect_left(found, -(-n_units // most)) if most else len(found)
        if fewest < len(found):
            return found[fewest]
        why = (
            f"divides {global_batch} samples{of} over {dp} data-parallel ranks into pieces of at "
            "most that size"
        )
        if not together:
            why = (
                "but one: results depend on which samples stand together, so a rank computes all "
                "that it has of a step at once; leave microbatch_size out"
            )
        raise InfeasiblePlan(
            f"microbatch_size={layout.microbatch_size}: no number of microbatches {why}"
        )
    if layout.pp == 1:
        return 1
    return max(d for d in found if d <= 2 * layout.pp)


@lru_cache(4096)
def _feeding(n_units: int, dp: int) -> tuple[int, ...]:
    """Numbers of microbatches that divide the batch and feed each rank; rising."""
    found = divisors(n_units)
    return found[: bisect_right(found, n_units // dp)]


def most_that(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to the limit that fits, by halving; 0 = none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@cache
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))
