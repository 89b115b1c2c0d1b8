"""Which layouts fit, and that each of them can be planned."""

from __future__ import annotations

import pytest

from elastic.certify.checks.fault_checks import abort_layouts
from elastic.certify.checks.move_checks import chain
from elastic.certify.harness.layouts_tried import (
    GLOBAL_BATCH,
    N_BLOCKS,
    TP_LIMIT,
    all_layouts,
    layouts,
    plan_of,
)
from elastic.scenarios.one_process import worst_difference
from elastic.scenarios.programs.small import CONFIG
from elastic.types import Layout, WorkerId


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2, 4), (3, 3), (4, 10), (6, 12), (8, 20)])
def test_every_way_to_cut_n_ranks(n: int, count: int) -> None:
    found = layouts(n)
    by_hand = [
        (pp, r, s, tp)
        for pp in range(1, n + 1) for r in range(1, n + 1) for s in range(1,
        n + 1) for tp in range(1, n + 1)
        if pp * r * s * tp == n and TP_LIMIT % tp == 0 and pp <= N_BLOCKS
    ]  # fmt: skip
    assert sorted((one.pp, one.dp_replicate, one.dp_shard, one.tp) for one in found) == sorted(
        by_hand
    )
    assert len(set(found)) == len(found) == count


def test_the_limits_are_those_of_the_program() -> None:
    assert (CONFIG.n_layers, CONFIG.n_kv_heads) == (N_BLOCKS, TP_LIMIT)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_each_can_be_planned(n: int) -> None:
    workers = [WorkerId(f"node{i}", 0) for i in range(n)]
    found = [*all_layouts(n), *abort_layouts(n), *chain(n)]
    assert {one.world_size for one in all_layouts(n)} == set(range(1, n + 1))
    for layout in found:
        plan = plan_of(1, layout, workers, n_blocks=N_BLOCKS, peer_every=2)
        assert sum(plan.samples) == GLOBAL_BATCH
        assert sum(plan.layers) == N_BLOCKS
        assert len(plan.ranks) == layout.world_size
        assert n < 2 or len(plan.copies_to) == layout.world_size


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_moves_go_between_layouts_that_differ(n: int) -> None:
    found = chain(n)
    assert found[0] == found[-1] == Layout(dp_shard=n)
    assert len(found) >= 3
    assert all(one != two for one, two in zip(found, found[1:]))


def test_losses_that_are_missing_or_too_many_are_no_agreement() -> None:
    assert worst_difference({1: 2.0, 2: 1.5}, [2.0, 1.0]) == 0.5
    assert worst_difference({}, [2.0]) == float("inf")
    assert worst_difference({1: 2.0, 2: 1.0}, [2.0]) == float("inf")
