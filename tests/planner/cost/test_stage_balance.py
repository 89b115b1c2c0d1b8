"""Blocks that are not alike over pipeline stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.planner.cost import step_cost
from elastic.planner.cost.stage_balance import balanced, loads_at
from elastic.planner.hetero.hetero_split import SplitTask, split
from elastic.planner.hetero.unequal_shares import stage_layers
from elastic.types import Layout

LOADS = st.lists(st.sampled_from([0.25, 1.0, 1.5, 4.0]), min_size=1, max_size=8)


def slowest(loads: tuple[float, ...], layers: tuple[int, ...], ends: float) -> float:
    cuts = [sum(layers[:i]) for i in range(len(layers) + 1)]
    each = [sum(loads[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    return max(*each[:-1], each[-1] + ends) if len(each) > 1 else each[0] + ends


@given(LOADS, st.integers(1, 8), st.sampled_from([0.0, 2.0]))
def test_no_other_cut_has_a_faster_slowest_stage(
    loads: list[float], n_stages: int, ends: float
) -> None:
    n, n_stages, given = len(loads), min(n_stages, len(loads)), tuple(loads)
    found = balanced(given, n_stages, ends)
    assert len(found) == n_stages and sum(found) == n and min(found) >= 1
    every = [
        tuple(b - a for a, b in zip((0, *at), (*at, n), strict=True))
        for at in combinations(range(1, n), n_stages - 1)
    ]
    best = min(slowest(given, one, ends) for one in every)
    assert slowest(given, found, ends) == pytest.approx(best)


def test_two_towers_are_cut_by_what_their_blocks_take_and_not_by_their_number() -> None:
    towers = (0.4,) * 12 + (1.6,) * 12  # in mean blocks
    assert stage_layers(24, 4) == (6, 6, 6, 6)
    found = stage_layers(24, 4, towers)
    assert found == (13, 4, 4, 3)
    assert stage_layers(24, 4, towers, ends=4.0)[-1] == 2
    times = loads_at(Layout(pp=4), found, towers)
    assert max(times) < 1.34 * min(times)
    assert step_cost.slowest_stage(24, Layout(pp=4), 0.0, loads=towers) == pytest.approx(max(times))


def test_on_gpus_of_two_kinds_stages_follow_both_the_blocks_and_the_speeds() -> None:
    towers = (0.4,) * 8 + (1.6,) * 8
    layout = Layout(pp=2)
    alike = split(SplitTask(layout, 16, 8, 8, loads=towers), ((1.0, 1.0),))
    assert alike.layers == (11, 5)
    faster = split(SplitTask(layout, 16, 8, 8, loads=towers), ((3.0, 1.0),))
    at = loads_at(layout, faster.layers, towers)
    assert faster.layers == (14, 2) and at[0] / 3 == pytest.approx(at[1], rel=0.35)
