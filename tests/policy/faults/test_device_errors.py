"""A device that fails is a loss: the run continues without it, and its node is quarantined once
nothing on it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import MODEL, SPOT, Story, job, orders, plan_of

from elastic.driver import drive
from elastic.ledger.journal import Line, MemoryJournal, parse_line, write_line
from elastic.observe.event_messages import of as sentence
from elastic.observe.run_view import View
from elastic.policy.state.state import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault, Moment
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Abort,
    Decision,
    DriverStarted,
    EnterPlan,
    Job,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Plan,
    Pool,
    Prepare,
    Quarantine,
    Quiesced,
    ReleaseNode,
    RequestNodes,
    Silent,
    Stop,
    WorkerFailed,
    WorkerId,
)

A, B, C = (WorkerId(name, 0) for name in "abc")
ECC = "CUDA error: uncorrectable ECC error encountered"
ADDRESS = "CUDA error: an illegal memory access was encountered"
ASSERT = "CUDA error: device-side assert triggered"


def device(plan: Plan, worker: WorkerId, error: str = ECC, step: int = 6) -> WorkerFailed:
    return WorkerFailed(worker, plan.generation, "device", error, 0, step)


def asserted(plan: Plan, worker: WorkerId, step: int) -> WorkerFailed:
    return WorkerFailed(worker, plan.generation, "program", ASSERT, 0, step, do="retry")


def lost(story: Story, plan: Plan, kept_by_a: list[tuple[int, int, str]]) -> Decision:
    """The device of a fails; all leave: a with what it keeps in host memory, the others with their
    live state of step 5."""
    decision = story.tick(
        WorkerFailed(B, plan.generation, "collective", "connection reset"), device(plan, A)
    )
    assert orders(decision, Abort) and not orders(decision, Stop) and ECC in decision.reason
    return story.quiesced(
        plan, {"a": kept_by_a, "b": [(1, 5, "live"), (0, 5, "peer")], "c": [(2, 5, "live")]}
    )


def test_the_run_goes_on_without_it_and_its_node_is_quarantined_when_the_next_generation_has_entered() -> (
    None
):
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    decision = lost(story, plan, [(2, 5, "peer")])
    new = plan_of(decision)
    assert new.nodes == ("b", "c") and new.resume.step == 5 and new.cause == "loss"
    assert {h.worker for h in new.resume.holdings} == {B, C}, "others are preferred to it"
    story.entered()
    found = [story.decisions[-1], *(story.tick(after_s=k) for k in (0.0, 3.0, 3.0))]
    (quarantine,) = [order for one in found for order in orders(one, Quarantine)]
    assert quarantine.node_id == "a" and ECC in quarantine.reason
    assert [order.node_id for one in found for order in orders(one, ReleaseNode)] == ["a"]
    assert any(f"node a is quarantined: worker a/0: {ECC}" in one.reason for one in found)
    assert story.state.nodes["a"].status == "quarantined" and not story.state.faulty
    assert story.state.phase == "running"


def test_what_only_it_keeps_for_others_is_still_a_source_and_the_node_stays_until_that_is_taken() -> (
    None
):
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    story.tick(device(plan, A))
    story.quiesced(
        plan, {"a": [(0, 4, "peer"), (2, 4, "peer")], "b": [(1, 5, "live"), (1, 4, "peer")]}
    )
    decision = story.quiesced(plan, {"c": [(2, 5, "live")]})
    new = plan_of(decision)
    assert (
        new.resume.step == 4
        and A in {h.worker for h in new.resume.holdings}
        and "a" not in new.nodes
    )
    waiting = story.tick(after_s=2.0)
    assert not orders(waiting, Quarantine) and not orders(waiting, ReleaseNode), (
        "it is being read from"
    )
    story.entered()
    story.tick(Quiesced(A, new.generation, -1))
    story.tick(after_s=6.0)
    assert story.state.nodes["a"].status == "quarantined"


def test_one_that_cannot_serve_its_host_copies_either_is_gone() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    story.tick(device(plan, A))
    story.quiesced(
        plan,
        {
            "a": [(0, 4, "peer"), (2, 4, "peer")],
            "b": [(1, 5, "live"), (1, 4, "peer")],
            "c": [(2, 5, "live")],
        },
    )
    new = story.state.target
    assert new is not None and A in {h.worker for h in new.resume.holdings}
    assert orders(story.tick(device(new, A, ECC, 0)), Abort)
    assert A in story.state.dead and A not in story.state.holdings and not story.state.fatal


def test_the_node_is_not_used_again_whatever_is_said_of_it() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    story.tick(Notice("a", story.now_s + 500.0))
    story.tick(device(plan, A), NodePrepared("a"), NoticeWithdrawn("a"))
    assert story.state.nodes["a"].status == "draining"
    story.tick(Notice("a", story.now_s + 5000.0))
    held = {"a": [(2, 5, "peer")], "b": [(1, 5, "live"), (0, 5, "peer")], "c": [(2, 5, "live")]}
    assert "a" not in plan_of(story.quiesced(plan, held)).nodes


def test_a_report_that_comes_behind_that_of_the_peers_explains_it() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    story.tick(WorkerFailed(B, plan.generation, "collective", "connection reset"))
    story.tick(device(plan, A))
    assert story.state.aborting is not None and story.state.aborting.failure.cause == "loss"
    held = {"a": [(2, 5, "peer")], "b": [(1, 5, "live"), (0, 5, "peer")], "c": [(2, 5, "live")]}
    decision = story.quiesced(plan, held)
    assert plan_of(decision).nodes == ("b", "c"), (
        "no waiting, as after an error of the infrastructure"
    )


def test_a_node_whose_device_fails_while_it_starts_is_quarantined() -> None:
    story = Story()
    story.running("a", "b")
    story.tick(NodeReady(Node("c", "spot")))
    decision = story.tick(WorkerFailed(C, 0, "device", ECC))
    assert [order.node_id for order in orders(decision, Quarantine)] == [
        "c"
    ] and story.state.phase == "running"
    assert not orders(decision, Abort)


@pytest.mark.parametrize("kind", ["silent", "process"])
@pytest.mark.parametrize("heeds", [True, False])
def test_what_one_says_that_was_taken_for_gone_is_true_of_its_device(
    kind: str, heeds: bool
) -> None:
    """It was cut off, or its last words came behind its end: the next process there has the same
    device."""
    story = Story()
    story.state = replace(story.state, heeds_dead=heeds)
    plan = story.running("a", "b")
    story.tick(NodeReady(Node("c", "spot")))
    silent, killed = Silent(C, 0, "starting", 120.0), WorkerFailed(C, 0, "process", "exit code -9")
    gone = silent if kind == "silent" else killed
    decision = story.tick(gone, WorkerFailed(C, 0, "device", ECC))
    left = [order.node_id for order in orders(decision, Quarantine)]
    prepared = [order.node_id for order in orders(decision, Prepare)]
    assert (left, prepared) == ((["c"], []) if heeds else ([], ["c"]))
    assert story.state.plan == plan and not orders(decision, Abort), "it had no part in it"


def test_one_that_was_taken_for_gone_is_lost_once() -> None:
    story = Story()
    story.state = replace(story.state, heeds_dead=True)
    plan = story.running("a", "b", "c", steps=5)
    story.tick(WorkerFailed(A, plan.generation, "process", "exit code -9"))
    story.tick(device(plan, A))
    aborting = story.state.aborting
    assert aborting is not None and "exit code -9" in aborting.failure.reason
    held = {"b": [(1, 5, "live"), (0, 5, "peer")], "c": [(2, 5, "live")]}
    new = plan_of(story.quiesced(plan, held))
    assert new.nodes == ("b", "c") and new.resume.step == 5
    story.tick(device(plan, A))
    assert story.state.target == new and not story.state.failure, "said once more: known"


def test_a_place_that_the_run_waits_for_is_given_back_once_others_hold_the_state() -> None:
    """Two nodes are needed and two may be had: one of them has a device that failed."""
    story = Story(pools=(replace(SPOT, max_nodes=2),), min_workers=2, max_nodes=2)
    plan = story.running("a", "b", steps=5)
    story.tick(device(plan, A))
    decision = story.quiesced(
        plan,
        {
            "a": [(0, 4, "peer"), (1, 4, "peer")],
            "b": [(1, 5, "live"), (0, 4, "peer"), (1, 4, "peer")],
        },
    )
    assert not orders(decision, EnterPlan) and not orders(decision, Quarantine)
    assert decision.wake_at_s is not None and decision.wake_at_s <= story.now_s + 10.0
    decision = story.tick(after_s=10.0)
    assert [order.node_id for order in orders(decision, Quarantine)] == ["a"]
    assert orders(story.tick(NodeLost("a", "released")), RequestNodes), "its place is free"


def test_state_that_nobody_else_has_is_waited_for_longer() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),), min_workers=2, max_nodes=2)
    plan = story.running("a", "b", steps=5)
    story.tick(device(plan, A))
    story.quiesced(
        plan, {"a": [(0, 4, "peer"), (1, 4, "peer")], "b": [(1, 5, "live"), (1, 4, "peer")]}
    )
    assert not orders(story.tick(after_s=60.0), Quarantine)
    assert orders(story.tick(after_s=600.0), Quarantine)


# ------------------------------------------------------------------------------- the program's part


def test_the_same_step_on_two_nodes_is_the_program_unless_only_hardware_can_do_that() -> None:
    for error, ends in ((ADDRESS, True), (ECC, False)):
        story = Story()
        plan = story.running("a", "b", "c", steps=5)
        story.tick(device(plan, A, error))
        story.tick(device(plan, B, error))
        assert bool(story.state.fatal) == ends, error
        if ends:
            assert (
                "worker b/0" in story.state.fatal
                and "node a failed in step 6 as well" in story.state.fatal
            )
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    story.tick(device(plan, A, ADDRESS), device(plan, B, ADDRESS, 7))
    assert not story.state.fatal, "another step"
    story = Story()
    plan = story.running("a", "b", gpus=2, steps=5)
    story.tick(device(plan, A, ADDRESS), device(plan, WorkerId("a", 1), ADDRESS))
    assert not story.state.fatal, "one node"


def test_a_device_side_assert_is_tried_once_more_and_ends_the_run_in_the_same_step() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=5)
    assert orders(story.tick(asserted(plan, A, 6)), Abort)
    assert A in story.state.dead and story.state.nodes["a"].status == "ready", (
        "another process, on the same node"
    )
    decision = story.quiesced(plan, {"b": [(1, 5, "live"), (0, 5, "peer")], "c": [(2, 5, "live")]})
    assert orders(decision, EnterPlan) and not story.state.fatal
    assert any(
        order.node_id == "a" for one in story.decisions[-4:] for order in orders(one, Prepare)
    )
    new = story.entered()
    decision = story.tick(asserted(new, C, 6))
    (stop,) = orders(decision, Stop)
    assert (
        stop.outcome == "failed"
        and "for the second time in step 6" in stop.reason
        and ASSERT in stop.reason
    )


def test_two_ranks_with_an_assert_in_one_step_end_the_run_and_other_steps_do_not() -> None:
    for second, ends in ((6, True), (7, False)):
        story = Story()
        plan = story.running("a", "b", "c", steps=5)
        story.tick(asserted(plan, A, 6))
        story.tick(asserted(plan, B, second))
        assert bool(story.state.fatal) == ends


# ------------------------------------------------------------------------ journal, words, simulator


def test_the_kind_goes_through_the_journal_and_has_a_sentence() -> None:
    event = WorkerFailed(A, 3, "device", ECC, 0, 6)
    line = Line(1, 2.0, ((1.5, event),), None)
    assert parse_line(write_line(line)).events == ((1.5, event),)
    assert sentence(event, View()) == f"the GPU of worker a/0 failed in step 6: {ECC}"
    again = WorkerFailed(A, 3, "program", ASSERT, 0, 6, do="retry")
    assert (
        sentence(again, View()) == f"worker a/0 failed (program), to be tried once more: {ASSERT}"
    )


def simulated(
    faults: list[Fault], gpus: int = 1, **changes: object
) -> tuple[State, SimBackend, list[Line]]:
    pools = (Pool("spot", "CPU", gpus, "spot", 1.0, 0, 4),)
    made = job(steps=40, peer_every=2, durable_every=0, **changes)
    backend, memory = SimBackend(pools, Job.from_plain(made), faults), MemoryJournal()
    state = drive(backend, memory, DriverStarted("story", 1, made, pools, MODEL))
    return state, backend, [parse_line(write_line(line)) for line in memory.lines]


@pytest.mark.parametrize("moment", ["inside", "waiting", "torn"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_simulated_run_goes_on_and_loses_no_more_than_since_the_newest_copy(
    moment: Moment, gpus: int
) -> None:
    state, backend, lines = simulated([Fault(30.0, "device", 1, moment=moment)], gpus)
    assert state.phase == "succeeded" and backend.violations == [] and state.step == 40
    orders_of = [action for line in lines if line.decision for action in line.decision.actions]
    (quarantine,) = [action for action in orders_of if isinstance(action, Quarantine)]
    assert ECC in quarantine.reason and state.nodes[quarantine.node_id].status in (
        "quarantined",
        "lost",
    )
    plans = [action.plan for action in orders_of if isinstance(action, EnterPlan)]
    failed = next(
        event
        for line in lines
        for _, event in line.events
        if isinstance(event, WorkerFailed) and event.kind == "device"
    )
    after = next(plan for plan in plans if plan.generation > failed.generation)
    assert (
        after.cause == "loss"
        and after.resume.source == "peer"
        and failed.step - after.resume.step <= 3
    )
    assert quarantine.node_id not in after.nodes
    assert replay(lines).identical


def test_a_process_that_dies_before_it_can_say_so_is_followed_by_one_that_does() -> None:
    state, backend, lines = simulated([Fault(30.0, "device", 1), Fault(30.1, "process", 1)])
    assert state.phase == "succeeded" and backend.violations == []
    told = [
        event
        for line in lines
        for _, event in line.events
        if isinstance(event, WorkerFailed) and event.worker.local_rank == 0
    ]
    node = next(event.worker.node_id for event in told if event.kind == "process")
    assert [event.kind for event in told if event.worker.node_id == node] == ["process", "device"]
    quarantined = [
        a.node_id
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, Quarantine)
    ]
    assert quarantined == [node]
