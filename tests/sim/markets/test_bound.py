"""The bound: equal to trying everything, and below every policy."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from elastic.errors import SpecError
from elastic.sim.markets.baselines import BASELINES
from elastic.sim.markets.bound import least_usd, least_usd_until
from elastic.sim.markets.tick_world import Mode, TickView, TickWorld, play, tick_world
from elastic.sim.markets.traces import Trace

TICK_S = 300.0
MODES: tuple[Mode, ...] = ("idle", "spot", "on-demand")


def by_force(world: TickWorld) -> float:
    """The same for one node by trying everything that can be done tick by tick."""
    best = float("inf")
    for modes in product(range(3), repeat=world.n_ticks):

        def choose(view: TickView, modes: Any = modes) -> tuple[Mode, int]:
            return MODES[modes[view.tick]], 0

        result = play(world, choose)
        if result.done_s is not None:
            best = min(best, result.usd)
    return best


def small(chance: random.Random, most_ticks: int = 8) -> TickWorld:
    n = chance.randint(3, most_ticks)
    row = tuple(chance.randint(0, 1) for _ in range(n))
    return TickWorld(
        TICK_S,
        (row,),
        1,
        chance.randint(1, n) * TICK_S,
        1.0,
        3.0,
        chance.choice((0, 1, 2)) * TICK_S,
    )


def larger(chance: random.Random) -> TickWorld:
    nodes, n = chance.randint(1, 4), 60
    level, row = nodes, []
    for _ in range(n):
        if chance.random() < 0.2:
            level = chance.randint(0, nodes)
        row.append(level)
    share = chance.choice((0.4, 0.6, 0.8))
    start_s = chance.choice((0.0, 100.0, 450.0))
    return TickWorld(TICK_S, (tuple(row),), nodes, share * n * TICK_S * nodes, 1.0, 3.0, start_s)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_trying_everything_finds(seed: int) -> None:
    world = small(random.Random(seed))
    assert least_usd(world, parts=1) == pytest.approx(by_force(world), rel=1e-9)


def at_prices(world: TickWorld, chance: random.Random) -> TickWorld:
    """Another price of spot in each tick, sometimes above that on demand."""
    usd = tuple(tuple(chance.choice((0.5, 1.0, 2.0, 4.0)) for _ in row) for row in world.spot)
    lowest = tuple(
        min((row[k] for row, there in zip(usd, world.spot, strict=True) if there[k]), default=9.0)
        for k in range(world.n_ticks)
    )
    return replace(world, spot_usd=usd, lowest_usd=lowest)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_also_where_prices_change(seed: int) -> None:
    chance = random.Random(seed)
    world = at_prices(small(chance), chance)
    assert least_usd(world, parts=1) == pytest.approx(by_force(world), rel=1e-9)


def test_a_start_may_wait_for_a_lower_price() -> None:
    """Of four ticks two are worked: the later two cost a tenth."""
    world = TickWorld(TICK_S, ((1,) * 4,), 1, 2 * TICK_S, 1.0, 9.0)
    later = replace(world, spot_usd=((1.0, 1.0, 0.1, 0.1),), lowest_usd=(1.0, 1.0, 0.1, 0.1))
    assert least_usd(later, parts=3) == pytest.approx(2 * 0.1 * TICK_S / 3600)


def test_one_price_in_each_tick_is_one_price() -> None:
    for seed in range(8):
        world = larger(random.Random(seed))
        ticks = (world.spot_usd_per_h,) * world.n_ticks
        same = replace(world, spot_usd=(ticks,), lowest_usd=ticks)
        assert least_usd(same, parts=3) == pytest.approx(least_usd(world, parts=3), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
def test_also_in_the_largest_worlds_that_can_be_tried(seed: int) -> None:
    world = small(random.Random(seed), most_ticks=11)
    assert least_usd(world, parts=1) == pytest.approx(by_force(world), rel=1e-9)


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_no_policy_is_below_it(seed: int, priced: bool) -> None:
    chance = random.Random(seed)
    world = larger(chance)
    if priced:  # another zone, and prices that change
        world = replace(world, spot=(*world.spot, *larger(chance).spot))
        world = at_prices(world, chance)
    least = least_usd(world, parts=3)
    for name, baseline in BASELINES.items():
        found = play(world, baseline.made(), baseline.lost_s)
        if found.done_s is not None:
            assert found.usd >= least - 1e-9, name


@pytest.mark.parametrize("seed", range(30))
def test_a_deadline_that_can_be_met_is_met(seed: int) -> None:
    """By every policy but for the one that loses progress."""
    world = larger(random.Random(seed))
    if world.least_s + 2 * world.start_s + 2 * TICK_S > world.deadline_s:
        pytest.fail("the world of this seed is too tight to say anything; give it more slack")
    for name, baseline in BASELINES.items():
        assert play(world, baseline.made()).done_s is not None, name


def test_several_deadlines_at_once_are_each_what_they_are_alone() -> None:
    chance = random.Random(5)
    row = tuple(chance.randint(0, 2) for _ in range(40))
    world = TickWorld(TICK_S, (row,), 2, 20 * TICK_S, 1.0, 3.0, 150.0)
    for ticks, usd in zip((20, 30, 40), least_usd_until(world, (20, 30, 40)), strict=True):
        alone = TickWorld(TICK_S, (row[:ticks],), 2, 20 * TICK_S, 1.0, 3.0, 150.0)
        assert usd == pytest.approx(least_usd(alone), rel=1e-12)


def test_what_cannot_be_done_costs_without_end() -> None:
    world = TickWorld(TICK_S, ((1, 1),), 1, 3 * TICK_S, 1.0, 3.0)
    assert least_usd(world) == float("inf") and by_force(world) == float("inf")


def test_a_start_is_paid_and_does_no_work() -> None:
    """Ten minutes of work after five of start, on spot at a dollar an hour."""
    world = TickWorld(TICK_S, ((1,) * 4,), 1, 2 * TICK_S, 1.0, 3.0, TICK_S)
    assert least_usd(world) == pytest.approx(3 * TICK_S / 3600)
    found = play(world, lambda view: ("spot", 0))
    assert (found.usd, found.done_s, found.starts) == (pytest.approx(0.25), 900.0, 1)
    assert found.busy_share == pytest.approx(2 / 3)


def test_a_preemption_costs_what_the_policy_loses() -> None:
    row = (1, 1, 0, 1, 1, 1)
    world = TickWorld(TICK_S, (row,), 1, 3 * TICK_S, 1.0, 3.0)
    greedy = BASELINES["greedy"]
    assert play(world, greedy.made()).usd == pytest.approx(3 * TICK_S / 3600)
    assert play(world, greedy.made(), 100.0).usd == pytest.approx((3 * TICK_S + 100) / 3600)


def test_a_deadline_that_on_demand_alone_cannot_meet_is_said_at_once() -> None:
    trace = Trace("t", (0.0,), (1,), 86400.0)
    like = TickWorld(60.0, (), 1, 7200.0, 1.0, 3.0, 360.0)
    with pytest.raises(SpecError, match=r"2\.00 h cannot be met even on demand, .* 2\.10 h"):
        tick_world(like, [trace], start_at_s=0.0, deadline_s=7200.0)
    with pytest.raises(SpecError, match="longer than the deadline"):
        tick_world(replace(like, tick_s=9000.0), [trace], start_at_s=0.0, deadline_s=7200.0)
