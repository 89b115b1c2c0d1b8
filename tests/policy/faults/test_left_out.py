"""Nodes that reach the driver and not each other: the fewest are left out, once they have not met
twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, durable, orders, plan_of, stopped

from elastic.policy.faults.retries import INFRASTRUCTURE_MOST, LEFT_OUT_MOST
from elastic.policy.faults.unreached import WAIT_MOST_S, WAIT_S, kept_out_s
from elastic.types import (
    Decision,
    Node,
    NodeLost,
    NodeReady,
    Plan,
    Pool,
    Prepare,
    Quarantine,
    ReleaseNode,
    Stop,
    WorkerFailed,
    WorkerId,
)

POOLS = (
    Pool("spot", "CPU", 1, "spot", 1.0, 0, 6),
    Pool("dear", "CPU", 1, "spot", 2.0, 0, 6),
    Pool("steady", "CPU", 1, "on-demand", 0.5, 0, 6),
)
Pairs = tuple[tuple[str, str], ...]


def story(*names: str, leaves_out: bool = True, **changes: Any) -> Story:
    """A generation on these nodes, four steps old; a name's first letter is that of its pool."""
    made = Story(POOLS, **changes)
    made.state = replace(made.state, leaves_out=leaves_out)
    for pool in POOLS:
        if mine := [name for name in names if name[0] == pool.name[0:1]]:
            made.nodes(*mine, pool=pool.name)
    made.tick(after_s=20)
    made.entered()
    made.steps(4)
    return made


def breaks(made: Story, plan: Plan, *, unreached: Pairs = (), held: bool = True) -> Decision:
    """It is aborted; all that were in it answer, with the live state of the run's first one."""
    told = [
        WorkerFailed(WorkerId(one, 0), plan.generation, "collective", "x", unreached=(other,))
        for one, other in unreached
    ] or [WorkerFailed(plan.ranks[0], plan.generation, "collective", "nobody makes progress")]
    made.tick(*told)
    first = made.state.plans[1]
    there = {
        worker.node_id: [(rank, 4, "live")] if held else []
        for rank, worker in enumerate(first.ranks)
        if worker in plan.ranks
    }
    return made.quiesced(replace(plan, generation=1), there)


def attempt(made: Story, *pairs: tuple[str, str], held: bool = True) -> Decision:
    """Of a generation that was ordered: it does not meet."""
    made.tick(after_s=WAIT_S)
    assert made.state.target is not None, made.decisions[-1].reason
    return breaks(made, made.state.target, unreached=pairs, held=held)


def aside(made: Story) -> list[str]:
    return [order.node_id for one in made.decisions for order in orders(one, Quarantine)]


def apart(made: Story, *pairs: tuple[str, str], times: int = 2, held: bool = True) -> Decision:
    assert made.state.plan is not None
    decision = breaks(made, made.state.plan, held=held)
    for _ in range(times):
        assert aside(made) == []
        decision = attempt(made, *pairs, held=held)
    return decision


def test_one_of_two_is_left_out_after_the_second_attempt_and_the_other_continues() -> None:
    made = story("s1", "s2")
    decision = apart(made, ("s2", "s1"))
    assert orders(decision, Quarantine) == [
        Quarantine(
            "s1",
            "s1 and s2 do not reach each other, though all answer the driver (generations 2, 3 did "
            "not meet)",
        )
    ]
    assert orders(decision, ReleaseNode) == [ReleaseNode("s1")]
    assert decision.reason.startswith("node s1 is quarantined: s1 and s2 do not reach each other")
    assert made.state.apart == ()
    entering = made.tick()
    going = plan_of(entering)
    assert [worker.node_id for worker in going.ranks] == ["s2"], "at once: the cause is gone"
    assert "node s1 is left out: s1 and s2 do not reach each other" in entering.reason
    assert made.state.retries == 0


def test_what_only_the_left_out_node_holds_counts_as_lost_and_that_is_said() -> None:
    made = story("s1", "s2", layout={2: "dp_shard=2", 1: "dp_shard=1"})
    made.tick(durable(made, 3))
    decision = apart(made, ("s2", "s1"))
    lost = "only with it all of step 4 was held, which is lost: step 3 from the checkpoint"
    assert lost in decision.reason
    resume = plan_of(made.tick(after_s=20)).resume
    assert (resume.source, resume.step) == ("durable", 3)


def test_what_others_hold_too_is_not_lost() -> None:
    made = story("s1", "s2", layout={2: "dp_replicate=2", 1: "dp_shard=1"})
    assert "all of step 4 can be had without" in apart(made, ("s1", "s2")).reason
    resume = plan_of(made.tick(after_s=20)).resume
    assert (resume.source, resume.step) == ("peer", 4)


@pytest.mark.parametrize(
    ("names", "pairs", "left"),
    [
        ("s1 s2 s3 s4", "s1-s3 s2-s3 s4-s3", "s3"),  # the smallest set
        ("s1 s2 s3 s4", "s1-s2 s3-s4", "s1 s3"),
        ("s1 s2 s3 s4 s5", "s1-s2 s2-s3 s3-s4 s4-s5", "s2 s4"),
        ("s1 d2", "s1-d2", "s1"),  # the cheaper one
        ("d1 s2", "d1-s2", "s2"),
        ("o1 s2", "o1-s2", "s2"),  # spot
        ("s2 s1", "s2-s1", "s1"),  # the name
    ],
)
def test_whom(names: str, pairs: str, left: str) -> None:
    made = story(*(name.replace("o", "steady") for name in names.split()))
    told = [tuple(n.replace("o", "steady") for n in pair.split("-")) for pair in pairs.split()]
    apart(made, *told)  # type: ignore[arg-type]
    assert aside(made) == left.split()


def test_who_is_in_more_pairs_counts_also_by_what_was_told_once() -> None:
    made = story("s1", "s2", "s3")
    assert made.state.plan is not None
    breaks(made, made.state.plan)
    attempt(made, ("s1", "s2"))
    attempt(made, ("s1", "s2"), ("s2", "s3"))
    assert aside(made) == ["s2"]


@pytest.mark.parametrize("how", ["met", "lost", "another", "a journal of before"])
def test_nobody_is_left_out(how: str) -> None:
    made = story("s1", "s2", "s3", leaves_out=how != "a journal of before")
    assert made.state.plan is not None
    breaks(made, made.state.plan)
    attempt(made, ("s1", "s2"))
    if how == "met":
        made.tick(after_s=20)
        breaks(made, made.entered())
    elif how == "lost":
        made.tick(NodeLost("s2", "preempted"))
        made.nodes("s2")
    attempt(made, ("s1", "s3") if how == "another" else ("s1", "s2"))
    assert aside(made) == []


def test_where_the_rest_cannot_train_all_are_waited_for_a_while_and_then_the_run_fails() -> None:
    made = story("s1", "s2", min_workers=2)
    began_s = made.now_s
    apart(made, ("s1", "s2"), times=INFRASTRUCTURE_MOST + 1)
    said = "s1 and s2 do not reach each other, and the job cannot train without"
    assert said in made.tick().reason
    while not any(orders(one, Stop) for one in made.decisions):
        attempt(made, ("s1", "s2"))
        assert made.now_s < began_s + 2 * WAIT_MOST_S
    assert made.now_s > began_s + WAIT_MOST_S
    stop = stopped(made)
    assert stop.outcome == "failed" and said in stop.reason and aside(made) == []


def test_one_that_comes_back_under_its_name_is_used_again_later_and_later() -> None:
    made = story("s1", "s2", "s3")
    assert "not used before 300 s from now" in apart(made, ("s1", "s2")).reason
    left_s = made.now_s
    made.tick()
    made.entered()
    made.steps(1)
    made.tick(NodeLost("s1", "released"))
    back = made.tick(NodeReady(Node("s1", "spot", 1)))
    assert not orders(back, Prepare) and back.wake_at_s == left_s + 300
    again = made.tick(after_s=left_s + 300 - made.now_s)
    assert [order.node_id for order in orders(again, Prepare)] == ["s1"]
    assert [kept_out_s(made.state, name) for name in ("s1", "s2")] == [600, 300]


@pytest.mark.parametrize("progress", [True, False])
def test_nodes_are_not_left_out_for_ever(progress: bool) -> None:
    made = story("s1", "s2", "s3")
    apart(made, ("s1", "s2"))
    assert made.state.left_out_behind == (3,)
    made.state = replace(made.state, left_out_behind=tuple(range(LEFT_OUT_MOST)))
    made.tick()
    made.entered()
    made.steps(5 if progress else 4)
    assert made.state.plan is not None
    breaks(made, made.state.plan)
    attempt(made, ("s2", "s3"))
    attempt(made, ("s2", "s3"))
    made.tick()
    assert aside(made) == ["s1", "s2"]
    assert (made.state.phase == "failed") is not progress


def test_as_soon_as_others_come_one_is_left_out() -> None:
    made = story("s1", "s2", min_workers=2)
    apart(made, ("s1", "s2"), times=3)
    made.nodes("s3")
    assert aside(made) == ["s1"]
    assert [w.node_id for w in plan_of(made.tick(after_s=WAIT_S)).ranks] == ["s2", "s3"]
