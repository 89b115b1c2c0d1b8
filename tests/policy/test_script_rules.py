"""The rules about nodes that hold for jobs which are changed live hold for a script that is
restarted, too: what it waits for, and what it pays for."""

from __future__ import annotations

import pytest
from support.policy.script_story import RAN_EVERY_S, ScriptStory, three

from elastic.api.running.restarted_script import GATES
from elastic.policy.faults import retries
from elastic.policy.pools import hazard
from elastic.sim.replay import replay
from elastic.types import (
    DrainNode,
    InstancesSeen,
    Node,
    NodeLost,
    NodeReady,
    Pool,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    StopAsked,
)
from elastic.types.replacing import replace

SPOT = Pool("spot", market_type="spot", max_nodes=2, usd_per_node_h=1.0)
FIXED = Pool("fixed", market_type="on-demand", max_nodes=2, usd_per_node_h=4.0)


def asked(story: ScriptStory, pool: str = "spot") -> list[RequestNodes]:
    found = [one for one in story.orders(RequestNodes) if isinstance(one, RequestNodes)]
    return [one for one in found if one.pool == pool and one.count]


def test_spot_that_comes_back_is_not_missed_for_long() -> None:
    story, at_s = ScriptStory(pools=(SPOT,)), list[float]()
    for _ in range(8):
        story.hear(RequestFailed("spot", asked(story)[-1].request_id, "no capacity"))
        n, begun_s = len(asked(story)), story.now_s
        while len(asked(story)) == n:
            story.wait(1.0)
        at_s.append(story.now_s - begun_s)
    assert at_s[0] < at_s[-1] <= hazard.BACKOFF_SPOT_S + 1


def test_nodes_that_are_reclaimed_while_they_start_are_asked_for_again() -> None:
    """Which is no fault of the pool, and does not end the run."""
    story = ScriptStory(pools=(SPOT,), min_workers=2)
    story.hear(NodeReady(Node("s0", "spot")))
    story.wait(10.0)
    for k in range(1, 2 + hazard.STARTS_MOST):
        n = len(asked(story))
        story.hear(NodeReady(Node(f"s{k}", "spot")), NodeLost(f"s{k}", "reclaimed"))
        begun_s = story.now_s
        while len(asked(story)) == n:
            story.wait(1.0)
        assert story.now_s - begun_s <= hazard.BACKOFF_MAX_S + 1
        if k <= hazard.RECLAIMS_BORNE:
            assert story.now_s - begun_s <= 1
    assert story.state.phase == "waiting"


def test_a_run_that_is_to_stop_waits_for_no_nodes_and_keeps_none_without_a_part() -> None:
    story = ScriptStory("n0", pools=(replace(SPOT, max_nodes=4),))
    story.meet(steps=False)
    story.hear(NodeReady(Node("n1", "spot")))
    story.hear()  # it is prepared, too early for another restart
    assert len(story.state.available) == 2 and story.state.requests
    story.hear(StopAsked("enough"))
    assert story.orders(ReleaseNode) == [ReleaseNode("n1")]
    last = story.orders(RequestNodes)[-1]
    assert last == RequestNodes("spot", 0, asked(story)[-1].request_id)
    assert replay(story.lines).identical


def test_no_node_is_asked_for_that_would_start_behind_the_deadline() -> None:
    story = ScriptStory(deadline_h=1.0, budget_usd=1e6, pools=(SPOT,))
    story.wait(700.0)
    story.hear(NodeReady(Node("s0", "spot")))  # so long after it was asked for
    story.wait(20.0)
    story.meet(steps=False)
    story.wait(3600.0 - story.now_s - 600.0)
    n = len(asked(story))
    story.hear(*(RequestFailed("spot", name, "none") for name in story.state.requests))
    story.wait(500.0)
    assert len(asked(story)) == n
    assert "the run would end before one had been of use" in story.lines[-1].decision.reason


def test_machines_that_start_count_for_the_budget() -> None:
    """Also of a request that is not open any more."""
    pools = (Pool("spot", market_type="spot", max_nodes=4, usd_per_node_h=3600.0),)
    story = ScriptStory(pools=pools, budget_usd=200.0)
    story.hear(RequestFailed("spot", asked(story)[-1].request_id, "no capacity"))
    n = len(asked(story))
    story.hear(InstancesSeen("spot", starting=4))
    story.wait(40.0)
    assert len(asked(story)) == n


def back_to_spot(**gates: bool) -> ScriptStory:
    """An on-demand node is left for two of spot, which are taken before the group has ended."""
    pools = (SPOT, FIXED)
    story = ScriptStory(pools=pools, purpose="cheapest", min_workers=1, gates=GATES | gates)
    story.hear(RequestFailed("spot", asked(story)[-1].request_id, "no capacity"))
    story.wait(3600.0)
    story.hear(NodeReady(Node("f0", "fixed")))
    story.wait(25.0)
    story.meet(steps=False)
    story.wait(60.0)
    story.hear(NodeReady(Node("s0", "spot")), NodeReady(Node("s1", "spot")))
    story.wait(10.0)
    assert story.orders(DrainNode) == [DrainNode("f0")]
    story.hear(NodeLost("s0", "gone"), NodeLost("s1", "gone"))
    story.leave()
    story.wait(0.5)
    assert story.plans[-1].nodes == ("f0",)
    return story


def test_a_node_that_was_to_be_left_for_others_that_are_gone_stays() -> None:
    story = back_to_spot()
    story.meet(steps=False)
    story.wait(60.0)
    assert story.state.phase == "running" and not story.orders(ReleaseNode)
    assert replay(story.lines).identical
    before = back_to_spot(keeps_taken=False)
    assert before.orders(ReleaseNode) == [ReleaseNode("f0")]
    assert replay(before.lines).identical, "as it was decided"


@pytest.mark.parametrize("settles", [False, True])
def test_workers_that_die_one_after_another_end_the_run_unless_the_script_runs(
    settles: bool,
) -> None:
    """Of a script without steps, that a group has run for a while is all that is known."""
    story = three()
    for k in range(retries.DEATHS_MOST):
        story.meet(steps=False)
        if settles:
            story.wait(60.0 + 2 * RAN_EVERY_S)
        story.fail(f"n{k % 3}", "its process is gone", kind="process")
        story.leave(*(name for name in ("n0", "n1", "n2") if name != f"n{k % 3}"))
        if story.state.phase not in ("failed", "stopped"):
            story.wait(30.0)
    assert (story.state.phase == "failed") is not settles


def test_a_script_that_is_killed_behind_the_same_line_is_started_as_often_as_any() -> None:
    """Which of the steps behind that line it was nobody knows."""
    story = three()
    for _ in range(retries.SCRIPTS_MOST):
        story.meet(0)
        story.step(100)
        story.fail("n0", "the process of rank 0 was killed from outside", kind="infrastructure")
        story.leave()
        story.wait(30.0)
    assert len(story.plans) == 1 + retries.SCRIPTS_MOST and story.state.phase == "entering"
