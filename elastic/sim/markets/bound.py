"""The least that the job can cost, for somebody who knows the whole trace: no policy can do better.

Nodes are looked at one by one (the k-th spot node is there while the zones together have k). Any
use of n nodes is one of n single nodes with no more starts than its own, so the sum over single
nodes bounds it from below. Each has a curve, dollars for so much work until the deadline, made by a
dynamic program over the ticks; what they do together is the cheapest way to share the work between
them.

For one node the answer is exact in units of the world (a tick cut into `parts`); for several it may
be below what is possible, never above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.sim.markets.tick_world import Mode, TickView, TickWorld, play

Curve = NDArray[np.float64]
IDLE, SPOT, ON_DEMAND = 0, 1, 2
MODES: tuple[Mode, ...] = ("idle", "spot", "on-demand")


def least_usd(world: TickWorld, parts: int = 4) -> float:
    """Dollars; infinite where the deadline cannot be met. Starts and work are rounded down to a
    tick / `parts`, so that the answer stays a bound."""
    return least_usd_until(world, [world.n_ticks], parts)[0]


def least_usd_until(world: TickWorld, ticks: Sequence[int], parts: int = 4) -> list[float]:
    """For several deadlines of the same world at once, each at the end of so many ticks."""
    unit_s = world.tick_s / parts
    # the work of one node in units, what all of them have to do together
    whole = int(world.work_node_s / unit_s + 1e-9)
    each = min(whole, max(ticks) * parts)
    there = np.array([world.there(tick) for tick in range(world.n_ticks)])
    known: dict[bytes, list[Curve]] = {}
    curves: list[list[Curve]] = []
    for k in range(world.n_nodes):
        row = there > k
        key = row.tobytes()
        if key not in known:
            known[key] = list(_curves(world, row, ticks, each=each, parts=parts))
        curves.append(known[key])
    return [_shared([one[k] for one in curves], whole) for k in range(len(ticks))]


def _curves(
    world: TickWorld, row: NDArray[np.bool_], ticks: Sequence[int], *, each: int, parts: int
) -> Iterator[Curve]:
    """Of one node: [units of work] -> dollars, at the end of each of `ticks`, in their order."""
    unit_h = world.tick_s / parts / 3600
    start = int(world.start_s / (world.tick_s / parts) + 1e-9)
    prices = {SPOT: world.spot_usd_per_h * unit_h, ON_DEMAND: world.on_demand_usd_per_h * unit_h}
    best = np.full(each + 1, np.inf)
    best[0] = 0.0
    # mode -> what it costs to have it, by units until it works and units of work done
    on = {mode: np.full((start + 1, each + 1), np.inf) for mode in prices}
    found: dict[int, Curve] = {}
    last = max(ticks)
    for tick in range(last):
        for _ in range(parts):
            for mode, usd in prices.items():
                if mode == SPOT and not row[tick]:
                    on[mode][:] = np.inf
                    continue
                on[mode] = _unit(on[mode], best, usd)
            best = np.minimum(best, np.minimum(on[SPOT].min(axis=0), on[ON_DEMAND].min(axis=0)))
        found[tick + 1] = best
    for tick in ticks:
        yield found[tick]


def _unit(on: Curve, best: Curve, usd: float) -> Curve:
    """One unit of time in a mode: `on[r]` has r units of its start before it. A node may be started
    now, from whatever was cheapest."""
    begun = np.minimum(on, np.inf)
    begun[-1] = np.minimum(on[-1], best)  # started now: all units of its start before it
    after = np.full_like(on, np.inf)
    after[:-1] = begun[1:]  # one unit of the start has passed
    after[0, 1:] = np.minimum(after[0, 1:], begun[0, :-1])  # or a unit of work is done
    after[0, -1] = min(after[0, -1], float(begun[0, -1]))
    return after + usd


def _shared(curves: Sequence[Curve], whole: int) -> float:
    """The least for `whole` units of work, by one node exactly, by several on the lower convex hull
    of each curve: the cheapest units first."""
    if len(curves) == 1:
        return float(curves[0][whole]) if whole < len(curves[0]) else float("inf")
    slopes: list[tuple[float, int]] = []
    total = 0.0
    for curve in curves:
        hull = _hull(curve)
        total += float(curve[hull[0]])
        slopes += [
            (float(curve[b] - curve[a]) / (b - a), b - a)
            for a, b in zip(hull, hull[1:], strict=False)
        ]
    for usd, units in sorted(slopes):
        take = min(units, whole)
        total += take * usd
        whole -= take
        if not whole:
            return total
    return float("inf")


def _hull(curve: Curve) -> list[int]:
    """Places of the lower convex hull, among what can be done at all."""
    hull: list[int] = []
    for k in np.flatnonzero(np.isfinite(curve)).tolist():
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (curve[b] - curve[a]) * (k - a) < (curve[k] - curve[a]) * (b - a):
                break
            hull.pop()
        hull.append(k)
    return hull


def by_force(world: TickWorld) -> float:
    """The same for one node by trying everything that can be done tick by tick: for tests, and for
    small worlds alone."""
    best = float("inf")
    for modes in product(range(3), repeat=world.n_ticks):

        def choose(view: TickView, modes: Any = modes) -> tuple[Mode, int]:
            return MODES[modes[view.tick]], 0

        result = play(world, choose)
        if result.done_s is not None:
            best = min(best, result.usd)
    return best
