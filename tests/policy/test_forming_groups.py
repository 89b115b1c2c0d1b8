"""When the groups of an announced generation are made ahead, what waits for them, and what drops
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, orders, plan_of

from elastic.policy import forming_groups, transition_cost
from elastic.policy.pools.drain import lead_of
from elastic.policy.state.fold import fold
from elastic.types import (
    Abort,
    DriverStarted,
    DropGroups,
    EnterPlan,
    FormGroups,
    GroupsFormed,
    NodeLost,
    Notice,
    NoticeWithdrawn,
    Pool,
    WorkerId,
)  # fmt: skip


def story(*names: str, pools: tuple[Pool, ...] = (SPOT,)) -> Story:
    told = Story(pools)
    told.state = replace(told.state, forms_ahead=True)
    told.running(*names, steps=5)
    return told


def growing() -> Story:
    told = story("a", "b")
    decision = told.nodes("c")
    (order,) = orders(decision, FormGroups)
    assert not orders(decision, EnterPlan) and set(order.plan.nodes) == {"a", "b", "c"}
    return told


def test_growth_waits_for_its_groups_and_says_what_they_took() -> None:
    told = growing()
    assert not told.tick(after_s=5).actions
    decision = told.tick(GroupsFormed(2, 7.5))
    assert plan_of(decision).cause == "growth"
    assert "groups of generation 2 made ahead in 7.5 s" in decision.reason
    assert told.state.forming is None


def test_ranks_keep_the_order_that_the_groups_were_made_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = growing()
    (made,) = [order.plan for decision in told.decisions for order in orders(decision, FormGroups)]
    monkeypatch.setattr(
        transition_cost,
        "placed",
        lambda state, choice, resume: replace(choice, ranks=choice.ranks[::-1]),
    )
    entered = plan_of(told.tick(GroupsFormed(2, 1.0)))
    assert (entered.ranks, entered.samples, entered.copies_to) == (
        made.ranks,
        made.samples,
        made.copies_to,
    )
    assert "made ahead" in told.decisions[-1].reason


def test_growth_does_not_wait_for_ever() -> None:
    told = growing()
    decision = told.tick(after_s=forming_groups.FORM_MOST_S + 1)
    assert (
        plan_of(decision).cause == "growth"
        and "made in the pause: not there after" in decision.reason
    )


def test_groups_that_could_not_be_made_are_made_in_the_pause() -> None:
    told = growing()
    decision = told.tick(GroupsFormed(2, 0.0, "connection reset"))
    assert (
        plan_of(decision).cause == "growth"
        and "made in the pause: connection reset" in decision.reason
    )


def test_a_node_that_is_lost_meanwhile_drops_what_was_made_for_it() -> None:
    told = growing()
    decision = told.tick(NodeLost("c", "gone"))
    assert orders(decision, DropGroups) == [DropGroups(2)] and told.state.forming is None
    assert told.state.phase == "running"


@pytest.mark.parametrize("there", [False, True])
def test_a_loss_is_handled_as_without(there: bool) -> None:
    told = growing()
    if there:
        told.state = fold(told.state, GroupsFormed(2, 3.0), told.now_s)
    decision = told.tick(NodeLost("b", "gone"))
    assert (
        orders(decision, Abort) and told.state.forming is None and not orders(decision, EnterPlan)
    )


def noticed(deadline_s: float) -> Story:
    told = story("a", "b", "c")
    told.tick(Notice("c", told.now_s + deadline_s))
    return told


def test_the_groups_of_a_notice_are_made_while_its_node_trains_on() -> None:
    told = noticed(60)
    (order,) = orders(told.decisions[-1], FormGroups)
    assert set(order.plan.nodes) == {"a", "b"} and told.state.phase == "running"
    assert not told.tick(GroupsFormed(2, 9.0)).actions  # its deadline is far
    decision = told.tick(after_s=55)
    assert plan_of(decision).cause == "notice" and "made ahead in 9.0 s" in decision.reason


def test_a_notice_is_not_late_for_its_groups() -> None:
    told = noticed(30)
    assert orders(told.decisions[-1], FormGroups)
    assert not told.tick(after_s=10).actions
    decision = told.tick(after_s=8)
    assert plan_of(decision).cause == "notice" and "made in the pause" in decision.reason


def test_a_notice_that_leaves_no_time_is_acted_on_at_once() -> None:
    decision = noticed(8).decisions[-1]
    assert plan_of(decision).cause == "notice" and not orders(decision, FormGroups)


def test_a_notice_far_away_makes_no_groups_yet() -> None:
    told = noticed(600)
    assert not orders(told.decisions[-1], FormGroups)
    wake_s = told.decisions[-1].wake_at_s
    assert wake_s is not None
    assert orders(told.tick(after_s=wake_s - told.now_s + 0.01), FormGroups)


@pytest.mark.parametrize("there", [False, True])
def test_a_notice_that_is_withdrawn_drops_its_groups(there: bool) -> None:
    told = noticed(60)
    if there:
        told.tick(GroupsFormed(2, 3.0))
    decision = told.tick(NoticeWithdrawn("c"))
    assert orders(decision, DropGroups) == [DropGroups(2)] and "not needed" in decision.reason
    assert not told.tick(after_s=1).actions


def test_set_up_that_is_not_done_ahead_is_part_of_the_lead() -> None:
    told = noticed(60)
    told.tick(GroupsFormed(2, 9.0))
    with_groups = ahead_s(told)
    told.tick(NoticeWithdrawn("c"))
    assert ahead_s(told) == pytest.approx(with_groups + 9.0)


def ahead_s(told: Story) -> float:
    return lead_of(told.state).seconds


def test_a_new_driver_drops_what_the_last_one_had_begun() -> None:
    told = growing()
    start = DriverStarted(
        "story",
        2,
        told.start.job,
        told.start.pools,
        told.start.model,
        attached=True,
        forms_ahead=True,
    )
    told.tick(start, after_s=5)
    told.state = replace(told.state, unseen=frozenset())
    assert told.state.repeat == (DropGroups(2),) and told.state.forming is None
    assert orders(told.tick(), DropGroups) == [DropGroups(2)]
    assert not told.state.repeat


def test_without_a_driver_that_can_nothing_is_made_ahead() -> None:
    told = Story()
    told.running("a", "b", steps=5)
    assert (
        orders(told.nodes("c"), EnterPlan) and WorkerId("c", 0) in plan_of(told.decisions[-1]).ranks
    )


# ---------------------------------------------------------------------------------- memory for both


MIB = 1 << 20
# CUDA's context; of two generations with sharded data each: that group's and the world's
TWO_SETS = (512 + 2 * 2 * 384) * MIB


def on_gpus(spare_bytes: int) -> Story:
    """Two nodes train, on GPUs with so much more than state, gradients, activations and both sets
    of communicators."""
    room = TWO_SETS + spare_bytes
    return story(
        "a", "b", pools=(replace(SPOT, accelerator_type="H100", memory_bytes_per_gpu=room),)
    )


def test_groups_are_made_ahead_where_gpus_hold_the_communicators_of_both_generations() -> None:
    told = on_gpus(64 * MIB)
    assert told.state.plan is not None and 0 < told.state.plan.memory_bytes < 64 * MIB
    assert orders(told.nodes("c"), FormGroups)


def test_where_they_do_not_the_groups_are_made_in_the_pause_and_the_reason_says_so() -> None:
    told = on_gpus(0)
    decision = told.nodes("c")
    assert plan_of(decision).cause == "growth" and not orders(decision, FormGroups)
    assert (
        "groups of generation 2 are made in the pause: beside generation 1 they would need 0.75 "
        "GiB" in decision.reason
    )


def test_a_notice_does_without_them_too() -> None:
    told = story(
        "a",
        "b",
        "c",
        pools=(replace(SPOT, accelerator_type="H100", memory_bytes_per_gpu=TWO_SETS),),
    )
    told.tick(Notice("c", told.now_s + 60))
    decision = told.tick(after_s=55)
    assert (
        plan_of(decision).cause == "notice"
        and "are made in the pause: beside generation 1" in decision.reason
    )
    assert not any(orders(one, FormGroups) for one in told.decisions)


def test_what_the_move_of_the_running_generation_has_connected_counts() -> None:
    told = on_gpus(64 * MIB)
    told.nodes("c")
    told.tick(GroupsFormed(2, 1.0))
    told.entered()
    plan = told.state.plan
    assert plan is not None and plan.move is not None and plan.move.n_bytes
    coming = replace(plan, generation=3)
    assert "0.75 GiB, 2.5" in forming_groups.too_large(told.state, coming), (
        "512 MiB for peers in other nodes"
    )
    told.state = replace(told.state, plan=replace(plan, move=None))
    assert not forming_groups.too_large(told.state, coming)
