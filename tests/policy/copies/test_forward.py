"""After a break: a step that some have committed is made whole where it can be; wrong content and
numbers that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import SPOT, Story, orders, plan_of

from elastic.policy.decide import QUIESCED_MOST_S
from elastic.policy.state.fold import State, fold
from elastic.types import (
    Abort,
    Copy,
    CopyStored,
    Decision,
    DigestChecked,
    DriverStarted,
    EnterPlan,
    Holding,
    Layout,
    NodeLost,
    NodePrepared,
    Notice,
    Plan,
    PlanFailed,
    Quiesced,
    RemoveCopy,
    RollForward,
    StepDone,
    WorkerFailed,
    WorkerId,
)

COMMIT = (4.0, 2.0, 10.0, 0.0, 0.0, 0.0, 1.0, 2.0)
REPLICAS = {4: "dp_replicate=2,dp_shard=2", 3: "dp_shard=3", 2: "dp_shard=2", 1: "dp_shard=1"}
Copies = tuple[tuple[int, int], ...]  # (rank, step)
WHOLE: Copies = ((0, 6), (1, 6), (2, 6), (3, 6))


def left(plan: Plan, name: str, step: int, said: str = "", copies: Copies = ()) -> Quiesced:
    """What worker 0 of a node says when it has left: live after `step`, and peer replicas. `said`:
    it has seen the "commit" of that step, or waits with the gradients of the next ("pending")."""
    worker, generation = WorkerId(name, 0), plan.generation
    held = [Holding(worker, generation, plan.ranks.index(worker), step, "live")]
    held += [Holding(worker, generation, r, s, "peer") for r, s in copies]
    commit, pending_step = COMMIT if said == "commit" else (), step + 1 if said == "pending" else -1
    return Quiesced(worker, generation, step, tuple(held), commit, pending_step)


def broken(layout: Any = "auto", names: str = "abcd", lost: str = "d") -> tuple[Story, Plan]:
    """Step 8 is under way after 7, and a node is lost."""
    story = Story(layout=layout, peer_every=3)
    plan = story.running(*names, steps=7)
    story.tick(NodeLost(lost))
    assert orders(story.decisions[-1], Abort)
    return story, plan


def said(story: Story, *events: Quiesced) -> Decision:
    return story.tick(*events)


# ------------------------------------------------------------------------------------- roll-forward


def test_with_replicas_those_who_missed_the_commit_apply_it() -> None:
    story, plan = broken(REPLICAS)
    assert plan.layout == Layout(dp_replicate=2, dp_shard=2)
    decision = said(
        story,
        left(plan, "a", 8, "commit"),
        left(plan, "b", 7, "pending"),
        left(plan, "c", 7, "pending"),
    )
    assert orders(decision, RollForward) == [RollForward(1, 8, COMMIT)]
    assert (
        "2 workers did not see it" in decision.reason and "step 8 was committed" in decision.reason
    )
    assert not story.tick().actions
    assert not orders(said(story, left(plan, "b", 8, "commit")), EnterPlan), "c has not answered"
    decision = said(story, left(plan, "c", 8, "commit"))
    resume = plan_of(decision).resume
    assert (resume.source, resume.step, resume.generation) == ("peer", 8, 1)
    assert {h.worker.node_id for h in resume.holdings} == {"a", "b", "c"}


def test_without_replicas_a_part_that_went_with_its_node_keeps_all_back() -> None:
    story, plan = broken()
    decision = said(
        story,
        left(plan, "a", 8, "commit", copies=WHOLE),
        left(plan, "b", 7, "pending"),
        left(plan, "c", 7, "pending"),
    )
    assert not orders(decision, RollForward) and plan_of(decision).resume.step == 6


def test_when_nobody_is_gone_a_missed_commit_is_applied_without_replicas() -> None:
    story = Story()
    plan = story.running("a", "b", steps=7)
    story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "reset"))
    decision = said(story, left(plan, "a", 8, "commit"), left(plan, "b", 7, "pending"))
    assert orders(decision, RollForward) == [RollForward(1, 8, COMMIT)]
    story.tick(left(plan, "b", 8, "commit"))
    wait = story.tick(after_s=1)
    assert plan_of(wait).resume.step == 8


def test_a_commit_that_nobody_has_or_that_all_have_needs_nothing() -> None:
    story, plan = broken(REPLICAS)
    decision = said(story, *(left(plan, name, 7, "pending") for name in "abc"))
    assert not orders(decision, RollForward) and plan_of(decision).resume.step == 7
    story, plan = broken(REPLICAS)
    decision = said(story, *(left(plan, name, 8, "commit") for name in "abc"))
    assert not orders(decision, RollForward) and plan_of(decision).resume.step == 8


def test_replicas_that_have_the_step_whole_need_nobody_else() -> None:
    story, plan = broken(REPLICAS)
    decision = said(
        story,
        left(plan, "a", 8, "commit"),
        left(plan, "b", 8, "commit"),
        left(plan, "c", 7, "pending"),
    )
    assert not orders(decision, RollForward) and plan_of(decision).resume.step == 8


def test_gradients_of_another_step_are_of_no_use() -> None:
    story, plan = broken(REPLICAS)
    behind = replace(left(plan, "b", 7), pending_step=9)
    decision = said(story, left(plan, "a", 8, "commit"), behind, left(plan, "c", 7))
    assert not orders(decision, RollForward)


def test_one_that_fails_to_apply_it_leaves_the_older_copy() -> None:
    story, plan = broken(REPLICAS)
    said(
        story,
        left(plan, "a", 8, "commit"),
        left(plan, "b", 7, "pending", copies=WHOLE),
        left(plan, "c", 7, "pending"),
    )
    story.tick(left(plan, "c", 8, "commit"))
    worker = WorkerId("b", 0)
    torn = Quiesced(
        worker,
        plan.generation,
        -1,
        tuple(Holding(worker, plan.generation, r, s, "peer") for r, s in WHOLE),
    )
    decision = story.tick(torn)
    assert not orders(decision, RollForward), "it is tried once"
    assert plan_of(decision).resume.step == 6


def test_one_that_dies_meanwhile_is_not_waited_for() -> None:
    story, plan = broken(REPLICAS)
    said(
        story,
        left(plan, "a", 8, "commit", copies=WHOLE),
        left(plan, "b", 7, "pending"),
        left(plan, "c", 7, "pending"),
    )
    story.tick(NodeLost("b"))
    decision = story.tick(left(plan, "c", 8, "commit"))
    assert plan_of(decision).resume.step == 6


def test_one_that_does_not_answer_is_ended() -> None:
    story, plan = broken(REPLICAS)
    said(
        story,
        left(plan, "a", 8, "commit"),
        left(plan, "b", 7, "pending"),
        left(plan, "c", 7, "pending"),
    )
    story.tick(left(plan, "b", 8, "commit"))
    late = story.tick(after_s=QUIESCED_MOST_S)
    assert orders(late, Abort) == [Abort(1, kill=(WorkerId("c", 0),))]
    assert plan_of(story.tick()).resume.step == 8, "a and b hold all of it"


def test_what_was_said_before_the_order_does_not_answer_it() -> None:
    story, plan = broken(REPLICAS)
    pending = left(plan, "b", 7, "pending")
    said(story, left(plan, "a", 8, "commit"), pending, left(plan, "c", 7, "pending"))
    story.tick(left(plan, "c", 8, "commit"))
    assert not orders(story.tick(pending), EnterPlan)
    assert plan_of(story.tick(left(plan, "b", 8, "commit"))).resume.step == 8


def test_a_driver_that_comes_back_meanwhile_asks_again() -> None:
    story, plan = broken(REPLICAS)
    said(
        story,
        left(plan, "a", 8, "commit"),
        left(plan, "b", 7, "pending"),
        left(plan, "c", 7, "pending"),
    )
    story.tick(
        DriverStarted("story", 2, story.start.job, (SPOT,), story.start.model, attached=True),
        after_s=5,
    )
    story.tick(*(NodePrepared(name) for name in "abc"))
    assert orders(story.decisions[-1], Abort)
    decision = story.tick(
        left(plan, "a", 8, "commit"), left(plan, "b", 8, "commit"), left(plan, "c", 7, "pending")
    )
    assert plan_of(story.tick() if not decision.actions else decision).resume.step == 8


def test_a_commit_broken_by_a_loss_while_others_already_enter_the_next_plan() -> None:
    """The stop word of step 8 reached a and b, which answer for the newer generation."""
    story = Story(layout=REPLICAS)
    plan = story.running("a", "b", "c", "d", steps=7)
    target = plan_of(story.tick(Notice("d", story.now_s + 5)))
    story.tick(NodeLost("d"))
    ahead = [
        replace(left(plan, name, 8, "commit"), generation=target.generation, step=-1)
        for name in "a"
    ]
    decision = said(story, *ahead, left(plan, "b", 7, "pending"), left(plan, "c", 7, "pending"))
    assert orders(decision, RollForward) == [RollForward(plan.generation, 8, COMMIT)]


def test_a_step_that_is_told_of_after_the_abort_is_still_counted() -> None:
    story, plan = broken(REPLICAS)
    story.tick(StepDone(plan.generation, 8, 1.0, 10, 0.0, digest="d8"))
    assert (story.state.step, story.state.best_step) == (8, 8) and 8 in story.state.digests
    assert story.state.step_time_s == pytest.approx(0.1), "nobody measured it"


# ------------------------------------------------------------------------------------ second losses


def second_loss(lost: str) -> tuple[Story, Plan, Plan]:
    """b has notice, its state is on its way to a and c; then `lost` goes too."""
    story = Story(peer_every=1)
    plan = story.running("a", "b", "c", steps=6)
    target = plan_of(story.tick(Notice("b", story.now_s + 5)))
    assert orders(story.tick(NodeLost(lost)), Abort) == [Abort(target.generation)]
    return story, plan, target


@pytest.mark.parametrize("lost", ["c", "b"], ids=["the receiver", "the sender"])
def test_a_loss_during_a_transition_goes_back_to_the_newest_whole_step(lost: str) -> None:
    story, plan, target = second_loss(lost)
    keeper = {0: ("a", "b"), 1: ("b", "c"), 2: ("c", "a")}  # of step 5: its own, and the next one's
    for name in "abc".replace(lost, ""):
        copies = tuple((rank, 5) for rank, on in keeper.items() if name in on)
        said(story, left(plan, name, 6, "commit", copies=copies))
    new = story.state.target
    assert new is not None and new.generation == target.generation + 1
    assert (new.resume.source, new.resume.step, new.resume.generation) == (
        "peer",
        5,
        plan.generation,
    )
    assert lost not in new.nodes and "b" not in new.nodes


def test_two_losses_at_once_find_the_step_that_is_whole_in_storage() -> None:
    story = Story(peer_every=1, durable_every=4)
    plan = story.running("a", "b", "c", "d", steps=6)
    story.tick(CopyStored(Copy(4, "durable", 1, plan.layout, plan.layers, uri="u4"), 0.1))
    story.tick(NodeLost("b"), NodeLost("c"))
    said(story, left(plan, "a", 6, copies=((0, 5), (3, 5))))
    decision = said(story, left(plan, "d", 6, copies=((3, 5), (2, 5))))
    assert (plan_of(decision).resume.source, plan_of(decision).resume.step) == ("durable", 4), (
        "nobody has rank 1"
    )


# ------------------------------------------------------------------------------------------ content


def wrong(story: Story, generation: int) -> Decision:
    return story.tick(DigestChecked(generation, ok=False, n_bytes=100))


@pytest.mark.parametrize("flag", [True, False])
def test_wrong_content_is_left_behind_with_all_that_came_of_it(flag: bool) -> None:
    story = Story(peer_every=1)
    story.state = replace(story.state, removes_distrusted=flag)
    first = story.running("a", "b", steps=4)
    story.tick(CopyStored(Copy(4, "durable", 1, first.layout, first.layers, uri="u4"), 0.1))
    second = plan_of(story.nodes("c"))
    story.entered()
    story.steps(2)
    story.tick(CopyStored(Copy(6, "durable", 2, second.layout, second.layers, uri="u6"), 0.1))
    third = plan_of(story.tick(Notice("c", story.now_s + 1)))
    story.entered()
    story.steps(1)
    decision = wrong(story, 2)
    assert orders(decision, Abort) and "content of generation 2 differs" in decision.reason
    assert "distrusted with it: 3" in decision.reason and story.state.distrusted == {2, 3}
    assert [copy.uri for copy in story.state.durable] == ["u4"]
    gone = orders(story.tick(), RemoveCopy)
    held = {name: left(third, name, 7) for name in "ab"}
    back = plan_of(said(story, *held.values()))
    assert (back.cause, back.resume.uri, back.resume.step) == ("rollback", "u4", 4)
    assert (
        "3 steps back" in story.decisions[-1].reason and "rolled back" in story.decisions[-1].reason
    )
    story.entered()
    late = Copy(8, "durable", 3, third.layout, third.layers, uri="u8")
    gone += orders(story.tick(CopyStored(late, 0.1)), RemoveCopy)
    assert gone == ([RemoveCopy("u6"), RemoveCopy("u8")] if flag else [])
    assert story.state.durable[0].uri == "u4", (
        "a copy of a distrusted generation does not count, however late it comes"
    )


def test_content_found_wrong_while_its_generation_is_broken_off_is_not_used() -> None:
    story = Story(peer_every=1)
    story.running("a", "b", "c", steps=4)
    second = plan_of(story.tick(Notice("c", story.now_s + 1)))
    story.entered()
    story.steps(2)
    story.tick(NodeLost("b"))
    wrong(story, second.generation)
    decision = said(story, left(second, "a", 6, copies=((0, 6), (1, 6))))
    assert plan_of(decision).resume.source == "fresh", (
        "only the wrong generation is in memory, and nothing was stored"
    )


def test_a_generation_that_came_of_an_older_copy_is_not_distrusted() -> None:
    story = Story(peer_every=1)
    first = story.running("a", "b", "c", steps=4)
    second = plan_of(story.tick(Notice("c", story.now_s + 1)))
    story.tick(NodeLost("b"))
    third = plan_of(
        said(story, left(first, "a", 4, copies=((0, 4), (1, 4), (2, 4))), left(first, "c", 4))
    )
    assert third.resume.generation == first.generation
    story.entered()
    assert not wrong(story, second.generation).actions
    assert story.state.distrusted == {second.generation} and story.state.phase == "running"


@pytest.mark.parametrize("flag", [True, False])
def test_a_new_driver_still_knows_what_is_not_to_be_trusted(flag: bool) -> None:
    state = State(distrusted=frozenset({2}), generation=3)
    copies = (Copy(8, "durable", 2, Layout(), uri="u8"), Copy(4, "durable", 1, Layout(), uri="u4"))
    story = Story()
    state = fold(
        state,
        DriverStarted(
            *("r", 2, story.start.job, (SPOT,), story.start.model), durable=copies,
            removes_distrusted=flag,
        ),
        1.0,
    )  # fmt: skip
    assert state.spoilt == (("u8",) if flag else ()), "what the one before has not come to"
    assert (
        [copy.uri for copy in state.durable] == ["u4"]
        and state.distrusted == {2}
        and state.generation == 3
    )


# ---------------------------------------------------------------------------- numbers that are none


def not_finite(plan: Plan, step: int) -> list[WorkerFailed]:
    text = (
        f"step {step}: train_loss nan: the loss of rank 1 on b/0 is not finite; its samples: 7, 19"
    )
    return [
        WorkerFailed(worker, plan.generation, "not_finite", text, 0, step) for worker in plan.ranks
    ]


def test_a_step_that_is_no_number_goes_back_once_and_then_ends_the_run() -> None:
    story = Story(peer_every=3)
    plan = story.running("a", "b", steps=7)
    decision = story.tick(*not_finite(plan, 8))
    assert (
        orders(decision, Abort)
        and "rank 1 on b/0" in decision.reason
        and "7, 19" in decision.reason
    )
    assert story.state.rollbacks == 1, "both ranks tell of the same"
    back = plan_of(said(story, left(plan, "a", 7, copies=((0, 6), (1, 6))), left(plan, "b", 7)))
    assert (back.cause, back.resume.step) == ("rollback", 6), (
        "a copy from before, and the same samples again"
    )
    again = story.entered()
    story.steps(1)
    story.tick(*not_finite(again, 8))
    assert story.state.phase == "failed"
    assert (
        "step 8" in story.state.outcome_reason
        and "again, after one roll-back" in story.state.outcome_reason
    )
    assert "\n" not in story.state.outcome_reason and "rank 1" in story.state.outcome_reason


def test_it_explains_the_error_of_a_rank_that_was_heard_first() -> None:
    story = Story(peer_every=3)
    plan = story.running("a", "b", steps=7)
    story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "closed by peer"))
    assert orders(story.decisions[-1], Abort)
    story.tick(not_finite(plan, 8)[0])
    back = plan_of(said(story, left(plan, "a", 7, copies=((0, 6), (1, 6))), left(plan, "b", 7)))
    assert (back.cause, back.resume.step, story.state.rollbacks) == ("rollback", 6, 1)


def test_a_loss_meanwhile_stays_a_loss() -> None:
    story, plan = broken()
    story.tick(not_finite(plan, 8)[0])
    assert story.state.rollbacks == 0 and not story.state.fatal


def test_without_an_older_copy_the_same_state_is_tried_again() -> None:
    story = Story(peer_every=0, layout=REPLICAS)
    plan = story.running("a", "b", "c", "d", steps=7)
    story.tick(*not_finite(plan, 8))
    back = plan_of(said(story, *(left(plan, name, 7) for name in "abcd")))
    assert (back.resume.step, back.cause) == (7, "rollback")


def test_it_is_not_rolled_forward_to() -> None:
    story = Story(peer_every=3)
    plan = story.running("a", "b", steps=7)
    story.tick(*not_finite(plan, 8)[:1])
    decision = said(
        story, left(plan, "a", 7, "commit", copies=((0, 6), (1, 6))), left(plan, "b", 6, "pending")
    )
    assert not orders(decision, RollForward) and plan_of(decision).resume.step < 7


def test_the_reason_of_a_failed_plan_is_no_roll_back() -> None:
    story = Story()
    plan = story.running("a", "b", steps=3)
    story.tick(PlanFailed(plan.generation, "the store is gone"))
    assert story.state.rollbacks == 0 and orders(story.decisions[-1], Abort)
