"""Shares of samples, layers and microbatches: integers that add up."""

from __future__ import annotations

import random

import pytest

from elastic.errors import InfeasiblePlan
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.unequal_shares import microbatches, shares, stage_layers
from elastic.types import Layout


def test_equal_speeds_get_equal_shares() -> None:
    assert shares(12, [1.0] * 4) == (3, 3, 3, 3)
    assert shares(8, [1.0] * 3) == (3, 3, 2)
    assert shares(4, [1.0] * 2, unit=4) == (8, 8)


def test_shares_follow_speeds() -> None:
    assert shares(12, [2.0, 1.0]) == (8, 4)
    assert shares(10, [1.0, 1.0, 0.01]) == (5, 4, 1)


def test_any_shares_add_up_and_nobody_is_left_out() -> None:
    chance = random.Random(1)
    for _ in range(300):
        speeds = [chance.uniform(0.05, 3.0) for _ in range(chance.randint(1, 9))]
        n, unit = chance.randint(len(speeds), 64), chance.choice([1, 2, 4])
        found = shares(n, speeds, unit)
        assert sum(found) == n * unit and min(found) >= unit and all(s % unit == 0 for s in found)
        slowest_s, last = max((found[i] / speeds[i], i) for i in range(len(speeds)))
        # giving a unit of the slowest to anybody else would not end the step earlier
        if found[last] > unit:
            assert all(
                (found[i] + unit) / speeds[i] >= slowest_s - 1e-9 for i in range(len(speeds))
            )


def test_more_ranks_than_samples_is_infeasible() -> None:
    with pytest.raises(InfeasiblePlan, match="2 shares of 4 samples for 3"):
        shares(2, [1.0] * 3, 4)


@pytest.mark.parametrize(
    ("n", "pp", "layers"), [(8, 1, (8,)), (8, 3, (3, 3, 2)), (5, 2, (3, 2)), (4, 4, (1, 1, 1, 1))]
)
def test_layers_per_stage(n: int, pp: int, layers: tuple[int, ...]) -> None:
    assert stage_layers(n, pp) == layers
    with pytest.raises(InfeasiblePlan, match=f"^{n + 1} pipeline stages"):
        stage_layers(n, n + 1)


@pytest.mark.parametrize(
    ("batch", "layout", "n"),
    [
        (16, Layout(dp_shard=4), 1),
        (16, Layout(pp=2, dp_shard=2), 4),
        (16, Layout(pp=4, dp_shard=1), 8),
        (16, Layout(pp=2, dp_shard=8), 2),
        (12, Layout(pp=2, dp_shard=3), 4),
        (7, Layout(pp=2, dp_shard=2), 1),
        (16, Layout(dp_shard=2, microbatch_size=4), 2),
        (12, Layout(dp_shard=5, microbatch_size=2), 2),
        (12, Layout(dp_shard=2, microbatch_size=100), 1),
        (30, Layout(pp=2, microbatch_size=6, schedule="gpipe"), 5),
        # 5 in rounds of 2 does not go
        (30, Layout(pp=2, microbatch_size=6, schedule="interleaved1f1b"), 6),
    ],
)
def test_microbatches(batch: int, layout: Layout, n: int) -> None:
    assert microbatches(batch, layout) == n
    assert batch % n == 0 and batch // n >= layout.dp


def test_a_batch_that_is_too_small_is_infeasible() -> None:
    with pytest.raises(InfeasiblePlan, match="3 samples cannot feed 4"):
        microbatches(3, Layout(dp_shard=4))
    with pytest.raises(InfeasiblePlan, match="microbatch_size=1"):
        microbatches(7, Layout(dp_shard=4, microbatch_size=1))


def test_divisors() -> None:
    assert all(
        unequal_shares.divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0)
        for n in range(1, 200)
    )
    assert unequal_shares.divisors(10**12)[-1] == 10**12  # at once, not after a count up to it
