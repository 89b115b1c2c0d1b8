"""decide: what is ordered, when, and why."""

from __future__ import annotations

import pytest
from support.policy.story import SPOT, Story, durable, orders, plan_of, stopped

from elastic.policy.decide import QUIESCED_MOST_S, decide
from elastic.policy.state.fold import fold
from elastic.types import (
    Abort,
    Copy,
    Decided,
    Decision,
    DigestChecked,
    DriverStarted,
    EnterPlan,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    PlanEntered,
    PlanFailed,
    Pool,
    Prepare,
    Progress,
    Quarantine,
    Quiesce,
    Quiesced,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Silent,
    StepDone,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)
from elastic.types.replacing import replace


def prepared(decision: Decision) -> list[str]:
    return [order.node_id for order in orders(decision, Prepare)]


# --------------------------------------------------------------------------------- start and growth


@pytest.mark.parametrize("usd", [1.0, 0.0])
def test_what_nodes_cost_is_told_where_they_have_a_price(usd: float) -> None:
    story = Story((Pool("spot", "CPU", 1, "spot", usd, 0, 4),))
    story.running("a", "b")
    (entered,) = (d.reason for d in story.decisions if orders(d, EnterPlan))
    assert ("of 2 nodes, $2.00/h, " in entered, "$" in entered) == (usd > 0, usd > 0)


def test_a_run_starts_with_requests_then_prepares_then_enters() -> None:
    story = Story()
    assert orders(story.decisions[0], RequestNodes) == [RequestNodes("spot", 4, "spot-1")]
    decision = story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("b", "spot")))
    assert prepared(decision) == ["a", "b"]
    both, alone = Layout(dp_shard=2), Layout(dp_shard=1)
    assert [[(r.layout, r.n_samples, r.ranks) for r in order.rehearse] for order in orders(decision,
        Prepare)] == [
        [(both, 6, (0,)), (alone, 12, (0,))], [(both, 6, (1,)), (alone, 12, (-1,))],
    ]  # fmt: skip
    story.tick(RequestFailed("spot", "spot-1", "no capacity"))
    assert story.tick(NodePrepared("a")).actions == ()
    plan = plan_of(story.tick(NodePrepared("b")))
    assert (plan.generation, plan.cause, plan.resume.source, plan.layout) == (
        1,
        "start",
        "fresh",
        Layout(dp_shard=2),
    )
    assert plan.ranks == (WorkerId("a", 0), WorkerId("b", 0)) and plan.samples == (6, 6)
    assert plan.peer_every == 5


def test_fewer_than_min_workers_wait() -> None:
    story = Story(min_workers=3)
    story.nodes("a", "b")
    decision = story.tick(after_s=60)
    assert not orders(decision, EnterPlan) and "min_workers" in decision.reason
    assert plan_of(story.nodes("c", "d")).layout.world_size == 4


def test_a_run_that_was_saved_goes_on_from_storage() -> None:
    story = Story(durable=(Copy(40, "durable", 3, Layout(dp_shard=2), (4,), uri="u40"),))
    story.nodes("a", "b", "c", "d")
    plan = story.state.target
    assert plan is not None
    assert (plan.generation, plan.cause, plan.resume.source, plan.resume.step, plan.resume.uri) == (
        4,
        "start",
        "durable",
        40,
        "u40",
    )


def test_growth_moves_live_and_takes_all_new_nodes_at_once() -> None:
    story = Story()
    old = story.running("a", "b", steps=3)
    story.tick(NodeReady(Node("c", "spot")), NodeReady(Node("d", "spot")))
    assert not orders(story.tick(NodePrepared("c")), EnterPlan)  # d is about to be there
    plan = plan_of(story.tick(NodePrepared("d")))
    assert (plan.cause, plan.resume.source, plan.resume.generation) == (
        "growth",
        "live",
        old.generation,
    )
    assert plan.ranks[0] == old.ranks[0] and plan.ranks[2] == old.ranks[1], (
        "each keeps the quarter that lies in its half"
    )
    assert set(plan.nodes) == set("abcd")
    assert {(h.worker, h.rank, h.step) for h in plan.resume.holdings} == {
        (w, r, -1) for r, w in enumerate(old.ranks)
    }
    assert plan.resume.layout == old.layout and plan.resume.layers == old.layers


def test_no_growth_for_the_last_step_or_for_workers_that_no_layout_can_use() -> None:
    story = Story(steps=4)
    story.running("a", steps=3)
    story.nodes("b")
    assert story.state.target is None
    narrow = Story(global_batch=1)
    narrow.running("a", steps=3)
    narrow.nodes("b")
    assert narrow.state.target is None


# ------------------------------------------------------------------------------------------ notice


def test_a_notice_moves_on_at_once_and_gives_the_node_back_after() -> None:
    story = Story()
    old = story.running("a", "b", "c", steps=3)
    decision = story.tick(Notice("b", story.now_s + 10))
    plan = plan_of(decision)
    assert (plan.cause, plan.resume.source, plan.nodes) == ("notice", "live", ("a", "c"))
    assert {h.worker for h in plan.resume.holdings} == set(old.ranks)
    assert "10 s" in decision.reason and orders(decision, RequestNodes)
    assert not orders(story.tick(PlanEntered(plan.generation, 4)), ReleaseNode), (
        "its workers may still have something to say"
    )
    senders = [worker for worker in old.ranks if worker.node_id == "b"]
    for worker in senders[:-1]:
        assert not orders(story.tick(Quiesced(worker, plan.generation, 4)), ReleaseNode)
    released = story.tick(Quiesced(senders[-1], plan.generation, 4))
    assert orders(released, ReleaseNode) == [ReleaseNode("b")]
    assert not orders(story.tick(), ReleaseNode)


def test_several_notices_become_one_transition() -> None:
    story = Story()
    story.running("a", "b", "c", "d", steps=3)
    plan = plan_of(story.tick(Notice("a", story.now_s + 10), Notice("d", story.now_s + 10)))
    assert plan.nodes == ("b", "c")


def test_a_notice_during_a_transition_waits_for_it_and_then_moves_on() -> None:
    story = Story()
    story.running("a", "b", "c", steps=3)
    story.tick(Notice("a", story.now_s + 10))
    assert not orders(story.tick(Notice("b", story.now_s + 10)), EnterPlan)
    story.entered()
    assert story.state.target is not None and story.state.target.nodes == ("c",)


def test_a_notice_that_leaves_too_few_saves_now_and_again_before_the_deadline() -> None:
    story = Story(min_workers=2)
    plan = story.running("a", "b", steps=3)
    deadline_s = story.now_s + 60
    assert orders(story.tick(Notice("b", deadline_s)), StoreCopy) == [StoreCopy(plan.generation)]
    assert not story.tick(StepDone(plan.generation, 4, 1.0, 10, 0.1)).actions
    last = story.tick(after_s=deadline_s - 9.9 - story.now_s)
    assert orders(last, Quiesce) == [Quiesce(plan.generation, save=True)]
    story.tick(durable(story, 4))
    story.tick(NodeLost("b", "taken"))
    assert orders(story.decisions[-1], Abort)
    story.quiesced(plan, {"a": [(0, 4, "live")]})
    resumed = plan_of(story.nodes("c"))
    assert (resumed.resume.source, resumed.resume.step) == ("durable", 4)


def test_a_run_that_was_held_for_a_notice_goes_on_when_it_is_withdrawn() -> None:
    story = Story(min_workers=2)
    plan = story.running("a", "b", steps=3)
    story.tick(Notice("b", story.now_s + 5))
    assert orders(story.decisions[-1], Quiesce)
    for name in "ab":
        story.tick(Quiesced(WorkerId(name, 0), plan.generation, 3))
    assert orders(story.tick(NoticeWithdrawn("b")), Abort) == [Abort(plan.generation)]


# ------------------------------------------------------------------------------------------ loss


def test_a_loss_aborts_once_waits_for_every_survivor_and_recovers_from_peers() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=7)
    worker = WorkerId("a", 0)
    decision = story.tick(WorkerFailed(worker, plan.generation, "collective", "connection reset"))
    assert (
        orders(decision, Abort) == [Abort(plan.generation)]
        and "connection reset" in decision.reason
    )
    assert not orders(
        story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "reset")), Abort
    )
    story.tick(NodeLost("c", "raylet gone"))
    assert story.state.target is None
    story.quiesced(plan, {"a": [(0, 7, "live"), (0, 5, "peer"), (2, 5, "peer")]})
    assert story.state.target is None  # b has not answered yet
    recovery = plan_of(
        story.quiesced(plan, {"b": [(1, 7, "live"), (1, 5, "peer"), (0, 5, "peer")]})
    )
    assert (recovery.cause, recovery.resume.source, recovery.resume.step) == ("loss", "peer", 5)
    assert set(recovery.nodes) == {"a", "b"} and "2 steps back" in story.decisions[-1].reason
    # no step later to the same place: nothing more is lost
    again = story.entered()
    story.tick(WorkerFailed(worker, again.generation, "collective", "connection reset"))
    story.quiesced(again, {"a": [(0, 5, "live")], "b": [(1, 5, "live")]})
    assert plan_of(story.tick(after_s=20)).resume.step == 5
    assert " back" not in story.decisions[-1].reason


def test_a_survivor_that_does_not_answer_is_ended_and_replaced() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=7)
    story.tick(NodeLost("c"))
    story.quiesced(plan, {"a": [(0, 5, "peer"), (1, 5, "peer"), (2, 5, "peer")]})
    waiting = story.tick(after_s=1)
    assert waiting.wake_at_s is not None and waiting.wake_at_s <= story.now_s + QUIESCED_MOST_S
    late = story.tick(after_s=QUIESCED_MOST_S)
    assert orders(late, Abort) == [Abort(plan.generation, kill=(WorkerId("b", 0),))]
    after = story.tick()
    assert plan_of(after).nodes == ("a",) and prepared(after) == ["b"]


def test_a_silent_worker_is_ended_with_the_abort() -> None:
    story = Story()
    plan = story.running("a", "b", steps=7)
    decision = story.tick(Silent(WorkerId("b", 0), plan.generation, "stepping", 8.0))
    assert orders(decision, Abort) == [Abort(plan.generation, kill=(WorkerId("b", 0),))]
    assert story.state.aborting is not None and story.state.aborting.owing == {WorkerId("a", 0)}


def test_a_worker_that_falls_silent_before_it_enters_breaks_the_new_generation_off() -> None:
    """Its last answer was of no generation, or of the one before: the others would wait for it
    until their store gives up."""
    for newcomer, last in (("c", 0), ("a", 1)):
        story = Story()
        old = story.running("a", "b", steps=7)
        assert old.generation == 1
        story.nodes("c")
        target = story.state.target or plan_of(story.tick(after_s=30))
        assert set(target.nodes) == {"a", "b", "c"}
        worker = WorkerId(newcomer, 0)
        decision = story.tick(Silent(worker, last, "idle", 10.6))
        assert orders(decision, Abort) == [Abort(target.generation, kill=(worker,))]


def test_a_loss_while_entering_goes_back_to_what_the_old_generation_left() -> None:
    story = Story()
    old = story.running("a", "b", "c", steps=6)
    target = plan_of(story.tick(Notice("c", story.now_s + 10)))
    assert orders(story.tick(NodeLost("b")), Abort) == [Abort(target.generation)]
    held = {
        "a": [(0, 6, "live"), (0, 5, "peer"), (2, 5, "peer")],
        "c": [(2, 6, "live"), (2, 5, "peer"), (1, 5, "peer")],
    }
    plan = plan_of(story.quiesced(old, held))
    assert plan.generation == target.generation + 1 and plan.nodes == ("a",)
    assert (plan.resume.generation, plan.resume.step) == (old.generation, 5)
    # c is leaving, yet nobody else has rank 1
    assert {h.worker.node_id for h in plan.resume.holdings} == {"a", "c"}


def test_a_sender_that_goes_away_after_the_state_has_arrived_breaks_nothing() -> None:
    story = Story()
    story.running("a", "b", steps=6)
    target = plan_of(story.tick(Notice("b", story.now_s + 10)))
    decision = story.tick(NodeLost("b"), PlanEntered(target.generation, 7))
    assert not orders(decision, Abort) and story.state.phase == "running"


def test_nobody_left_waits_for_capacity_and_says_so() -> None:
    story = Story(durable_every=5)
    story.running("a", steps=7)
    story.tick(durable(story, 5))
    story.tick(NodeLost("a"))
    assert story.state.phase == "waiting"
    request = next(iter(story.state.requests))
    decision = story.tick(RequestFailed("spot", request, "no capacity"))
    assert "no capacity" in decision.reason and decision.wake_at_s is not None
    asked = story.tick(after_s=31)
    assert orders(asked, RequestNodes)
    plan = plan_of(story.nodes("b"))
    assert (plan.resume.source, plan.resume.step) == ("durable", 5)


def test_a_failed_process_is_replaced_three_times_an_hour_then_its_node_is_put_aside() -> None:
    story = Story()
    story.nodes("a", "b")
    seen = []
    for _ in range(4):
        seen.append(
            story.tick(WorkerFailed(WorkerId("b", 0), 0, "process", "exit code 1"), after_s=5)
        )
        story.tick(NodePrepared("b"))
    assert [bool(orders(d, Prepare)) for d in seen] == [True, True, True, False]
    assert orders(seen[-1], Quarantine)[0].node_id == "b" and orders(seen[-1], ReleaseNode)
    assert "b" not in {node.node_id for node in story.state.available}


def test_workers_of_a_node_that_fail_together_are_one_failure() -> None:
    story = Story()
    plan = story.running("a", "b", steps=3, gpus=4)
    story.tick(*(Silent(WorkerId("b", k), plan.generation, "stepping", 8.0) for k in range(3)))
    story.tick(Silent(WorkerId("b", 3), plan.generation, "stepping", 8.0))
    assert len(story.state.process_failures["b"]) == 1
    assert not any(orders(decision, Quarantine) for decision in story.decisions)
    assert any(prepared(decision) == ["b"] for decision in story.decisions[-2:])


# ------------------------------------------------------------------------------------------ errors


def test_a_collective_error_without_a_loss_is_tried_again_five_times_with_growing_waits() -> None:
    story = Story()
    story.running("a", "b", steps=2)
    waits = []
    for _ in range(6):
        plan = story.state.plan
        assert plan is not None
        story.tick(WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "timed out"))
        if story.state.phase == "failed":
            break
        at_s = story.now_s
        story.quiesced(plan, {"a": [(0, 2, "live")], "b": [(1, 2, "live")]})
        if story.state.phase == "failed":
            break
        story.tick(after_s=(story.decisions[-1].wake_at_s or 0) - story.now_s)
        waits.append(round(story.now_s - at_s))
        story.entered()
    assert waits == [1, 2, 4, 8, 16]
    assert stopped(story).outcome == "failed" and "5 attempts" in stopped(story).reason


def test_progress_forgets_earlier_errors() -> None:
    story = Story()
    for _ in range(8):
        plan = story.state.plan or story.running("a", "b", steps=2)
        story.tick(WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "timed out"))
        story.quiesced(
            plan, {"a": [(0, story.state.step, "live")], "b": [(1, story.state.step, "live")]}
        )
        story.tick(after_s=2)
        story.entered()
        story.steps(1)
    assert story.state.phase == "running"


def test_the_first_step_of_all_is_progress_too() -> None:
    story = Story()
    plan = story.running("a", "b")
    story.tick(WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "timed out"))
    story.quiesced(plan, {"a": [(0, 0, "live")], "b": [(1, 0, "live")]})
    story.tick(after_s=2)
    story.entered()
    assert story.state.retries == 1
    story.steps(1)
    assert story.state.retries == 0


@pytest.mark.parametrize("passed_on", [False, True])
def test_out_of_memory_marks_the_layout_and_enters_the_next(passed_on: bool) -> None:
    story = Story()
    plan = story.running("a", "b", gpus=2)
    assert plan.layout == Layout(dp_shard=4)
    if passed_on:
        story.tick(
            PlanFailed(plan.generation, "out of memory", infeasible=True, measured_bytes=3 << 30)
        )
    else:
        story.tick(
            WorkerFailed(
                WorkerId("a", 1), plan.generation, "out_of_memory", "out of memory", 3 << 30
            )
        )
    for node in "ab":
        for k in range(2):
            story.tick(Quiesced(WorkerId(node, k), plan.generation, 0))
    assert story.state.infeasible == {plan.layout: 3 << 30}
    new = story.state.target
    assert (
        new is not None and new.cause == "infeasible" and new.layout not in story.state.infeasible
    )
    assert "3.00 GiB" in " ".join(d.reason for d in story.decisions[-6:])


@pytest.mark.parametrize("heeds", [True, False])
def test_memory_gave_out_whichever_of_the_ranks_was_heard_first(heeds: bool) -> None:
    """Where it is NCCL that lacks it, the others lose their connection before that is told."""
    story = Story()
    plan = story.running("a", "b", gpus=2)
    story.state = replace(story.state, heeds_memory=heeds)
    story.tick(WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "remote error"))
    story.tick(WorkerFailed(WorkerId("a", 1), plan.generation, "out_of_memory", "calloc", 79 << 30))
    for node in "ab":
        for k in range(2):
            story.tick(Quiesced(WorkerId(node, k), plan.generation, 0))
    if not heeds:
        assert not story.state.infeasible
        return
    new = story.state.target
    assert story.state.infeasible == {plan.layout: 79 << 30}
    assert new is not None and new.cause == "infeasible" and new.layout != plan.layout


def test_no_layout_left_ends_the_run_with_the_reasons() -> None:
    story = Story(pools=(Pool("spot", max_nodes=2),), layout="dp_shard=2")
    plan = story.running("a", "b")
    story.tick(
        WorkerFailed(WorkerId("a", 0), plan.generation, "out_of_memory", "out of memory", 3 << 30)
    )
    for node in "ab":
        story.tick(Quiesced(WorkerId(node, 0), plan.generation, 0))
    assert (
        stopped(story).outcome == "failed"
        and "did not fit (3.00 GiB measured)" in stopped(story).reason
    )


def test_content_that_differs_rolls_back_to_a_copy_that_is_trusted() -> None:
    story = Story(durable_every=5)
    story.running("a", "b", steps=6)
    story.tick(durable(story, 5))
    plan = plan_of(story.nodes("c"))
    story.entered()
    story.steps(2)
    story.tick(DigestChecked(plan.generation, ok=False, n_bytes=100))
    assert orders(story.decisions[-1], Abort)
    back = plan_of(
        story.quiesced(plan, {"a": [(0, 8, "live")], "b": [(1, 8, "live")], "c": [(2, 8, "live")]})
    )
    assert (back.cause, back.resume.source, back.resume.step) == ("rollback", "durable", 5)
    assert "the content of generation 2 differs from what was sent" in story.decisions[-1].reason
    assert "step 5 from the checkpoint, 3 steps back" in story.decisions[-1].reason


def test_the_way_cost_and_memory_of_a_move_stand_in_the_decision() -> None:
    story = Story()
    story.running("a", "b", steps=6)
    decision = story.nodes("c")
    move = plan_of(decision).move
    assert move is not None and move.via == "device" and move.n_bytes + move.own_bytes >= 12_000_000
    assert f"moves {move.n_bytes / 1e6:.0f} MB between workers and" in decision.reason
    assert "the old state stays on the device" in decision.reason


def test_the_pace_of_moves_is_learned() -> None:
    """A move of 12 MB took ten times what was told: the next forecast says so."""
    story = Story()
    story.running("a", "b", steps=6)
    first = plan_of(story.nodes("c"))
    assert first.move is not None
    story.tick(
        PlanEntered(first.generation, 6, {"transfer": 0.02 + 10 * (first.move.seconds - 0.02)})
    )
    story.steps(6)
    second = plan_of(story.nodes("d"))
    assert second.move is not None and story.state.move_pace == pytest.approx(10.0)
    assert second.move.seconds - 0.02 > 4 * (first.move.seconds - 0.02)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_state_that_takes_long_to_read_is_entered(heeds: bool) -> None:
    story = Story()
    story.nodes("a", "b")
    story.tick(after_s=20)
    story.state = replace(story.state, heeds_loading=heeds)
    plan = story.state.target
    assert plan is not None
    story.tick(Progress(plan.ranks[1], plan.generation, "loading"), after_s=500)
    assert bool(orders(story.tick(after_s=110), Abort)) == (not heeds)
    if heeds:
        story.tick(Progress(plan.ranks[1], plan.generation, "loading"), after_s=480)
        assert not orders(story.tick(after_s=599), Abort)
        decision = story.tick(after_s=2)
        assert orders(decision, Abort) == [Abort(plan.generation)]
        assert "was not entered within 600 s of its workers' last progress" in decision.reason


def test_a_node_that_tokenises_for_an_hour_is_not_put_aside() -> None:
    story = Story()
    story.tick(NodeReady(Node("a", "spot", 1)))
    for _ in range(60):
        story.tick(Progress(WorkerId("a", 0), 0, "preparing"), after_s=60)
    assert story.state.nodes["a"].status == "ready"
    assert not orders(story.tick(after_s=599), Quarantine)
    decision = story.tick(after_s=2)
    assert (
        orders(decision, Quarantine)[0].reason == "its preparation has made no progress for 600 s"
    )


# ---------------------------------------------------------------------------- the driver comes back


def attached(story: Story) -> None:
    model = story.start.model
    story.tick(DriverStarted("story", 2, story.start.job, (SPOT,), model, attached=True), after_s=5)


def test_a_driver_that_attaches_waits_for_the_nodes_and_changes_nothing() -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    attached(story)
    assert story.decisions[-1].actions == () and "waits for 2 nodes" in story.decisions[-1].reason
    story.tick(StepDone(plan.generation, 5, 1.0, 10, 0.1))
    assert (
        not orders(story.decisions[-1], Abort)
        and story.state.phase == "running"
        and not story.state.unseen
    )
    assert orders(story.decisions[-1], RequestNodes)


def test_nodes_that_do_not_report_to_the_new_driver_are_lost() -> None:
    story = Story()
    plan = story.running("a", "b", steps=4)
    attached(story)
    story.tick(NodeReady(Node("a", "spot")), NodePrepared("a"))
    story.tick(after_s=31)
    assert [o.node_id for o in orders(story.decisions[-1], Quarantine)] == ["b"]
    assert orders(story.tick(), Abort) == [Abort(plan.generation)]
    recovered = plan_of(story.quiesced(plan, {"a": [(0, 4, "peer"), (1, 4, "peer")]}))
    assert recovered.nodes == ("a",)


def test_a_new_driver_repeats_the_order_that_may_not_have_been_carried_out() -> None:
    story = Story()
    story.running("a", "b", "c", steps=4)
    target = plan_of(story.tick(Notice("b", story.now_s + 10)))
    attached(story)
    story.tick(*(NodeReady(Node(name, "spot")) for name in "ab"))
    decision = story.tick(NodeReady(Node("c", "spot")))
    assert orders(decision, EnterPlan) == [EnterPlan(target)]
    assert story.state.generation == target.generation and story.state.target == target
    story.entered()
    assert story.state.phase == "running"


def test_a_new_driver_does_not_repeat_an_order_for_a_node_that_has_not_come_back() -> None:
    story = Story()
    story.running("a", "b", "c", steps=4)
    target = plan_of(story.tick(Notice("b", story.now_s + 10)))
    attached(story)
    story.tick(*(NodeReady(Node(name, "spot")) for name in "ab"))
    story.tick(after_s=31)
    assert [o.node_id for o in orders(story.decisions[-1], Quarantine)] == ["c"]
    decision = story.tick()
    assert orders(decision, Abort) == [Abort(target.generation)] and not orders(decision, EnterPlan)
    assert story.state.target is None and not story.state.repeat


def test_decide_is_a_function_of_its_arguments() -> None:
    story = Story()
    story.running("a", "b", steps=4)
    state = fold(story.state, Notice("b", story.now_s + 10), story.now_s)
    first, second = decide(state, story.now_s), decide(state, story.now_s)
    assert first == second and first.actions
    assert fold(state, Decided(first), story.now_s) == fold(state, Decided(second), story.now_s)
