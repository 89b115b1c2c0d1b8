"""How a run ends: all steps done, stopped with its last step saved, or failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, durable, orders, plan_of, stopped

from elastic.policy.pools.hard_limits import save_s, wish
from elastic.policy.state.state import StopWish
from elastic.policy.stopping import stopped_by_a_person
from elastic.types import (
    Abort,
    Copy,
    CopyFailed,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Layout,
    Node,
    NodeLost,
    NodeReady,
    Plan,
    Progress,
    Quiesce,
    Quiesced,
    StepDone,
    Stop,
    StopAsked,
    StorageSeen,
    WorkerFailed,
    WorkerId,
)


def test_a_run_that_is_done_ends_at_once() -> None:
    story = Story(durable=(Copy(100, "durable", 3, Layout(), (4,), uri="u"),))
    assert stopped(story).outcome == "succeeded"


def test_an_error_of_the_program_ends_the_run_at_once() -> None:
    story = Story()
    plan = story.running("a", "b", steps=2)
    story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "program", "KeyError: 'targets'"))
    assert stopped(story).outcome == "failed" and "KeyError" in stopped(story).reason


def test_a_job_that_no_pool_can_serve_fails_at_once_with_the_numbers() -> None:
    story = Story(layout="dp_shard=8")
    assert (
        stopped(story).outcome == "failed"
        and "needs 8 workers, there are 4" in stopped(story).reason
    )


def test_the_run_succeeds_when_the_copy_of_the_last_step_is_stored() -> None:
    story = Story(steps=4)
    story.running("a", "b", steps=4)
    assert story.state.phase == "running" and not orders(story.decisions[-1], Stop)
    story.tick(durable(story, 3))
    assert story.state.phase == "running"
    story.tick(durable(story, 4))
    assert stopped(story).outcome == "succeeded"


def test_what_comes_after_the_last_step_may_take_its_time_while_it_gets_on() -> None:
    story = Story(steps=4)
    plan = story.running("a", "b", steps=4)
    for _ in range(10):
        assert not story.tick(
            Progress(plan.ranks[0], plan.generation, "evaluating"), after_s=60
        ).actions
    assert not story.tick(after_s=119).actions
    assert orders(story.tick(after_s=2), Abort)


def done_and_unsaved(**changes: Any) -> Story:
    """All steps are done, and nothing is heard of the checkpoint of the last one."""
    story = Story(steps=4, peer_every=1, **changes)
    known = dict.fromkeys(("waits_to_save", "saves_again", "spends_slack", "ends_undone"), True)
    story.state = replace(story.state, awaits_last=True, **known)
    story.running("a", "b", steps=4)
    return story


def test_a_last_checkpoint_that_takes_ten_minutes_is_waited_for() -> None:
    story = done_and_unsaved()
    for _ in range(60):
        assert not story.tick(after_s=10.0).actions
    story.tick(durable(story, 4))
    assert stopped(story).outcome == "succeeded"


def test_one_that_is_being_written_is_waited_for_however_long_that_takes() -> None:
    story = done_and_unsaved()
    plan = story.state.plan
    assert plan is not None
    for _ in range(60):
        assert not story.tick(
            Progress(plan.ranks[1], plan.generation, "saving"), after_s=60.0
        ).actions
    story.tick(durable(story, 4))
    assert stopped(story).outcome == "succeeded"


def test_one_that_nothing_is_heard_of_is_tried_three_times_and_costs_no_attempt() -> None:
    story = done_and_unsaved()
    for tries in (1, 2):
        plan = story.state.plan
        assert plan is not None
        assert not orders(story.tick(after_s=898.0), Abort)
        assert orders(story.tick(after_s=2.5), Abort) == [Abort(plan.generation)]
        assert (story.state.copy_failures, story.state.retries) == (tries, 0)
        story.quiesced(plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
        story.entered()
    story.tick(after_s=898.0)
    assert story.state.phase == "running"
    story.tick(after_s=2.5)
    assert stopped(story).outcome == "failed"
    assert stopped(story).reason == "the copy of step 4 was not stored within 900 s, in 3 tries"


def test_what_was_told_to_a_driver_that_is_gone_is_not_waited_for_as_long() -> None:
    story = done_and_unsaved()
    plan = story.state.plan
    assert plan is not None
    story.tick(replace(story.start, epoch=2, attached=True, awaits_last=True), after_s=30.0)
    story.tick(*(Progress(worker, plan.generation, "saving") for worker in plan.ranks))
    assert not orders(story.tick(after_s=119.0), Abort)
    assert orders(story.tick(after_s=2.0), Abort)
    story.quiesced(plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
    story.entered()
    assert not orders(story.tick(after_s=600.0), Abort), "of this one it hears all"


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(("durable_s", "end_s"), [(0.0, 480.0), (100.0, 660.0)])
def test_the_deadline_leaves_it_the_time_of_a_slow_checkpoint(
    durable_s: float, end_s: float, writes: bool
) -> None:
    """Six minutes, and then two more, or three times what one took."""
    story = done_and_unsaved(deadline_h=0.1)
    story.state = replace(story.state, durable_s=durable_s)
    plan = story.state.plan
    assert plan is not None
    while story.state.phase == "running":
        wake_at_s = story.decisions[-1].wake_at_s
        assert wake_at_s is not None and story.now_s < 700.0, "nobody else would look"
        said = (Progress(plan.ranks[0], plan.generation, "saving"),) if writes else ()
        story.tick(*said, after_s=max(0.1, min(30.0, wake_at_s - story.now_s)))
    assert story.now_s == pytest.approx(end_s, abs=0.5) and story.state.saved_step == 0
    assert stopped(story).outcome == "stopped"
    assert "the deadline of 0.1 h is over at step 4 of 4" in stopped(story).reason


def test_one_that_is_stored_just_behind_the_deadline_is_no_less_the_last_one() -> None:
    story = done_and_unsaved(deadline_h=0.1)
    story.tick(after_s=470.0 - story.now_s)
    story.tick(durable(story, 4))
    assert stopped(story).outcome == "succeeded"


@pytest.mark.parametrize("how", ["storage is away", "storage refuses it", "memory alone holds it"])
def test_the_deadline_ends_the_wait_for_what_is_not_written(how: str) -> None:
    story = done_and_unsaved(deadline_h=0.1, min_workers=2)
    plan = story.state.plan
    assert plan is not None
    match how:
        case "storage is away":
            story.tick(StorageSeen(False, "it does not answer", story.now_s))
        case "storage refuses it":
            story.tick(after_s=200.0)
        case "memory alone holds it":
            story.tick(NodeLost("b"))
            story.quiesced(plan, {"a": [(0, 4, "peer"), (1, 4, "peer")]})
            assert story.state.phase == "waiting"
    while story.state.phase != "stopped":
        assert story.now_s < 485.0
        if how == "storage refuses it":
            refuse(story)
            again(story)
        else:
            story.tick(after_s=10.0)
    assert story.now_s > 359.0 and "the deadline of 0.1 h is over" in stopped(story).reason


@pytest.mark.parametrize(("done", "outcome"), [(False, "stopped"), (True, "succeeded")])
def test_a_stop_saves_first(done: bool, outcome: str) -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    assert orders(story.tick(StopAsked("enough", done)), Quiesce) == [Quiesce(plan.generation)]
    # how far the ranks are by now is not known: steps are reported once in a while
    assert (
        "stops at its next step boundary and is saved (step 4 is the last that was reported)"
        in (story.decisions[-1].reason)
    )
    story.tick(StepDone(plan.generation, 5, 1.0, 10, 0.1))
    story.tick(
        Quiesced(WorkerId("a", 0), plan.generation, 5),
        Quiesced(WorkerId("b", 0), plan.generation, 5),
    )
    assert not orders(story.decisions[-1], Stop)
    story.tick(durable(story, 5))
    assert (
        stopped(story).outcome == outcome and "last checkpoint at step 5" in stopped(story).reason
    )


def test_a_stop_does_not_wait_for_ever() -> None:
    story = Story()
    story.running("a", "b", steps=4)
    decision = story.tick(StopAsked("enough"))
    assert decision.wake_at_s == pytest.approx(story.now_s + 60)
    story.tick(after_s=60)
    assert stopped(story).outcome == "stopped"


def asked_and_slow(flag: bool = True, **changes: Any) -> Story:
    """A run that was asked to stop: its workers have left, and write."""
    story = Story(**changes)
    known = dict.fromkeys(("saves_again", "dates_budget", "spends_slack"), True)
    story.state = replace(story.state, awaits_stop=flag, **known)
    plan = story.running("a", "b", steps=4)
    story.tick(StopAsked("enough"))
    story.quiesced(plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
    return story


@pytest.mark.parametrize("flag", [True, False])
def test_a_stop_waits_for_a_checkpoint_that_takes_minutes(flag: bool) -> None:
    story = asked_and_slow(flag)
    for _ in range(30):
        story.tick(after_s=10.0)
    assert (story.state.phase == "stopped") != flag
    if flag:
        story.tick(durable(story, 4))
        assert stopped(story).reason == "enough; step 4 reached, last checkpoint at step 4"


def test_it_waits_for_one_that_is_being_written_and_not_for_ever() -> None:
    story = asked_and_slow()
    assert story.decisions[-1].wake_at_s == pytest.approx(story.now_s + 900.0, abs=1.0)
    plan = story.state.plan
    assert plan is not None
    for _ in range(16):
        story.tick(Progress(plan.ranks[0], plan.generation, "saving"), after_s=60.0)
    for after_s in (121.0, 778.0):  # all of it is written, and hashed and committed
        story.tick(after_s=after_s)
        assert story.state.phase == "running"
    story.tick(after_s=2.0)
    assert stopped(story).outcome == "stopped" and story.state.saved_step == 0


@pytest.mark.parametrize("limit", [{"budget_usd": 0.1}, {"deadline_h": 0.05}], ids=str)
def test_budget_and_deadline_end_that_wait(limit: dict[str, Any]) -> None:
    """Both are over after 180 s."""
    story = asked_and_slow(**limit)
    for _ in range(50):
        wake_at_s = story.decisions[-1].wake_at_s
        if story.state.phase == "running":
            assert wake_at_s is not None
            story.tick(after_s=max(0.1, wake_at_s - story.now_s))
    assert 100.0 < story.now_s < 260.0
    assert next(iter(limit)).split("_")[0] in stopped(story).reason


def test_a_stop_that_has_to_wait_for_something_is_looked_at_again_by_its_bound() -> None:
    story = Story(min_workers=2, peer_every=1)
    plan = story.running("a", "b", steps=4)
    story.tick(NodeLost("b"))
    story.tick(StopAsked("enough"))
    decision = story.quiesced(plan, {"a": [(0, 4, "peer"), (1, 4, "peer")]})
    # memory is newer than storage, yet too few are left
    assert decision.wake_at_s is not None and not decision.actions
    story.tick(after_s=decision.wake_at_s - story.now_s)
    assert stopped(story).outcome == "stopped"


FULL = "rank 0: No space left on device"


def asked_and_refused(**changes: Any) -> Story:
    """A run of two nodes that was asked to stop, and whose checkpoint storage refuses."""
    story = Story(peer_every=1, **changes)
    story.state = replace(story.state, saves_again=True)
    story.running("a", "b", steps=4)
    story.tick(StopAsked("enough"))
    refuse(story)
    return story


def refuse(story: Story) -> None:
    """The workers of its generation leave, what each holds is reported, and nothing is stored."""
    plan = story.state.plan
    assert plan is not None
    story.quiesced(plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
    story.tick(CopyFailed(plan.generation, 4, FULL))


def again(story: Story) -> bool:
    """The next try: the generation that could not store it is aborted, another one enters. False =
    the run has ended instead."""
    plan = story.state.plan
    assert plan is not None
    for _ in range(20):
        decision = story.decisions[-1]
        if story.state.phase == "stopped":
            return False
        if story.state.phase == "running" and story.state.plan is not plan:
            more = story.state.step < story.state.steps
            assert orders(decision, Quiesce) or not more, "it does no more than save"
            return True
        if orders(decision, Abort):
            story.quiesced(plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
        elif orders(decision, EnterPlan):
            story.entered()
        else:
            assert decision.wake_at_s is not None
            story.tick(after_s=max(0.1, decision.wake_at_s - story.now_s))
    raise AssertionError(story.decisions[-1])


def test_a_checkpoint_of_a_stop_that_storage_refuses_is_tried_again_from_memory() -> None:
    story = asked_and_refused()
    said = "enough; step 4 reached, last checkpoint at step 0"
    assert story.decisions[-1].reason == (
        f"{said}: {FULL}: retried in 5 s, and so on for 900 s (orphan_lease_s)"
    )
    assert again(story)
    assert story.state.plan is not None and story.state.plan.resume.source == "peer"
    assert story.state.step == 4
    story.quiesced(story.state.plan, {"a": [(0, 4, "live")], "b": [(1, 4, "live")]})
    assert not orders(story.decisions[-1], Stop), "the older refusal is none of this try"
    story.tick(durable(story, 4))
    assert stopped(story).reason == "enough; step 4 reached, last checkpoint at step 4"


def test_it_is_tried_less_and_less_often_and_not_for_ever() -> None:
    story = asked_and_refused()
    asked_s = story.state.stop.at_s if story.state.stop else 0.0
    tries = [story.now_s]
    while again(story):
        refuse(story)
        tries.append(story.now_s)
    waits = [after - before for before, after in zip(tries, tries[1:])]
    assert 5.0 < waits[0] < 10.0 and max(waits) < 80.0 and 15 < len(tries) < 30
    assert story.now_s == pytest.approx(asked_s + 900.0)
    assert stopped(story).outcome == "stopped"
    assert stopped(story).reason.endswith(f"at step 0: {FULL} (tried for 900 s)")


def test_a_budget_that_is_spent_meanwhile_ends_it_and_is_said() -> None:
    story = asked_and_refused(budget_usd=0.05)  # 90 s of two nodes at a dollar an hour
    while again(story):
        refuse(story)
    assert story.now_s > 60.0 and story.state.usd == pytest.approx(0.05, abs=0.001)
    assert stopped(story).outcome == "stopped"
    assert "the budget of $0.05 is almost spent" in stopped(story).reason
    assert stopped(story).reason.endswith(f"at step 0: {FULL} (this limit waits no longer)")


def test_a_driver_that_knew_nothing_of_it_ends_at_the_first_refusal() -> None:
    story = Story(peer_every=1)
    story.running("a", "b", steps=4)
    story.tick(StopAsked("enough"))
    refuse(story)
    assert stopped(story).reason == f"enough; step 4 reached, last checkpoint at step 0: {FULL}"


@pytest.mark.parametrize("pin", [{"min_workers": 2}, {"layout": "dp_shard=2"}], ids=str)
def test_what_only_memory_holds_is_saved_in_any_layout(pin: dict[str, Any]) -> None:
    """One of two nodes is left, which are too few for the layout that the job names."""
    story = Story(peer_every=1, **pin)
    story.state = replace(story.state, saves_in_any=True)
    plan = story.running("a", "b", steps=4)
    story.tick(NodeLost("b"))
    story.quiesced(plan, {"a": [(0, 4, "peer"), (1, 4, "peer")]})
    assert story.state.phase == "waiting"
    decision = story.tick(StopAsked("enough"))
    assert str(plan_of(decision).layout) == "dp_shard=1" and plan_of(decision).resume.step == 4
    assert "to save it: in whatever layout these nodes can enter" in decision.reason
    saved = story.entered()
    assert orders(story.decisions[-1], Quiesce) == [Quiesce(saved.generation, save=True)]
    story.tick(Quiesced(WorkerId("a", 0), saved.generation, 4))
    story.tick(durable(story, 4))
    assert stopped(story).reason.endswith("last checkpoint at step 4")


@pytest.mark.parametrize("flag", [True, False])
def test_last_steps_that_are_lost_unsaved_are_not_waited_for_behind_the_deadline(
    flag: bool,
) -> None:
    story = Story(steps=4, deadline_h=1.0)
    story.state = replace(story.state, ends_undone=flag)
    story.running("a", "b", steps=4)
    story.tick(NodeLost("a"), NodeLost("b"))
    assert story.state.phase == "waiting" and not story.state.stop
    decision = story.tick(after_s=3600.0)
    assert bool(orders(decision, Stop)) == flag
    if flag:
        assert "the deadline of 1 h is over at step 4 of 4" in stopped(story).reason


def test_a_stop_while_nothing_runs_is_immediate() -> None:
    story = Story()
    story.tick(StopAsked("enough"))
    assert stopped(story).outcome == "stopped"


def test_the_budget_stops_the_run_with_the_dollars() -> None:
    story = Story(budget_usd=2.0)
    plan = story.running("a", "b", steps=4)
    story.tick(after_s=3000)
    wake_at_s = story.decisions[-1].wake_at_s
    assert wake_at_s is not None and 3595 < wake_at_s < 3605
    decision = story.tick(after_s=wake_at_s - story.now_s)
    assert (
        orders(decision, Quiesce) == [Quiesce(plan.generation, save=True)]
        and "$2.00" in decision.reason
    )
    story.tick(
        Quiesced(WorkerId("a", 0), plan.generation, 4),
        Quiesced(WorkerId("b", 0), plan.generation, 4),
        durable(story, 4),
    )
    assert stopped(story).outcome == "stopped" and "$2.00" in stopped(story).reason


def test_a_spent_budget_is_as_old_as_what_it_comes_of() -> None:
    """What waits for a checkpoint then does not wait anew at each look."""
    story = Story(budget_usd=2.0)
    story.running("a", "b", steps=4)
    now_s, old = story.now_s, story.state
    state = replace(old, dates_budget=True)
    (due_s,) = {
        round(state_wish.at_s, 6)
        for s in (3700, 3800, 9000)
        if (state_wish := wish(state, now_s + s))
    }
    before, at = wish(state, due_s - 0.1), wish(state, due_s + 1e-3)
    assert before is None and at is not None and "is almost spent" in at.reason
    look = wish(old, now_s + 3800)  # of a journal whose driver did not date it
    assert look is not None and look.at_s == now_s + 3800
    overspent = replace(state, usd=3.0)
    found = wish(overspent, now_s + 5)
    assert found is not None and found.at_s == overspent.billed_at_s, "not before it was known"


def next_driver(story: Story, **changes: Any) -> DriverStarted:
    """One that a supervisor has started."""
    found = {"epoch": 2, "attached": True, "supervised": True, "keeps_stop": True} | changes
    return replace(story.start, **found)


def attached(story: Story, **changes: Any) -> Decision:
    story.tick(next_driver(story, **changes))
    return story.tick(*(NodeReady(Node(name, "spot", 1)) for name in ("a", "b")))


def test_a_stop_that_was_asked_for_holds_for_the_driver_that_a_supervisor_starts() -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    asked = Quiesce(plan.generation, save=True)
    assert orders(story.tick(StopAsked("enough")), Quiesce) == [asked]
    assert orders(attached(story), Quiesce) == [asked], "it may have reached nobody"
    assert story.state.stop == StopWish("enough", story.now_s - 0.1)
    left = (Quiesced(WorkerId(name, 0), plan.generation, 4) for name in ("a", "b"))
    story.tick(*left, durable(story, 4))
    assert stopped(story).outcome == "stopped" and "enough" in stopped(story).reason


def test_a_step_that_no_driver_has_stored_when_all_had_left_is_stored_by_the_next_one() -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    held = {"a": [(0, 4, "live")], "b": [(1, 4, "live")]}
    story.tick(StopAsked("enough"))
    story.quiesced(plan, held)
    assert orders(attached(story), Abort) == [Abort(plan.generation)]
    story.quiesced(plan, held)
    again = plan_of(story.tick(after_s=20))
    assert (again.resume.step, again.resume.source) == (4, "peer"), "from memory"
    story.entered()
    assert orders(story.decisions[-1], Quiesce) == [Quiesce(again.generation, save=True)]


@pytest.mark.parametrize("how", ["a person", "the budget", "the driver before"])
def test_a_stop_leaves_the_upload_of_the_last_step_alone(how: str) -> None:
    """All steps are done, and the workers have left by themselves."""
    story = Story(steps=4, budget_usd=2.0)
    story.state = replace(story.state, keeps_stop=True)
    plan = story.running("a", "b", steps=4)
    if how == "the driver before":
        story.tick(StopAsked("enough"))
    story.tick(*(Quiesced(WorkerId(name, 0), plan.generation, 4) for name in ("a", "b")))
    match how:
        case "a person":
            story.tick(StopAsked("enough"))
        case "the budget":
            story.tick(after_s=3579.0)
            assert wish(story.state, story.now_s) is not None and story.state.usd < 2.0
        case "the driver before":
            attached(story)
    assert not [one for decision in story.decisions for one in orders(decision, Abort)]
    assert story.state.phase == "running" and not story.state.saved_step
    story.tick(durable(story, 4))
    assert stopped(story).outcome == "succeeded"


def test_it_holds_where_nothing_of_the_run_is_left_but_its_checkpoint() -> None:
    story = Story()
    story.running("a", "b", steps=4)
    story.tick(StopAsked("enough"))
    story.tick(next_driver(story, attached=False))
    assert stopped(story).outcome == "stopped" and "enough" in stopped(story).reason


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (StopAsked("enough"), {"supervised": False}),
        (StopAsked("enough"), {"keeps_stop": False}),
        (StopAsked("signal SIGTERM"), {}),
        (StopAsked("all is trained", done=True), {"attached": False}),
    ],
    ids=["a person's start", "an older journal", "meant for a process", "its steps are gone"],
)
def test_whom_a_stop_was_not_meant_for_trains_on(asked: StopAsked, changes: Any) -> None:
    story = Story()
    story.running("a", "b", steps=4)
    story.tick(asked)
    attached(story, **changes)
    assert story.state.stop is None and story.state.phase not in ("stopped", "succeeded")


def test_a_run_that_has_stopped_may_be_started_again() -> None:
    story = Story()
    story.tick(StopAsked("enough"))
    assert stopped(story).outcome == "stopped"
    assert stopped_by_a_person(story.state) == "enough"
    story.tick(next_driver(story, attached=False))
    assert story.state.stop is None and story.state.phase == "waiting"


def stored_by(plan: Plan, step: int, seconds: float) -> CopyStored:
    at = Copy(step, "durable", plan.generation, plan.layout, plan.layers, uri=f"u{step}")
    return CopyStored(at, seconds)


@pytest.mark.parametrize(
    ("flag", "kept_s", "then_s"), [(True, 600.0, 570.0), (False, 150.0, 360.0)]
)
def test_fewer_ranks_are_given_longer_for_their_checkpoint(
    flag: bool, kept_s: float, then_s: float
) -> None:
    """Four have stored one in 100 s; the one that is left has four times as much to write, and
    takes 380 s for it."""
    story = Story()
    story.state = replace(story.state, scales_saves=flag)
    plan = story.running("a", "b", "c", "d", steps=4)
    assert len(plan.ranks) == 4
    story.tick(stored_by(plan, 4, 100.0))
    two_steps_s = save_s(story.state) - 150.0
    assert 0.0 < two_steps_s < 1.0
    story.tick(NodeLost("b"), NodeLost("c"), NodeLost("d"))
    story.quiesced(plan, {"a": [(0, 4, "live")]})
    alone = story.entered()
    assert len(alone.ranks) == 1
    assert save_s(story.state) == pytest.approx(kept_s + two_steps_s)
    story.steps(4)
    story.tick(stored_by(alone, 8, 380.0))
    assert save_s(story.state) == pytest.approx(then_s + two_steps_s)
