"""Nodes that are paid for and that no plan will use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, orders

from elastic.types import (
    Node,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Pool,
    ReleaseNode,
    RequestNodes,
)

SPOT = Pool("spot", "CPU", 1, "spot", 1.0, 0, 8)
FIXED = Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 8)
OURS = Pool("ours", "CPU", 1, "owned", 0.0, 0, 8)


def story(*pools: Pool, flag: bool = True, **changes: Any) -> Story:
    """Three nodes of the first pool train, and the job can use no more."""
    keys: dict[str, Any] = {"max_workers": 3} | changes
    made = Story(pools or (SPOT,), **keys)
    made.state = replace(made.state, spends_slack=True, releases_spare=flag, keeps_left=True)
    made.nodes("a", "b", "c", pool=made.state.pools[0].name)
    made.tick(after_s=20)
    made.entered()
    made.steps(3)
    return made


def released(made: Story) -> list[str]:
    return [one.node_id for found in made.decisions for one in orders(found, ReleaseNode)]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("changes", [{}, {"layout": "dp_shard=3", "max_workers": None}])
def test_what_stood_in_for_a_notice_that_was_withdrawn_is_released(
    changes: dict[str, Any], flag: bool
) -> None:
    """It stays while the notice stands, and none is asked for in its place."""
    made = story(flag=flag, **changes)
    asked = made.tick(Notice("c", made.now_s + 600))
    assert [one.count for one in orders(asked, RequestNodes)] == [1]
    made.nodes("d")
    made.steps(2)
    assert made.state.plan is not None and "d" not in made.state.plan.nodes
    assert not released(made)
    made.tick(NoticeWithdrawn("c"))
    assert released(made) == (["d"] if flag else [])
    made.steps(5)
    assert released(made) == (["d"] if flag else [])
    assert not any(orders(one, RequestNodes) for one in made.decisions[-6:])


def test_what_is_to_stand_in_stays_also_where_the_run_is_to_be_cheap() -> None:
    for flag in (True, False):
        made = story(SPOT, FIXED, flag=flag, purpose="cheapest")
        made.tick(Notice("c", made.now_s + 600))
        made.nodes("d")
        made.steps(1)
        assert released(made) == ([] if flag else ["d"])


def test_the_dearest_ones_go_and_none_that_is_ones_own() -> None:
    """Two of four that are prepared are to stand in for nodes with a notice."""
    made = story(SPOT, FIXED, OURS)
    made.tick(Notice("b", made.now_s + 600), Notice("c", made.now_s + 600))
    new = [Node(f"{name}-{k}", name) for name in ("spot", "fixed", "ours") for k in range(2)]
    made.tick(*map(NodeReady, new))
    made.tick(*(NodePrepared(node.node_id) for node in new))
    assert sorted(released(made)) == ["fixed-0", "fixed-1", "spot-0", "spot-1"]
    again = story(OURS)
    again.nodes("d", pool="ours")
    again.steps(3)
    assert not released(again)
