"""The least that the job can cost, for somebody who knows the whole trace: no policy can do better.

Nodes are looked at one by one (the k-th spot node is there while the zones together have k). Any
use of n nodes is one of n single nodes with no more starts than its own, so the sum over single
nodes bounds it from below. Each has a curve, dollars for so much work until the deadline, made by a
dynamic program over the ticks; what they do together is the cheapest way to share the work between
them. Where the price of spot changes, a spot node pays in each tick the lowest of those that are
there.

For one node the answer is exact in units of the world (a tick cut into `parts`); for several it may
be below what is possible, never above.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from elastic.sim.markets.tick_world import TickWorld

Curve = NDArray[np.float64]
Curves = NDArray[np.float64]


def least_usd(world: TickWorld, parts: int = 4) -> float:
    """Dollars; infinite where the deadline cannot be met. Starts and work are rounded down to a
    tick / `parts`, so that the answer stays a bound."""
    return least_usd_until(world, [world.n_ticks], parts)[0]


def least_usd_until(world: TickWorld, ticks: Sequence[int], parts: int = 4) -> list[float]:
    """For several deadlines of the same world at once, each at the end of so many ticks."""
    unit_s = world.tick_s / parts
    # the work of one node in units, what all of them have to do together
    whole = int(world.work_node_s / unit_s + 1e-9)
    there = [world.there(tick) for tick in range(max(ticks))]
    # nodes that are there in the same ticks have the same curve: those between two of these numbers
    levels = sorted({0, *there, world.n_nodes})
    counts = [b - a for a, b in pairwise(levels)]
    rows = [bisect_left(levels, n) for n in there]
    found = _curves(
        world, rows, set(ticks), each=min(whole, max(ticks) * parts), parts=parts, n=len(counts)
    )
    return [_shared(list(zip(found[tick], counts, strict=True)), whole) for tick in ticks]


def _curves(
    world: TickWorld, rows: Sequence[int], ticks: Collection[int], *, each: int, parts: int, n: int
) -> dict[int, Curves]:
    """Of `n` nodes, of which the first `rows[tick]` are there: tick -> [node, units of work] ->
    dollars, at the end of each of `ticks`.

    What works at a time is kept by work + time left, so that a unit of time, which is one of work,
    leaves it in its place; and without the dollars since the beginning, which are those of the time
    in all places.
    """
    unit_h = world.tick_s / parts / 3600
    start = int(world.start_s / (world.tick_s / parts) + 1e-9)
    spot_usd, fixed_usd = world.spot_usd_per_h * unit_h, world.on_demand_usd_per_h * unit_h
    last, varies = len(rows) * parts, bool(world.lowest_usd)
    # dollars of a spot node since the beginning
    paid = [k * spot_usd for k in range(last + 1)]
    if varies:
        by_unit = [usd * unit_h for usd in world.lowest_usd[: len(rows)] for _ in range(parts)]
        paid = [0.0, *accumulate(by_unit)]
    spot, fixed = np.full((2, n, each + 1 + last), np.inf)
    # what is cheapest at this time and at those up to a start ago
    past = np.full((start + 2, n, each + 1), np.inf)
    past[0, :, 0] = 0.0
    spare = np.empty((n, each + 1))
    since = [0] * n  # when each came
    found: dict[int, Curves] = {}
    up = 0
    for now in range(last):
        if now % parts == 0:
            up, before = rows[now // parts] if varies or spot_usd < fixed_usd else 0, up
            spot[up:before] = np.inf
            since[before:up] = [now] * (up - before)
        begun = past[(now - start) % len(past)]
        if now >= start:  # nodes that were started then begin to work
            there = slice(last - now, last - now + min(each, now - start) + 1)
            if isfinite(fixed_usd):
                _lower(fixed[:, there], begun, (start - now) * fixed_usd, spare=spare)
            # at one price it is never better to start later than as soon as a node is there
            oldest = 0 if varies else now - start
            new = [k for k in range(up) if oldest <= since[k] <= now - start]
            if new:
                some = slice(new[0], new[-1] + 1)
                _lower(spot[some, there], begun[some], -paid[now - start], spare=spare)
        best, after = past[now % len(past)], past[(now + 1) % len(past)]
        after[:] = best
        done = max(0, min(each, now + 1 - start)) + 1
        there = slice(last - now - 1, last - now - 1 + done)
        _lower(after[:, :done], fixed[:, there], (now + 1) * fixed_usd, spare=spare)
        _lower(after[:up, :done], spot[:up, there], paid[now + 1], spare=spare)
        if (now + 1) % parts == 0 and (now + 1) // parts in ticks:
            found[(now + 1) // parts] = after.copy()
    return found


def _lower(what: Curves, to: Curves, usd: float, *, spare: Curves) -> None:
    """Where `to` + `usd` is less, that."""
    n, width = what.shape
    np.minimum(what, np.add(to[:, :width], usd, out=spare[:n, :width]), out=what)


def _shared(curves: Sequence[tuple[Curve, int]], whole: int) -> float:
    """The least for `whole` units of work, by one node exactly, by several on the lower convex hull
    of each curve: the cheapest units first. Each curve is that of so many nodes."""
    if len(curves) == 1 and curves[0][1] == 1:
        curve = curves[0][0]
        return float(curve[whole]) if whole < len(curve) else float("inf")
    slopes: list[tuple[float, int]] = []
    total = 0.0
    for curve, n in curves:
        hull = _hull(curve)
        total += n * hull[0][1]
        slopes += [((d - c) / (b - a), n * (b - a)) for (a, c), (b, d) in pairwise(hull)]
    for usd, units in sorted(slopes):
        take = min(units, whole)
        total += take * usd
        whole -= take
        if not whole:
            return total
    return float("inf")


def _hull(curve: Curve) -> list[tuple[int, float]]:
    """The lower convex hull of what can be done at all: units, dollars."""
    hull: list[tuple[int, float]] = []
    for k, usd in enumerate(curve.tolist()):
        if usd == float("inf"):
            continue
        while len(hull) > 1:
            (a, at_a), (b, at_b) = hull[-2], hull[-1]
            if (at_b - at_a) * (k - a) < (usd - at_a) * (b - a):
                break
            hull.pop()
        hull.append((k, usd))
    return hull
