"""Zones of pools reach the planner, and what it places apart stays apart when workers change
places."""

from __future__ import annotations

from dataclasses import replace

from support.policy.story import SPOT, Story

from elastic.policy import transition_cost
from elastic.policy.plans import choice_of, zone_of
from elastic.types import Holding, Layout, Node, Pool, Resume, WorkerId, grid

EAST = replace(SPOT, name="a", region="r", zone="r-a", gpus_per_node=2)
WEST = replace(SPOT, name="b", region="r", zone="r-b", gpus_per_node=2)


def there() -> list[Node]:
    return [Node("x", "a", 2), Node("y", "b", 2), Node("z", "a", 2)]


def story(**changes: bool) -> Story:
    found = Story(pools=(EAST, WEST), **changes)
    found.nodes("x", pool="a", gpus=2)
    found.nodes("y", pool="b", gpus=2)
    found.nodes("z", pool="a", gpus=2)
    return found


def test_a_plan_over_two_zones_has_a_replica_in_each() -> None:
    state = story().state
    assert choice_of(state, there()).layout == Layout(dp_replicate=3, dp_shard=2)
    assert choice_of(story(across_zones=True).state, there()).layout == Layout(dp_shard=6)
    here = [replace(pool, zone="r-a") for pool in state.pools]
    assert choice_of(replace(state, pools=tuple(here)), there()).layout == Layout(dp_shard=6)


def test_the_decision_says_why_it_is_not_simpler() -> None:
    told = story()
    told.tick(after_s=20)
    assert (
        "its shards would lie in r/r-a and r/r-b; only replicas may, unless across_zones is true"
        in told.decisions[-1].reason
    )


def test_who_has_the_bytes_does_not_bring_zones_together() -> None:
    """The two nodes of zone a are one replica of four; by the bytes that they have, x and y would
    make one."""
    state, nodes = (
        story().state,
        [Node("x", "a", 2), Node("z", "a", 2), Node("y", "b", 2), Node("v", "b", 2)],
    )
    state = replace(
        state,
        nodes={node.node_id: node for node in nodes},
        job=replace(state.job, layout="dp_replicate=2,dp_shard=4"),
    )
    choice = choice_of(state, nodes)
    old = [WorkerId(name, k) for name in ("y", "v", "x", "z") for k in range(2)]
    holdings = tuple(Holding(worker, 1, rank, 3, "peer") for rank, worker in enumerate(old))
    resume = Resume("peer", 3, 1, Layout(dp_shard=8), (4,), holdings)
    placed = transition_cost.placed(state, choice, resume)
    zones = {node.node_id: node.pool for node in nodes}
    for found in (choice, placed):
        for group in grid.axis_groups(found.layout, ("dp_shard",)):
            assert len({zones[found.ranks[rank].node_id] for rank in group}) == 1
    assert sorted(placed.ranks) == sorted(choice.ranks)


def test_a_zone_without_a_name_is_no_zone() -> None:
    assert zone_of(Pool("p")) == "" and zone_of(None) == ""
    assert (
        zone_of(Pool("p", region="r")) == "r" and zone_of(Pool("p", region="r", zone="z")) == "r/z"
    )
