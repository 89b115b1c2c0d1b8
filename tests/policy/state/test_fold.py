"""fold: fencing by generation, and what each fact changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.policy.script_story import three
from support.policy.story import SPOT, Story, job, orders

from elastic.driver import restored
from elastic.ledger.journal import Line, plain
from elastic.observe.accounting.accounts import account
from elastic.policy.pools import hard_limits
from elastic.policy.state.fold import State, changes, fold, folded
from elastic.types import (
    Copy,
    CopyStored,
    Decided,
    Decision,
    DriverStarted,
    Holding,
    InstancesSeen,
    Layout,
    Node,
    NodeLost,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    PlanEntered,
    PriceSeen,
    Quiesced,
    RequestFailed,
    Silent,
    StepDone,
    Stop,
    StopAsked,
    WorkerFailed,
    WorkerId,
)


def test_messages_of_an_older_generation_change_nothing() -> None:
    story = Story()
    old = story.running("a", "b", "c", steps=3)
    story.tick(Notice("c", story.now_s + 10))
    story.entered()
    state = story.state
    stale = [
        StepDone(old.generation, 9, 1.0, 10, 0.1),
        PlanEntered(old.generation, 0),
        WorkerFailed(WorkerId("a", 0), old.generation, "collective", "reset"),
        WorkerFailed(WorkerId("a", 0), old.generation, "out_of_memory", "oom", 5),
        WorkerFailed(WorkerId("a", 0), old.generation, "process", "exit code 1"),
        Silent(WorkerId("a", 0), old.generation, "stepping", 9.0),
        CopyStored(Copy(3, "peer", old.generation, old.layout)),
    ]
    for event in stale:
        assert (
            replace(fold(state, event, state.billed_at_s), billed_at_s=state.billed_at_s) == state
        ), event


def test_holdings_of_an_older_generation_count() -> None:
    story = Story()
    old = story.running("a", "b", steps=3)
    story.tick(NodeLost("b"))
    held = (
        Holding(WorkerId("a", 0), old.generation, 0, 3, "peer"),
        Holding(WorkerId("a", 0), old.generation, 1, 3, "peer"),
    )
    story.tick(Quiesced(WorkerId("a", 0), old.generation, 3, held))
    second = story.state.target
    assert second is not None
    story.tick(
        WorkerFailed(WorkerId("a", 0), second.generation, "infrastructure", "store unreachable")
    )
    story.tick(Quiesced(WorkerId("a", 0), second.generation, 3, held))
    assert story.state.holdings[WorkerId("a", 0)] == held
    story.tick(after_s=2)
    third = story.state.target
    assert third is not None and third.generation > second.generation
    assert (third.resume.source, third.resume.step, third.resume.generation) == (
        "peer",
        3,
        old.generation,
    )


def test_steps_of_the_old_generation_count_until_a_live_one_is_entered() -> None:
    story = Story()
    plan = story.running("a", "b", steps=3)
    story.tick(Notice("b", story.now_s + 10))
    story.tick(StepDone(plan.generation, 4, 1.0, 10, 0.1))
    assert (story.state.step, story.state.phase) == (4, "entering")
    story.tick(PlanEntered(plan.generation, 0))
    assert (story.state.step, story.state.phase) == (4, "entering")


def test_what_a_lost_node_held_is_gone() -> None:
    story = Story()
    plan = story.running("a", "b", "c")
    story.tick(NodeLost("c"))
    story.quiesced(plan, {"a": [(0, 0, "peer")]})
    assert WorkerId("a", 0) in story.state.holdings
    story.tick(NodeLost("a"))
    assert WorkerId("a", 0) not in story.state.holdings
    assert [node.node_id for node in story.state.alive] == ["b"]


def test_notice_and_its_withdrawal() -> None:
    story = Story()
    story.nodes("a")
    story.tick(Notice("a", 99.0))
    assert story.state.nodes["a"].status == "draining" and story.state.nodes["a"].deadline_s == 99.0
    state = fold(replace(story.state, releasing=frozenset()), NoticeWithdrawn("a"), story.now_s)
    assert state.nodes["a"].status == "prepared" and state.nodes["a"].deadline_s is None
    state = fold(
        replace(story.state, releasing=frozenset({"a"})), NoticeWithdrawn("a"), story.now_s
    )
    assert state.nodes["a"].status == "draining", "it is being released already"


def test_a_refused_request_backs_off_30_s_then_doubles_to_10_minutes() -> None:
    state, waits = State(pools=(SPOT,)), []
    for _ in range(7):
        state = fold(state, RequestFailed("spot", "x", "none"), 100.0)
        waits.append(state.backoff["spot"].until_s - 100.0)
    assert waits == [30, 60, 120, 240, 480, 600, 600]


def test_the_running_digest_depends_on_every_sample_digest_and_survives_a_rollback() -> None:
    straight, resized = Story(), Story()
    straight.running("a", "b", steps=6)
    plan = resized.running("a", "b", steps=4)
    resized.tick(NodeLost("b"))
    resized.quiesced(plan, {"a": [(0, 2, "peer"), (1, 2, "peer")]})
    resized.entered()
    assert resized.state.step == 2
    resized.steps(4)
    assert resized.state.digest == straight.state.digest != ""
    other = Story()
    other.running("a", "b", steps=5)
    other.steps(1, digest="another sample")
    assert other.state.digest != straight.state.digest


def test_the_bill_counts_every_node_from_ready_to_lost() -> None:
    story = Story()
    story.running("a", "b")
    before, at_s = story.state.usd_at(story.now_s), story.now_s
    story.tick(NodeLost("b", "released"), after_s=1800)
    story.tick(NodeLost("a"), after_s=3600)
    assert story.state.usd_at(story.now_s) - before == pytest.approx(2 * 0.5 + 1.0)
    assert story.now_s - at_s == pytest.approx(5400)


def test_the_bill_counts_machines_from_their_launch_until_they_have_ended() -> None:
    story = Story()
    story.tick(InstancesSeen("spot", starting=2), InstancesSeen("of another run", starting=9))
    before = story.state.usd
    story.tick(NodeReady(Node("a", "spot")), after_s=3600)
    assert story.state.usd - before == pytest.approx(2.0) and story.state.usd_per_h == 2.0, (
        "one of them is a node, none counts twice"
    )
    story.tick(
        NodeLost("a", "released"), InstancesSeen("spot", starting=1, leaving=1), after_s=1800
    )
    story.tick(InstancesSeen("spot"), after_s=1800)
    assert story.state.usd - before == pytest.approx(4.0) and story.state.usd_per_h == 0.0


def test_machines_that_start_are_not_held_twice_against_the_budget() -> None:
    """They are among the nodes that are coming."""
    state = replace(
        Story(budget_usd=1.0).state, instances={"spot": InstancesSeen("spot", starting=2)}
    )
    at_s = state.billed_at_s
    assert hard_limits.affordable(state, SPOT, 2.0, now_s=at_s) == hard_limits.affordable(
        replace(state, instances={}), SPOT, 2.0, now_s=at_s
    )


def test_by_a_decision_without_orders_only_the_bill_goes_on() -> None:
    story = Story()
    story.running("a", "b", steps=3)
    before, at_s = story.state, story.now_s + 3600.0
    after = fold(before, Decided(Decision((), "waits", 5.0)), at_s)
    assert (
        after.usd == pytest.approx(before.usd + 2 * SPOT.usd_per_node_h)
        and after.billed_at_s == at_s
    )
    bill = {name: getattr(before, name) for name in ("usd", "billed_at_s", "node_s", "history")}
    assert replace(after, **bill) == before
    back = fold(after, replace(story.start, epoch=2, attached=True), story.now_s)
    assert back.usd == after.usd, (
        "its clock is an hour behind: what was paid until the last line stays paid"
    )


def test_what_the_last_line_says_is_paid_whatever_the_next_drivers_clock_says() -> None:
    """The ledger and the policy agree on it, also where that line tells of no event and orders
    nothing."""
    story = Story()
    story.running("a", "b", steps=3)
    said = [
        (story.now_s, story.start),
        *((story.now_s, NodeReady(Node(name, "spot", 1))) for name in "ab"),
    ]
    later = Line(story.now_s + 60.0, 1, (), Decision((), "waits"))
    next_one = (story.now_s - 600.0, replace(story.start, epoch=2, attached=True))
    lines = [Line(story.now_s, 1, tuple(said)), later, Line(next_one[0], 2, (next_one,))]
    state = restored(lines)
    assert (
        state is not None
        and state.usd
        == pytest.approx(sum(account(lines).usd.values()))
        == 2 * SPOT.usd_per_node_h / 60
    )


@pytest.mark.parametrize("by_its_first_step", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_a_plan_that_is_entered_while_the_stop_waits_for_storage_begins_nothing(
    stays: bool, by_its_first_step: bool
) -> None:
    story = Story()
    story.state = replace(story.state, stays_ended=stays)
    story.nodes("a", "b")
    story.tick(after_s=20)
    story.tick(StopAsked("enough"))
    assert orders(story.tick(after_s=600), Stop)
    target = story.state.target
    assert target is not None and story.state.phase == "stopped"
    step = StepDone(target.generation, 1, 1.0, 10, 0.1)
    again = story.tick(step if by_its_first_step else PlanEntered(target.generation, 0))
    assert story.state.plan == target, "what is heard is known all the same"
    assert len(orders(again, Stop)) == (0 if stays else 1), "the run is ended twice"


@pytest.mark.parametrize(
    ("after_s", "outlives", "status"),
    [(60, True, "prepared"), (60, False, "draining"), (10, True, "draining")],
)
def test_a_node_that_a_driver_finds_there_behind_its_deadline_has_no_notice(
    after_s: float, outlives: bool, status: str
) -> None:
    """It was withdrawn while nobody listened; one that may still come is another matter."""
    story = Story()
    story.state = replace(story.state, outlives_notice=outlives)
    story.running("a", "b")
    story.tick(Notice("b", story.now_s + 30))
    found = story.state.nodes["b"]
    there = NodeReady(replace(found, status="ready", deadline_s=None))
    state = fold(story.state, there, story.now_s + after_s)
    assert state.nodes["b"].status == status
    assert (state.nodes["b"].deadline_s is None) == (status == "prepared")


@pytest.mark.parametrize(("stays", "phase"), [(False, "waiting"), (True, "stopped")])
def test_a_script_that_leaves_its_group_late_has_ended_all_the_same(
    stays: bool, phase: str
) -> None:
    story = three()
    story.state = replace(story.state, stays_ended=stays)
    story.meet()
    story.hear(StopAsked("enough"))
    story.wait(3600)  # it goes on training
    plan = story.state.plan
    assert plan is not None and story.stop.outcome == story.state.phase == "stopped"
    told = [(story.now_s, Quiesced(worker, plan.generation, 0)) for worker in plan.ranks]
    assert folded(story.state, told).phase == phase


def test_a_number_that_is_none_rolls_back_once_then_ends_the_run() -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    decision = story.tick(StepDone(plan.generation, 5, math.nan, 10, 0.1, digest="bad"))
    assert "nan" in decision.reason and "bad" in decision.reason
    held = {"a": [(0, 5, "live"), (0, 3, "peer"), (1, 3, "peer")], "b": [(1, 5, "live")]}
    story.quiesced(plan, held)
    target = story.state.target
    assert target is not None and (target.cause, target.resume.step) == ("rollback", 3)
    again = story.entered()
    story.tick(StepDone(again.generation, 4, math.nan, 10, 0.1))
    assert story.state.phase == "failed" and "again" in story.state.outcome_reason


def test_a_new_driver_that_does_not_attach_keeps_the_bill_and_the_generations() -> None:
    story = Story()
    story.running("a", "b", steps=3)
    layout = Layout(dp_shard=2)
    copies = (Copy(20, "durable", 1, layout, uri="u20"), Copy(40, "durable", 2, layout, uri="u40"))
    state = fold(
        story.state,
        DriverStarted("story", 2, job(), (SPOT,), story.start.model, durable=copies),
        story.now_s + 5,
    )
    assert (state.epoch, state.phase, state.nodes, state.saved_step) == (2, "waiting", {}, 40)
    assert state.generation == 2 and state.usd == story.state.usd


@pytest.mark.parametrize("keeps", [True, False])
def test_what_steps_took_is_known_to_the_next_driver_whatever_a_node_costs_now(keeps: bool) -> None:
    story = Story()
    story.running("a", "b", steps=3)
    story.tick(PriceSeen("spot", 1.25))
    start = replace(story.start, epoch=2, keeps_measured=keeps)
    state = fold(story.state, start, story.now_s + 5)
    assert state.pools == (SPOT,) and story.state.measured
    assert state.measured == (story.state.measured if keeps else ())
    other = replace(start, pools=(replace(SPOT, gpus_per_node=2),))
    assert fold(story.state, other, story.now_s + 5).measured == ()


def attached_at(story: Story, at_s: float, paid_until_s: float | None) -> State:
    """A new driver whose clock says `at_s` attaches to the story's workers, and hears a minute
    later that they train."""
    start = replace(story.start, epoch=2, attached=True, paid_until_s=paid_until_s)
    state = fold(story.state, start, at_s)
    return fold(state, StepDone(state.generation, state.step + 1, 1.0, 10, 0.1), at_s + 60)


def test_a_new_drivers_clock_does_not_spend_the_budget() -> None:
    story = Story(pools=(replace(SPOT, usd_per_node_h=60.0),), budget_usd=500.0)
    story.running("a", "b", steps=3)
    spent, now_s, most_s = story.state.usd, story.now_s, 1200.0
    a_minute = 2 * 60.0 / 60
    soon = attached_at(story, now_s + 30, now_s + most_s)
    assert soon.usd == pytest.approx(spent + 1.5 * a_minute) and soon.stop is None
    ahead = attached_at(story, now_s + 86400, now_s + most_s)
    assert ahead.usd == pytest.approx(spent + 21 * a_minute) and ahead.stop is None
    behind = attached_at(story, now_s - 86400, now_s + most_s)
    assert behind.usd == pytest.approx(spent + a_minute), "the bill continues by its clock"
    as_recorded = attached_at(story, now_s + 86400, None)
    assert (
        as_recorded.usd == pytest.approx(spent + 1441 * a_minute) and as_recorded.stop is not None
    )
    alone = fold(story.state, replace(story.start, epoch=2, paid_until_s=now_s + 120), now_s + 3600)
    assert alone.usd == pytest.approx(spent + 2 * a_minute), "its nodes outlived it"


def test_a_journal_is_gone_through_once_from_its_stored_state_on() -> None:
    story = Story()
    story.running("a", "b", steps=3)
    first = Line(0.0, 1, ((0.0, story.start),), Decision((), "waits"))
    more = Line(5.0, 1, ((5.0, NodeReady(Node("a", "spot", 1))),))
    found = list(changes([first, more]))
    assert [type(change.event) for change in found] == [DriverStarted, Decided, NodeReady]
    assert found[0].before == State() and "a" not in found[2].before.nodes
    assert all(a.after is b.before for a, b in zip(found, found[1:]))
    stored = Line(4.0, 1, state=plain(found[1].after))
    again = list(changes([stored, more]))
    assert [change.event is None for change in again] == [True, False]
    assert again[0].after == found[1].after and again[1].after == found[2].after
    assert [c.after for c in changes([more], found[1].after)] == [found[2].after]
    assert restored([stored]) == found[1].after and restored([]) is None
