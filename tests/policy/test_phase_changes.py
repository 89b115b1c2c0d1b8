"""From one phase of the job to the next: one planned transition at the boundary, and what happens
when something else happens there."""

from __future__ import annotations

from typing import Any

import pytest
from support.policy.story import Story, durable, orders, plan_of

from elastic.types import (
    Abort,
    DrainNode,
    DriverStarted,
    EnterPlan,
    FormGroups,
    GroupsFormed,
    NodeLost,
    Notice,
    Probed,
    Quiesce,
    Quiesced,
    SampleProfile,
    StopAsked,
    WorkerFailed,
    WorkerId,
)
from elastic.types.replacing import replace

PHASES = [
    {"from_step": 10, "global_batch": 8},
    {"from_step": 20, "global_batch": 4, "data": {"train": {"seq": 8}}},
]
NODES = ("a", "b", "c", "d")


def story(*nodes: str, steps: int, phases: list[dict[str, Any]] = PHASES, **keys: Any) -> Story:
    made = Story(phases=phases, peer_every=2, data={"train": {"folder": "x", "seq": 4}}, **keys)
    made.running(*(nodes or NODES), steps=steps)
    return made


def test_the_next_phase_is_ordered_before_its_boundary_and_no_sooner() -> None:
    told = story(steps=8)
    assert not orders(told.decisions[-1], EnterPlan)
    told.steps(1)
    plan = plan_of(told.decisions[-1])
    assert (plan.cause, plan.phase, plan.resume.source, sum(plan.samples)) == (
        "phase",
        1,
        "live",
        8,
    )
    assert "step 10 ends phase 1 of 3, then comes phase 2 (global_batch 8)" in (
        told.decisions[-1].reason
    )
    assert told.state.job.global_batch == 8
    told.steps(1)
    assert told.entered().phase == 1
    assert told.state.step == 10
    told.steps(9)
    assert plan_of(told.decisions[-1]).phase == 2
    assert "(global_batch 4, seq 8)" in told.decisions[-1].reason


def test_workers_that_are_through_before_the_order_are_no_failure() -> None:
    told = story("a", "b", steps=8)
    plan = told.state.plan
    assert plan is not None
    told.state = replace(told.state, step=10)
    for name in ("a", "b"):
        told.tick(Quiesced(WorkerId(name, 0), plan.generation, 10))
    assert told.state.failure is None
    assert told.state.phase == "entering"
    assert told.state.target is not None and told.state.target.phase == 1


def test_a_loss_behind_the_boundary_goes_back_to_the_phase_of_the_copy() -> None:
    told = story(steps=9)
    told.steps(1)
    plan = told.entered()
    told.tick(NodeLost("d", "gone"))
    held = {"a": [(0, 8, "peer"), (3, 8, "peer")], "b": [(1, 8, "peer")], "c": [(2, 8, "peer")]}
    before = replace(plan, generation=1)
    told.quiesced(before, held)
    again = told.state.target
    assert again is not None
    assert (again.cause, again.phase, again.resume.step) == ("loss", 0, 8)
    assert sum(again.samples) == 12
    assert told.state.job.global_batch == 12


def test_a_node_with_notice_is_left_at_the_boundary() -> None:
    told = story(steps=8)
    told.tick(Notice("d", told.now_s + 25))
    assert not orders(told.decisions[-1], EnterPlan)
    told.steps(1)
    plan = plan_of(told.decisions[-1])
    assert (plan.cause, plan.phase, plan.nodes) == ("phase", 1, ("a", "b", "c"))
    assert orders(told.decisions[-1], DrainNode) == [DrainNode("d")]


def test_one_whose_deadline_is_far_is_not_left_for_that() -> None:
    told = story(steps=8)
    told.tick(Notice("d", told.now_s + 600))
    told.steps(1)
    assert plan_of(told.decisions[-1]).nodes == NODES


def test_a_node_with_notice_stays_where_the_others_are_too_few() -> None:
    later = [{"from_step": 10, "layout": "dp_shard=4"}]
    told = story(steps=8, phases=later)
    told.tick(Notice("d", told.now_s + 60))
    told.steps(1)
    assert plan_of(told.decisions[-1]).nodes == NODES


def test_a_phase_without_a_plan_is_saved_at_its_boundary_and_waits() -> None:
    told = story("a", "b", steps=8, phases=[{"from_step": 10, "layout": "dp_shard=4"}])
    told.steps(1)
    assert orders(told.decisions[-1], Quiesce) == [Quiesce(1, save=True)]
    assert "there is no plan for the next" in told.decisions[-1].reason
    plan = told.state.plan
    assert plan is not None
    told.steps(1)
    told.quiesced(plan, {"a": [(0, 10, "live")], "b": [(1, 10, "live")]})
    assert orders(told.decisions[-1], Abort)
    told.quiesced(plan, {"a": [(0, 10, "live")], "b": [(1, 10, "live")]})
    told.tick(durable(told, 10), after_s=10)
    assert told.state.phase == "waiting"
    told.nodes("c", "d")
    told.tick(after_s=30)
    again = told.state.target
    assert again is not None
    assert (again.phase, again.resume.step, str(again.layout)) == (1, 10, "dp_shard=4")


def test_who_stops_at_a_boundary_is_saved_in_the_next_phase() -> None:
    told = story("a", "b", steps=8)
    told.state = replace(told.state, step=10)
    told.tick(StopAsked("enough"))
    assert plan_of(told.decisions[-1]).phase == 1
    told.tick(after_s=0.1)
    told.entered()
    assert orders(told.decisions[-1], Quiesce) == [Quiesce(2, save=True)]


def test_groups_are_made_ahead_for_the_boundary() -> None:
    told = Story(phases=PHASES, peer_every=2)
    started = replace(told.start, epoch=2, forms_ahead=True)
    told.tick(started)
    told.running("a", "b", steps=2)
    (formed,) = [o for d in told.decisions for o in orders(d, FormGroups)]
    assert (formed.plan.phase, formed.plan.cause) == (1, "phase")
    told.tick(GroupsFormed(formed.plan.generation, 0.5))
    told.steps(7)
    assert plan_of(told.decisions[-1]).phase == 1
    assert "made ahead in 0.5 s" in told.decisions[-1].reason


def test_a_driver_that_comes_back_is_in_the_phase_of_its_run() -> None:
    told = story(steps=9)
    told.steps(1)
    told.entered()
    told.steps(3)
    job, pools, model = told.start.job, told.start.pools, told.start.model
    told.tick(DriverStarted("story", 2, job, pools, model, attached=True), after_s=5)
    assert told.state.job.phase == 1
    saved = durable(told, 22).copy
    told.tick(DriverStarted("story", 3, job, pools, model, durable=(saved,)))
    assert told.state.job.phase == 2


def test_what_did_not_fit_one_phase_may_fit_another() -> None:
    told = story(steps=9)
    told.steps(1)
    plan = told.entered()
    failed = WorkerFailed(plan.ranks[0], plan.generation, "out_of_memory", "no memory", 1 << 30)
    told.tick(failed)
    assert plan.layout in told.state.infeasible
    held = {name: [(k, 8, "peer")] for k, name in enumerate(NODES)}
    told.quiesced(replace(plan, generation=1), held)
    again = told.state.target
    assert again is not None
    assert (again.phase, again.layout) == (0, plan.layout), "of the first phase nothing is known"
    told.entered()
    told.steps(2)
    assert told.state.target is not None and told.state.target.layout != plan.layout


def test_a_probe_of_other_data_is_no_comparison() -> None:
    told = story(steps=9)
    told.steps(1)
    told.tick(Probed(1, 10, 3.0, None))
    assert 10 in told.state.probes, "the second phase reads the same data"
    told.entered()
    told.steps(9)
    told.steps(1)
    told.tick(Probed(2, 20, 2.0, None))
    assert 20 not in told.state.probes
    told.entered()
    told.tick(Probed(3, 20, 4.0, None))
    assert told.state.probes[20] == 4.0


def test_work_is_counted_by_what_samples_ask() -> None:
    samples = tuple(SampleProfile(flop, (), 0, 0) for flop in (1.0, 2.0, 8.0))
    state = replace(story(steps=1).state, phase_samples=samples)
    # 10 steps of 12 samples, 10 of 8 twice as long, 80 of 4 eight times as long
    assert state.work_between(0, 100) == pytest.approx(10 + 10 * 16 / 12 + 80 * 32 / 12)
    assert state.work_between(15, 20) == pytest.approx(5 * 16 / 12)
    assert Story().state.work_between(3, 10) == 7
