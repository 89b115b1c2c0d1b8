"""Policies to compare with, as they are published: all nodes or none, the same job, the same ticks.

`greedy`, `time_sliced` and `uniform_progress` are the single-node policies of "Can't Be Late" (Wu
et al., NSDI 2024, sections 3 and 4), used for a group of nodes of fixed size. All of them turn to
on-demand nodes for good when the time left is no more than the rest of the work and two starts: so
none of them misses a deadline that on-demand nodes can meet.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp

from elastic.catalog.restart_times import RAY_TRAIN
from elastic.sim.markets.tick_world import Choose, Mode, TickView

SLICES = 10  # of the time until the deadline
RESTART_S = RAY_TRAIN.by_cause["loss"]  # from a kill to the next step
DELTA = 0.05  # of what an hour is worth, below which SkyNomad stays where it is
PRIOR_H = 2.0  # that a node is believed to last where none has been seen to end


def on_demand_only(view: TickView) -> tuple[Mode, int]:
    return "on-demand", 0


def must_end(view: TickView) -> bool:
    """The safety net: on-demand nodes alone would just be done in time."""
    return view.left_s - view.world.tick_s < view.rest_s + 2 * view.world.start_s


def _spot(view: TickView) -> int | None:
    """The zone to run in: where it runs already, else the cheapest that has nodes, the first of
    equal ones."""
    if view.mode == "spot":
        return view.zone
    return min(view.spot, key=view.usd_per_h, default=None)


def greedy(view: TickView) -> tuple[Mode, int]:
    """Spot whenever it is there, nothing when it is not, until the deadline forces on-demand."""
    if must_end(view):
        return _to_the_end(view)
    zone = _spot(view)
    return ("idle", 0) if zone is None else ("spot", zone)


def _to_the_end(view: TickView) -> tuple[Mode, int]:
    """On demand; spot nodes that work already may go on while they last, if a start would still be
    in time after them."""
    slack_s = view.left_s - view.world.tick_s - view.rest_s - view.world.start_s
    if view.mode == "spot" and slack_s >= 0:
        return "spot", view.zone
    return "on-demand", 0


def time_sliced(view: TickView) -> tuple[Mode, int]:
    """The deadline is cut into slices, each with its part of the work: greedy in each of them."""
    world = view.world
    if must_end(view):
        return _to_the_end(view)
    slice_s = world.deadline_s / SLICES
    end_s = (int(view.now_s // slice_s) + 1) * slice_s
    target = world.work_node_s * end_s / world.deadline_s
    rest_s = max(0.0, target - view.done_node_s) / world.n_nodes
    zone = _spot(view)
    if zone is not None:
        return "spot", zone
    if rest_s > 0 and end_s - view.now_s - world.tick_s < rest_s + 2 * world.start_s:
        return "on-demand", 0
    return "idle", 0


def uniform_progress(view: TickView) -> tuple[Mode, int]:
    """Progress is to grow evenly until the deadline: behind it, on-demand nodes stand in for spot,
    and stay until progress is what is expected two starts later (hysteresis)."""
    world = view.world
    if must_end(view):
        return _to_the_end(view)
    zone = _spot(view)
    if zone is not None:
        return "spot", zone
    ahead_s = 2 * world.start_s if view.mode == "on-demand" else 0.0
    expected = world.work_node_s * (view.now_s + ahead_s) / world.deadline_s
    return ("on-demand", 0) if view.done_node_s < expected else ("idle", 0)


@dataclass
class SkyNomad:
    """The rule of SkyNomad (Li et al., 2026, arXiv 2601.06520) over zones: an hour of progress is
    worth V = on-demand price x (work left / time left) / (work / deadline), and what is chosen
    brings most per hour: V x (L - start) / L - price - egress / L, with L the hours that a node
    there is expected to last yet (Nelson-Aalen, by what was seen of the zone); on demand L is the
    rest of the work; idle brings nothing. What runs has started already. It is left for another
    zone only where that brings DELTA x V more. One object per run.

    Availability and prices are seen in each tick, which SkyNomad pays probes for.
    """

    lived: dict[int, list[int]] = field(default_factory=dict)  # zone -> ticks, in order
    _since: dict[int, int] = field(default_factory=dict)
    _home: int | None = None  # the zone that holds the state
    prior_ticks: float = 12.0
    _rests: dict[int, list[float]] = field(default_factory=dict)  # zone -> by age, until one ends

    def __call__(self, view: TickView) -> tuple[Mode, int]:
        self.prior_ticks = PRIOR_H * 3600 / view.world.tick_s
        for zone in view.spot:
            self._since.setdefault(zone, view.tick)
        for zone in [zone for zone in self._since if zone not in view.spot]:
            insort(self.lived.setdefault(zone, []), view.tick - self._since.pop(zone))
            self._rests.pop(zone, None)
        mode, zone = self._best(view)
        self._home = zone if mode == "spot" else self._home
        return mode, zone

    def _best(self, view: TickView) -> tuple[Mode, int]:
        world = view.world
        if must_end(view):
            return _to_the_end(view)
        pace = (view.rest_s / view.left_s) / (world.ideal_s / world.deadline_s)
        # work has to be done in any case: an hour is worth what it costs at least
        lowest = min(map(view.usd_per_h, view.spot), default=world.spot_usd_per_h)
        value = max(lowest, world.on_demand_usd_per_h * pace)
        there: list[tuple[float, tuple[Mode, int]]] = [(0.0, ("idle", 0))]
        for zone in view.spot:
            move_usd = 0.0 if self._home in (None, zone) else world.egress_usd_per_node
            there.append((self._brings(view, zone, value=value, move_usd=move_usd), ("spot", zone)))
        rest_h = max(1e-9, view.rest_s / 3600)
        start_h = (view.starting_s if view.mode == "on-demand" else world.start_s) / 3600
        lasts_h = rest_h + start_h
        worth = value * rest_h / lasts_h - world.on_demand_usd_per_h
        there.append((worth, ("on-demand", 0)))
        best = max(there, key=lambda one: one[0])
        now = [one for one in there if one[1] == (view.mode, view.zone)]
        if view.mode == "spot" and now and best[0] < now[0][0] + DELTA * value:
            return now[0][1]
        return best[1]

    def _brings(self, view: TickView, zone: int, *, value: float, move_usd: float) -> float:
        """Dollars per hour and node."""
        world, runs = view.world, view.mode == "spot" and view.zone == zone
        lasts_h = self.lasts_ticks(zone, view.tick) * world.tick_s / 3600
        start_h = (view.starting_s if runs else world.start_s) / 3600
        share = max(0.0, lasts_h - start_h) / lasts_h
        return value * share - view.usd_per_h(zone) - move_usd / lasts_h

    def lasts_ticks(self, zone: int, tick: int) -> float:
        """Mean rest of the life of a node of that age: the sum of the survival that the
        Nelson-Aalen hazards give, beyond which those who are older than any that was seen to end
        last as long again."""
        lives, age = self.lived.get(zone, []), tick - self._since[zone]
        if not lives or lives[-1] <= age:
            return max(self.prior_ticks, float(age))
        if (rests := self._rests.get(zone)) is None:
            rests = [0.0] * lives[-1] + [max(self.prior_ticks, float(lives[-1]))]
            for at in range(lives[-1] - 1, -1, -1):
                ended = bisect_right(lives, at)
                hazard = (bisect_right(lives, at + 1) - ended) / (len(lives) - ended)
                rests[at] = exp(-hazard) * (1 + rests[at + 1])
            self._rests[zone] = rests
        return rests[age]


@dataclass(frozen=True)
class Baseline:
    """`made`: a policy for one run. `start_s`: of a group; None = the world's. `lost_s`: of the
    progress, at every preemption."""

    made: Callable[[], Choose]
    about: str
    start_s: float | None = None
    lost_s: float = 0.0


BASELINES: Mapping[str, Baseline] = {
    "on-demand": Baseline(lambda: on_demand_only, "all nodes on demand, from the first moment on"),
    "greedy": Baseline(lambda: greedy, "spot while it is there, on demand when time runs out"),
    "time-sliced": Baseline(lambda: time_sliced, f"greedy in each of {SLICES} slices of the time"),
    "uniform-progress": Baseline(lambda: uniform_progress, "even progress, of Can't Be Late"),
    "skynomad": Baseline(SkyNomad, "what progress is worth, by zone, lives and time left"),
    "restart": Baseline(
        lambda: greedy,
        f"greedy at fixed size, {RESTART_S:g} s lost at each preemption, as Ray Train does",
        lost_s=RESTART_S,
    ),
}
