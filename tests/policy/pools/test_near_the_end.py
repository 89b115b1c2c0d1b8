"""What a run that is about to end asks for, takes in, and keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import MODEL, Story, job, orders

from elastic.policy.decide import decide
from elastic.policy.pools.node_orders import capacity
from elastic.policy.speed import relayout, share_rebalance
from elastic.policy.state.fold import PoolSeen, Request, State
from elastic.types import (
    Decision,
    Job,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    Pool,
    ReleaseNode,
    RequestNodes,
    SetShares,
    StepDone,
    StopAsked,
    StorageSeen,
    WorkerId,
)

# ------------------------------------------------------------------------------ what is on order


def story(flag: bool = True, **changes: Any) -> Story:
    """Of four spot nodes two are to train, and two stay on order."""
    told = Story(peer_every=1, **changes)
    told.state = replace(told.state, withdraws_at_end=flag)
    return told


def released(decision: Decision) -> list[str]:
    return [order.node_id for order in orders(decision, ReleaseNode)]


@pytest.mark.parametrize("flag", [True, False])
def test_a_run_that_is_to_stop_waits_for_no_nodes(flag: bool) -> None:
    told = story(flag)
    told.running("a", "b", steps=2)
    decision = told.tick(StopAsked("enough"))
    assert orders(decision, RequestNodes) == ([RequestNodes("spot", 0, "spot-1")] if flag else [])
    assert ("2 requested nodes not waited for" in decision.reason) == flag
    assert bool(told.state.requests) == (not flag)
    seen = told.state.history["spot"]
    assert not told.state.backoff and (seen.unanswered, seen.dry_since_s) == (0, None)
    assert released(told.tick(NodeReady(Node("c", "spot")))) == (["c"] if flag else [])
    assert not orders(told.tick(after_s=1), ReleaseNode), "it is said once"


def test_it_keeps_no_nodes_that_hold_nothing() -> None:
    told = story(max_workers=2)
    told.running("a", "b", steps=2)
    told.nodes("c")
    assert told.state.nodes["c"].status == "prepared"
    assert released(told.tick(StopAsked("enough"))) == ["c"]


def test_neither_does_one_whose_budget_is_spent() -> None:
    told = story(budget_usd=2.0)
    told.running("a", "b", steps=4)
    told.state = replace(told.state, usd=2.0)
    decision = told.tick(after_s=1)
    assert orders(decision, RequestNodes) == [RequestNodes("spot", 0, "spot-1")]


@pytest.mark.parametrize("flag", [True, False])
def test_nor_one_that_stores_its_last_checkpoint(flag: bool) -> None:
    told = story(flag, steps=4)
    plan = told.running("a", "b", steps=3)
    decision = told.tick(StepDone(plan.generation, 4, 1.0, 10, 0.1))
    assert orders(decision, RequestNodes) == ([RequestNodes("spot", 0, "spot-1")] if flag else [])
    assert not told.state.backoff
    assert released(told.tick(NodeReady(Node("c", "spot")))) == (["c"] if flag else [])


def test_while_storage_is_away_nodes_that_are_being_prepared_stay() -> None:
    """State is in memory alone until it answers, and what breaks is mended with them."""
    told = story()
    told.running("a", "b", steps=2)
    told.tick(NodeReady(Node("c", "spot")))
    told.tick(StorageSeen(False, "journal: no answer", told.now_s))
    decision = told.tick(StopAsked("enough"))
    assert orders(decision, RequestNodes) == [RequestNodes("spot", 0, "spot-1")]
    assert not released(decision)
    assert released(told.tick(NodeReady(Node("d", "spot")))) == ["d"]


def test_a_node_that_is_being_prepared_may_be_needed_to_save_what_memory_holds() -> None:
    told = story(min_workers=2)
    plan = told.running("a", "b", steps=4)
    told.tick(NodeReady(Node("c", "spot")))
    told.tick(NodeLost("b"))
    told.tick(StopAsked("enough"))
    told.quiesced(plan, {"a": [(0, 4, "peer"), (1, 4, "peer")]})
    assert not any(released(decision) for decision in told.decisions)
    told.tick(NodePrepared("c"))
    assert told.state.target is not None and set(told.state.target.nodes) == {"a", "c"}


# --------------------------------------------------------------------------- what is asked for late

SPOT = Pool("cheap", "CPU", 2, "spot", 1.0, 0, 3)
FIXED = Pool("fixed", "CPU", 2, "on-demand", 3.0, 0, 2)
OWNED = Pool("ours", "CPU", 2, "owned", 0.0, 0, 1)
ALL = {"ours": 1, "cheap": 1, "fixed": 2}
TWO = {name: Node(name, "cheap", 2, "prepared") for name in "ab"}


def asked(
    left: int, now_s: float = 0.0, *, start_s: float = 180.0, flag: bool = True, **changes: Any
) -> dict[str, int]:
    """Of a run with so many steps left, each of which takes its two nodes a second."""
    values: dict[str, Any] = {
        "run": "r", "job": Job.from_plain(job(steps=10_000, purpose="fastest")), "model": MODEL,
        "pools": (FIXED, SPOT, OWNED), "nodes": TWO, "step": 10_000 - left, "worker_step_s": 4.0,
        "history": {"cheap": PoolSeen(start_s=start_s)}, "first_started_at_s": 0.0,
        "weighs_rest": flag,
    } | changes  # fmt: skip
    decision = capacity(State(**values), now_s)
    return {order.pool: order.count for order in orders(decision, RequestNodes)}


def test_a_node_that_would_come_after_the_last_step_is_not_asked_for() -> None:
    """Twice a start of three minutes; who was never seen to start counts as the slowest other."""
    assert asked(40) == asked(359) == {"ours": 1}
    assert asked(361) == ALL
    assert asked(40, flag=False) == ALL


@pytest.mark.parametrize(
    ("left", "flag", "n"),
    [(1070, True, {}), (1090, True, {"cheap": 1}), (1070, False, {"cheap": 1})],
)
def test_nor_is_one_that_would_not_be_taken_in(left: int, flag: bool, n: dict[str, int]) -> None:
    """A third of what is left after its start is gained, for a pause of five minutes."""
    ranks = tuple(WorkerId(name, k) for name in "ab" for k in range(2))
    plan = Plan(1, Layout(dp_shard=4), ranks, (1,) * 4, (MODEL.n_blocks,))
    known = {"plan": plan, "phase": "running", "pauses_s": (300.0,), "step_time_s": 1.0}
    assert asked(left, pools=(SPOT,), flag=flag, **known) == n


def test_a_run_that_is_done_asks_for_none() -> None:
    assert asked(0, start_s=30.0) == {}


def test_a_fast_start_is_not_weighed() -> None:
    assert asked(40, start_s=30.0) == ALL


def test_too_few_nodes_to_run_are_asked_for_whatever_is_left() -> None:
    assert asked(40, nodes={}) == {"ours": 1, "cheap": 3, "fixed": 2}


def test_nothing_is_weighed_before_a_step_was_measured() -> None:
    assert asked(40, worker_step_s=0.0) == ALL


@pytest.mark.parametrize(
    ("left", "before_s", "expected"),
    [
        (9000, 400.0, ALL),
        # it misses its deadline as it is: what comes in time helps
        (9000, 200.0, ALL),
        (9000, 120.0, {"ours": 1}),
        # it makes it, if nothing happens
        (150, 200.0, {"ours": 1, "fixed": 2}),
        (150, 170.0, {"ours": 1}),
    ],
)
def test_nor_is_one_that_would_come_after_the_deadline(
    left: int, before_s: float, expected: dict[str, int]
) -> None:
    limited = Job.from_plain(job(steps=10_000, purpose="fastest", deadline_h=1.0))
    assert asked(left, 3600.0 - before_s, job=limited) == expected


def test_a_slow_node_is_not_left_for_one_that_would_come_too_late() -> None:
    late = State(
        job=Job.from_plain(job(steps=10_000)), pools=(SPOT,), nodes=TWO, step=9960,
        worker_step_s=4.0, history={"cheap": PoolSeen(start_s=180.0)}, weighs_rest=True,
    )  # fmt: skip
    assert not relayout._can_be_had(late, TWO["a"], 0.0)
    assert relayout._can_be_had(replace(late, step=0), TWO["a"], 0.0)
    assert relayout._can_be_had(replace(late, weighs_rest=False), TWO["a"], 0.0)


# ---------------------------------------------------------------------------- what is taken in late


@pytest.mark.parametrize(
    ("left", "pause_s", "flag", "grows"),
    [
        (3, 15.0, True, False),
        (3, 15.0, False, True),
        (44, 15.0, True, False),  # a third of it is gained
        (46, 15.0, True, True),
        (3, 2.0, True, True),  # a short one is not weighed
    ],
)
def test_a_node_is_not_taken_in_for_less_than_its_pause(
    left: int, pause_s: float, flag: bool, grows: bool
) -> None:
    told = Story()
    told.running("a", "b")
    told.steps(100 - left, step_time_s=1.0)
    told.state = replace(told.state, weighs_rest=flag, pauses_s=(pause_s,))
    decision = told.nodes("c")
    assert (told.state.target is not None) == grows
    assert ("c can join 2 workers too late" in decision.reason) == (not grows)


@pytest.mark.parametrize("looked_at", ["shares", "rearranged"])
def test_beside_such_a_node_shares_and_layout_follow_the_speeds(
    looked_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Story()
    told.running("a", "b")
    told.steps(97, step_time_s=1.0)
    told.state = replace(told.state, weighs_rest=True, pauses_s=(15.0,))
    told.nodes("c")
    moved = Decision((SetShares(told.state.generation, (1, 3), told.state.step),), "b is faster")
    module = share_rebalance if looked_at == "shares" else relayout
    monkeypatch.setattr(module, looked_at, lambda state, now_s: moved)
    decision = decide(told.state, told.now_s)
    assert orders(decision, SetShares) and "too late" in decision.reason


@pytest.mark.parametrize("flag", [True, False])
def test_a_node_that_is_not_taken_in_any_more_is_released(flag: bool) -> None:
    told = late_node(releases_late=flag)
    found = [told.nodes("c"), told.tick(after_s=1)]
    assert [name for decision in found for name in released(decision)] == (["c"] if flag else [])
    told.tick(NodeLost("c", "released"))
    assert not orders(told.tick(after_s=1), RequestNodes), "and not asked for again"


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 10},
        # another one would be asked for, whatever is left of the run
        {"history": {"spot": PoolSeen(start_s=30.0)}},
        {"pools": (replace(SPOT, name="spot", market_type="owned"),)},
        {"requests": {"r": Request("r", "spot", 1, 0.0)}},
    ],
    ids=["it will be", "it starts fast", "it is one's own", "another one may come"],
)
def test_one_that_may_be_of_use_stays(changes: dict[str, Any]) -> None:
    told = late_node()
    told.tick(NodeReady(Node("c", "spot")))
    told.state = replace(told.state, **changes)
    found = [told.tick(NodePrepared("c")), told.tick(after_s=1)]
    assert not any(released(decision) for decision in found)


def test_one_that_is_to_stand_in_for_a_node_with_a_notice_stays() -> None:
    told = late_node()
    told.tick(Notice("b", told.now_s + 500.0))
    found = [told.nodes("c"), told.tick(after_s=1)]
    assert not any(released(decision) for decision in found)


def late_node(**changes: Any) -> Story:
    """Two train, and have three steps to go; nodes take three minutes to start."""
    told = Story()
    told.running("a", "b")
    told.steps(97, step_time_s=1.0)
    known = {
        "weighs_rest": True, "releases_late": True, "pauses_s": (15.0,), "requests": {},
        "history": {"spot": PoolSeen(start_s=180.0)},
    } | changes  # fmt: skip
    told.state = replace(told.state, **known)
    return told
