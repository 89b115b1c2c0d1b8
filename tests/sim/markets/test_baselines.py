"""The published policies: what the multi-region rule chooses, and what a move between zones costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import exp, prod
from operator import mul
from time import process_time

import pytest

from elastic.sim.markets.baselines import BASELINES, SkyNomad
from elastic.sim.markets.tick_world import Mode, TickView, TickWorld, play

TICK_S = 300.0
N_TICKS = 120


def world(*zones: str, work_ticks: float = 60.0, egress: float = 0.0) -> TickWorld:
    """A zone is a string of 1 and 0, repeated."""
    rows = tuple(tuple(int(zone[k % len(zone)]) for k in range(N_TICKS)) for zone in zones)
    return TickWorld(TICK_S, rows, 1, work_ticks * TICK_S, 1.0, 3.0, 600.0, egress)


def view(of: TickWorld, tick: int, mode: Mode = "idle", zone: int = 0, done: float = 0) -> TickView:
    there = tuple(k for k, row in enumerate(of.spot) if row[tick])
    return TickView(of, tick, done * TICK_S, there, mode, zone, 0.0)


def test_a_life_that_others_had_is_expected_by_its_age() -> None:
    """Lives of 2, 2, 2 and 10 ticks: a new node is expected to live about 4, one of age 3 the seven
    that the oldest had yet, or as long again."""
    rule = SkyNomad({0: [2, 2, 2, 10]}, {0: 0})
    young, older = rule.lasts_ticks(0, 0), rule.lasts_ticks(0, 3)
    assert 4.0 < young < 9.0 and older > young
    assert SkyNomad({}, {0: 0}).lasts_ticks(0, 0) == SkyNomad().prior_ticks
    assert SkyNomad({}, {0: 0}).lasts_ticks(0, 50) == 50, "none has ended: as long again"


def test_a_life_of_many_ticks_is_asked_for_as_fast() -> None:
    """In each tick, of each zone: what is known of all ages is kept until a life ends."""
    rule = SkyNomad({0: [*range(1, 20_000)]}, {0: 0})
    began_s = process_time()
    assert all(rule.lasts_ticks(0, tick) > 0 for tick in range(20_000))
    assert process_time() - began_s < 2.0
    found = rule.lasts_ticks(0, 10_000)
    ends = [exp(-1 / (19_999 - at)) for at in range(10_000, 19_999)]
    assert found == pytest.approx(sum(accumulate(ends, mul)) + prod(ends) * 19_999, rel=1e-6)


def test_the_zone_whose_nodes_last_is_chosen() -> None:
    of = world("1", "1")
    rule = SkyNomad({0: [3] * 20, 1: [60] * 20}, {0: 0, 1: 0})
    assert rule(view(of, 0)) == ("spot", 1)


def test_it_stays_where_it_runs_unless_another_zone_brings_much_more() -> None:
    of = world("1", "1")
    rule = SkyNomad({0: [50] * 9, 1: [60] * 9}, {0: 0, 1: 0})
    assert rule(view(of, 0, "spot", 0)) == ("spot", 0)


def test_egress_is_weighed_and_paid() -> None:
    of = world("1", "1", egress=100.0)
    rule = SkyNomad({0: [20] * 9, 1: [60] * 9}, {0: 0, 1: 0}, 0)
    assert rule(view(of, 0)) == ("spot", 0), "the state lies there"
    assert rule(view(replace(of, egress_usd_per_node=0.0), 0)) == ("spot", 1)

    def zones(seen: TickView) -> tuple[Mode, int]:
        return "spot", 0 if seen.tick < 10 else 1

    dear, free = play(of, zones), play(replace(of, egress_usd_per_node=0.0), zones)
    assert dear.usd - free.usd == pytest.approx(100.0), "once, for one node"


def test_progress_is_worth_more_the_less_time_is_left() -> None:
    """Far ahead, a node that hardly outlives its start brings nothing; late it does, and without
    any the rule takes on demand."""
    short = {0: [4] * 30}
    early = world("1", work_ticks=30.0)
    assert SkyNomad(dict(short), {0: 0})(view(early, 0, done=29.0)) == ("idle", 0)
    late = world("1", work_ticks=80.0)
    assert SkyNomad(dict(short), {0: 0})(view(late, 20)) != ("idle", 0)
    none = world("0", work_ticks=80.0)
    assert SkyNomad()(view(none, 30)) == ("on-demand", 0)


def test_it_meets_deadlines_and_is_cheaper_than_on_demand() -> None:
    for zones in (("1",), ("110",), ("1100000", "0011111"), ("0",)):
        of = world(*zones, work_ticks=80.0)
        found = play(of, BASELINES["skynomad"].made())
        assert found.done_s is not None and found.usd <= of.on_demand_usd * 1.3, zones
