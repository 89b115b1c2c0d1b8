"""What the policy makes of guards that trip: bounded roll-backs, stops, and skipped steps that are
no failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.policy.story import Story, orders, plan_of

from elastic.config.optimization import Guards
from elastic.ledger.journal import Line, parse_line, write_line
from elastic.types import (
    Abort,
    EnterPlan,
    GuardTripped,
    Holding,
    Plan,
    Quiesced,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)


def guards(**given: Any) -> dict[str, Any]:
    return Guards.model_validate(given).model_dump()


def tripped(plan: Plan, step: int, do: str) -> list[WorkerFailed]:
    text = (
        f"step {step}: train_loss 9 is 12.0 robust deviations above the median 2: rank 1; its "
        "samples: 7, 19"
    )
    failed = WorkerFailed(plan.ranks[0], plan.generation, "guard", text, 0, step, "loss_spike", do)
    return [
        WorkerFailed(worker, failed.generation, "guard", text, 0, step, "loss_spike", do)
        for worker in plan.ranks
    ]


def left(story: Story, plan: Plan, live: int, copy: int) -> Plan:
    """Both workers leave with their live state and a peer replica of both; the plan that
    follows."""
    for rank, worker in enumerate(plan.ranks):
        held = [Holding(worker, plan.generation, rank, live, "live")]
        held += [Holding(worker, plan.generation, r, copy, "peer") for r in (0, 1)]
        decision = story.tick(Quiesced(worker, plan.generation, live, tuple(held)))
    return plan_of(decision)


def test_roll_backs_are_as_many_as_the_job_allows() -> None:
    story = Story(peer_every=3, guards=guards(loss_spike={"do": "rollback", "rollbacks": 2}))
    plan = story.running("a", "b", steps=7)
    assert plan.rolled_back == ()
    decision = story.tick(*tripped(plan, 8, "rollback"))
    assert orders(decision, Abort) and "robust deviations" in decision.reason
    back = left(story, plan, 7, 6)
    assert (back.cause, back.resume.step, back.rolled_back) == ("rollback", 6, (("loss_spike", 8),))
    again = story.entered()
    story.steps(4)
    story.tick(*tripped(again, 11, "rollback"))
    third = left(story, again, 10, 9)
    assert (
        third.rolled_back == (("loss_spike", 8), ("loss_spike", 11)) and story.state.rollbacks == 2
    )
    last = story.entered()
    story.tick(*tripped(last, 12, "rollback"))
    assert (
        story.state.phase == "failed" and "again, after 2 roll-backs" in story.state.outcome_reason
    )


def test_roll_backs_of_guards_are_bounded_by_their_own_rule_alone() -> None:
    story = Story(peer_every=3, guards=guards(loss_spike={"do": "rollback", "rollbacks": 5}))
    plan = story.running("a", "b", steps=7)
    for n in range(4):
        at = 8 + 3 * n
        story.tick(*tripped(plan, at, "rollback"))
        assert left(story, plan, at - 1, at - 2).cause == "rollback"
        plan = story.entered()
        story.steps(4)
    assert story.state.phase == "running" and story.state.rollbacks == 4


def test_a_worker_that_asks_twice_for_the_same_step_gets_no_second_roll_back() -> None:
    story = Story(peer_every=3, guards=guards(loss_spike={"do": "rollback", "rollbacks": 9}))
    plan = story.running("a", "b", steps=7)
    story.tick(*tripped(plan, 8, "rollback"))
    left(story, plan, 7, 6)
    story.tick(*tripped(story.entered(), 8, "rollback"))
    assert (
        story.state.phase == "failed" and "again, after one roll-back" in story.state.outcome_reason
    )


def test_stop_means_stop_with_the_reason_of_the_guard() -> None:
    story = Story(peer_every=3)
    plan = story.running("a", "b", steps=7)
    decision = story.tick(*tripped(plan, 8, "stop"))
    assert [order.outcome for order in orders(decision, Stop)] == ["failed"]
    assert story.state.outcome_reason.endswith("its samples: 7, 19") and not orders(
        decision, EnterPlan
    )


def test_a_skipped_step_is_a_step_whatever_its_loss() -> None:
    story = Story()
    plan = story.running("a", "b", steps=7)
    event = GuardTripped(
        plan.generation, 8, "not_finite", "skip", "step 8: ...", 1, WorkerId("b", 0), (7, 19)
    )
    story.tick(event)
    story.tick(StepDone(plan.generation, 8, math.nan, 10, 0.1, digest="d8", skipped=True))
    assert (story.state.step, story.state.n_skipped, story.state.phase) == (8, 1, "running")
    decision = story.tick(StepDone(plan.generation, 9, math.nan, 10, 0.1, digest="d9"))
    assert orders(decision, Abort) and story.state.rollbacks == 1, "nobody has skipped that one"


def test_a_skip_that_is_told_while_its_generation_is_broken_off_counts() -> None:
    story = Story()
    plan = story.running("a", "b", steps=7)
    story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "gone"))
    assert story.state.aborting is not None and story.state.plan is None
    story.tick(GuardTripped(plan.generation, 8, "loss_spike", "skip", "step 8: ..."))
    story.tick(GuardTripped(plan.generation - 1, 8, "loss_spike", "skip", "step 8: ..."))
    assert story.state.n_skipped == 1


@pytest.mark.parametrize("worker", [None, WorkerId("b", 0)])
def test_the_journal_keeps_a_trip(worker: WorkerId | None) -> None:
    event = GuardTripped(3, 8, "loss_spike", "skip", "step 8: ...", 1, worker, (7, 19))
    line = Line(1.0, 1, ((1.0, event),))
    assert parse_line(write_line(line)) == line
