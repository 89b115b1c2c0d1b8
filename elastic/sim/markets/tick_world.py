"""A market cut into ticks: nodes that can be had, prices, a job and its deadline. Baselines and the
bound live in it.

The job keeps up to `n_nodes` nodes busy and is linear in them. A node that is started is paid from
then on and works after `start_s`. Progress is kept when a node goes (what a policy loses besides is
its own `lost_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Literal

from elastic.errors import SpecError
from elastic.sim.markets.traces import Trace

Mode = Literal["idle", "spot", "on-demand"]


@dataclass(frozen=True)
class TickWorld:
    """`spot`: zone -> nodes that it has in each tick, as many ticks as the deadline has, or the
    first of its `whole_ticks` (0 = it has all). `work_node_s`: of the whole job, on one node.
    Prices are per node and hour; `on_demand_usd_per_h`: infinite = not known. `spot_usd`: zone ->
    the price in each tick, () = `spot_usd_per_h` in all of them; `lowest_usd`: in each tick the
    lowest of any node that is there then, which the bound pays. `egress_usd_per_node`: of the state
    that a node holds, from one zone to another."""

    tick_s: float
    spot: tuple[tuple[int, ...], ...]
    n_nodes: int
    work_node_s: float
    spot_usd_per_h: float
    on_demand_usd_per_h: float
    start_s: float = 0.0
    egress_usd_per_node: float = 0.0
    spot_usd: tuple[tuple[float, ...], ...] = ()
    lowest_usd: tuple[float, ...] = ()
    whole_ticks: int = 0

    @property
    def n_ticks(self) -> int:
        return len(self.spot[0])

    @property
    def deadline_s(self) -> float:
        return (self.whole_ticks or self.n_ticks) * self.tick_s

    @property
    def ideal_s(self) -> float:
        """On all nodes, from the first moment on."""
        return self.work_node_s / self.n_nodes

    @property
    def least_s(self) -> float:
        """On demand alone: the shortest deadline that can be met for sure."""
        return self.ideal_s + self.start_s

    @property
    def on_demand_usd(self) -> float:
        """Of the job on demand alone."""
        return self.n_nodes * self.least_s / 3600 * self.on_demand_usd_per_h

    def usd_per_h(self, zone: int, tick: int) -> float:
        """Of a spot node."""
        return self.spot_usd[zone][tick] if self.spot_usd else self.spot_usd_per_h

    def there(self, tick: int) -> int:
        """Spot nodes of all zones, no more than the job uses."""
        return min(self.n_nodes, sum(zone[tick] for zone in self.spot))


def tick_world(
    like: TickWorld,
    traces: Sequence[Trace],
    *,
    start_at_s: float,
    deadline_s: float,
    ideal_s: float = inf,
    most: int | None = None,
) -> TickWorld:
    """What the traces have from `start_at_s` until the deadline, or in the first `most` ticks of
    that, at their prices, where all of them have any; all else as in `like`. `ideal_s`: on more
    nodes than its own. Raises SpecError where
    neither these nor on-demand nodes alone can meet the deadline, or a tick is longer than it."""
    tick_s = like.tick_s
    n_ticks = int(deadline_s // tick_s)
    if n_ticks < 1:
        raise SpecError(
            f"a tick of {tick_s:.0f} s is longer than the deadline of {deadline_s:.0f} s; give a "
            "finer trace, or a later deadline"
        )
    ticks = range(n_ticks if most is None else min(most, n_ticks))
    spot = tuple(tuple(trace.nodes_at(start_at_s + k * tick_s) for k in ticks) for trace in traces)
    world = _priced(replace(like, spot=spot, whole_ticks=n_ticks), traces, start_at_s)
    least_s = min(world.least_s, ideal_s + world.start_s)
    if least_s > world.deadline_s:
        where = "on demand" if least_s == world.least_s else "on all nodes"
        raise SpecError(
            f"a deadline of {deadline_s / 3600:.2f} h cannot be met even {where}, which takes "
            f"{least_s / 3600:.2f} h; give that or more"
        )
    return world


def _priced(world: TickWorld, traces: Sequence[Trace], start_at_s: float) -> TickWorld:
    """In a tick a node costs the mean of its zone's prices in it; the bound pays the lowest at
    which any zone has one."""
    prices = {usd for trace in traces for usd in trace.usd_per_node_h}
    if not all(trace.usd_per_node_h for trace in traces):
        return world
    if len(prices) == 1:
        return replace(world, spot_usd_per_h=prices.pop())
    edges = [start_at_s + k * world.tick_s for k in range(world.n_ticks + 1)]
    seen = [[trace.usd_between(a, b) for a, b in pairwise(edges)] for trace in traces]
    means = tuple(tuple(mean for mean, _ in zone) for zone in seen)
    usual = sum(map(sum, means)) / (len(means) * world.n_ticks)
    lowest = [min(zone[tick][1] for zone in seen) for tick in range(world.n_ticks)]
    return replace(
        world, spot_usd_per_h=usual, spot_usd=means,
        lowest_usd=tuple(usual if usd == inf else usd for usd in lowest),
    )  # fmt: skip


def together(world: TickWorld) -> TickWorld:
    """Its zones made one, of which a node costs the mean of those that are there."""
    zones, ticks = range(len(world.spot)), range(world.n_ticks)
    nodes = tuple(sum(zone[tick] for zone in world.spot) for tick in ticks)
    if not world.spot_usd:
        return replace(world, spot=(nodes,))
    means = tuple(
        sum(world.spot[k][tick] * world.spot_usd[k][tick] for k in zones) / nodes[tick]
        if nodes[tick]
        else world.spot_usd_per_h
        for tick in ticks
    )
    return replace(world, spot=(nodes,), spot_usd=(means,))


@dataclass(frozen=True)
class TickView:
    """What a policy knows at the beginning of a tick. `spot`: zones that have all nodes now;
    `mode`, `zone`: what it runs on, idle where that was taken; `starting_s`: until it works."""

    world: TickWorld
    tick: int
    done_node_s: float
    spot: tuple[int, ...]
    mode: Mode
    zone: int
    starting_s: float

    @property
    def now_s(self) -> float:
        return self.tick * self.world.tick_s

    def usd_per_h(self, zone: int) -> float:
        """Of a spot node there, now."""
        return self.world.usd_per_h(zone, self.tick)

    @property
    def rest_s(self) -> float:
        """Of the work, on all nodes."""
        return (self.world.work_node_s - self.done_node_s) / self.world.n_nodes

    @property
    def left_s(self) -> float:
        return self.world.deadline_s - self.now_s


Choose = Callable[[TickView], tuple[Mode, int]]


@dataclass(frozen=True)
class TickResult:
    """`done_s`: when the job was done, None = not within the deadline. `busy_share`: of what was
    paid for, the part that made progress which counts."""

    usd: float
    done_s: float | None
    starts: int
    busy_share: float


def play(world: TickWorld, choose: Choose, lost_s: float = 0.0) -> TickResult:
    """A policy that runs on all nodes or on none. `lost_s`: of progress, at every preemption."""
    mode: Mode = "idle"
    zone, starting_s, done, usd, starts, paid_s = 0, 0.0, 0.0, 0.0, 0, 0.0
    whole = world.work_node_s
    run_s = 0.0  # since it began to work on these nodes: no more than that can be lost
    home: int | None = None  # the zone that holds the state
    for tick in range(world.n_ticks):
        full = tuple(k for k, row in enumerate(world.spot) if row[tick] >= world.n_nodes)
        if mode == "spot" and zone not in full:
            mode = "idle"
            done = max(0.0, done - world.n_nodes * min(lost_s, run_s))
        view = TickView(world, tick, done, full, mode, zone, starting_s)
        wanted, where = choose(view)
        if wanted == "spot" and where not in full:
            wanted = "idle"
        if wanted != "idle" and (wanted, where if wanted == "spot" else zone) != (mode, zone):
            starting_s, starts, run_s = world.start_s, starts + 1, 0.0
        mode, zone = wanted, where
        if mode == "idle":
            continue
        if mode == "spot":
            usd += world.n_nodes * world.egress_usd_per_node if home not in (None, zone) else 0.0
            home = zone
        price = view.usd_per_h(zone) if mode == "spot" else world.on_demand_usd_per_h
        need_s = starting_s + (whole - done) / world.n_nodes
        used_s = min(world.tick_s, need_s)
        usd += world.n_nodes * used_s / 3600 * price
        paid_s += used_s
        worked_s = max(0.0, used_s - starting_s)
        starting_s = max(0.0, starting_s - used_s)
        done += world.n_nodes * worked_s
        run_s += worked_s
        if done >= whole - 1e-6:
            share = whole / (world.n_nodes * paid_s) if paid_s else 1.0
            return TickResult(usd, tick * world.tick_s + used_s, starts, share)
    return TickResult(usd, None, starts, done / (world.n_nodes * paid_s) if paid_s else 0.0)
