"""What a run that is about to end asks for, takes in, and keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, orders

from elastic.types import (
    Decision,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    ReleaseNode,
    RequestNodes,
    StepDone,
    StopAsked,
    StorageSeen,
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
