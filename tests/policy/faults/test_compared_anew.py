"""Layouts that compute something else are found out where a run begins anew, after a driver that
has seen what the next one has not, and where nothing is known of the step that they begin at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, orders, plan_of

from elastic.policy.copies.recovery import unknown_axes
from elastic.types import (
    Abort,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    PlanEntered,
    Probed,
    Quiesced,
    Resume,
    StepDone,
    WorkerId,
)


def begun_anew(**job: Any) -> tuple[Story, Plan]:
    """dp_shard=2 has trained five steps and is gone; the next driver begins anew, on three nodes
    in pp=3, which is entered."""
    story = Story(layout={2: "dp_shard=2", 3: "pp=3"}, durable_every=0, **job)
    plan = story.running("a", "b")
    story.tick(Probed(plan.generation, 0, 3.0))
    story.steps(5)
    story.tick(replace(story.start, epoch=2))
    story.nodes("c", "d", "e")
    story.tick(after_s=20)
    plan = story.state.target or plan
    assert (plan.layout, plan.resume.source, plan.probe) == (Layout(pp=3), "fresh", None)
    return story, plan


def test_where_a_run_begins_anew_the_probe_sample_is_what_it_was_at_its_first_begin() -> None:
    """Told to the driver alone, before the first step; the driver before it has seen the other."""
    story, plan = begun_anew()
    decision = story.tick(Probed(plan.generation, 0, 3.3), PlanEntered(plan.generation, 0))
    assert orders(decision, Abort) and list(story.state.unusable) == ["pp"]
    assert "computes something else than dp_shard=2 at step 0" in decision.reason
    assert "the probe sample's loss is 3.3000, it was 3.0000" in decision.reason
    for name in "cde":
        decision = story.tick(Quiesced(WorkerId(name, 0), plan.generation, 0))
    new = plan_of(decision)
    assert new.layout.pp == 1 and new.resume.source == "fresh" and story.state.probes == {0: 3.0}
    story.tick(Probed(new.generation, 0, 3.0), PlanEntered(new.generation, 0))
    story.steps(1)
    assert story.state.phase == "running" and story.state.probes == {0: 3.0}


@pytest.mark.parametrize(("loss", "job"), [(3.0001, {}), (3.3, {"script": "train.py"})])
def test_first_values_that_agree_or_that_a_script_has_made_close_nothing(
    loss: float, job: dict[str, Any]
) -> None:
    story, plan = begun_anew(**job)
    story.tick(Probed(plan.generation, 0, loss), PlanEntered(plan.generation, 0))
    assert story.state.phase == "running" and not story.state.unusable


def test_a_step_is_compared_in_the_layout_that_made_it_under_the_driver_before() -> None:
    """Whose plans nobody keeps; else pp=3 would not count as new after it was tried in vain."""
    story, plan = begun_anew()
    story.tick(NodeLost("e", "gone"), NodeReady(Node("f", "spot", 1)), NodePrepared("f"))
    for name in "cd":
        story.tick(Quiesced(WorkerId(name, 0), plan.generation, 0))
    again = story.entered()
    assert again.layout == plan.layout and again.generation > plan.generation
    decision = story.tick(StepDone(again.generation, 1, 1.3, 10, 0.1, digest="d1"))
    assert orders(decision, Abort) and list(story.state.unusable) == ["pp"]
    assert not story.state.unrepeatable


@pytest.mark.parametrize(("proven", "layout"), [((), Layout(pp=3)), (("dp",), Layout(dp_shard=3))])
def test_nor_is_dp_taken_where_nothing_would_tell_and_as_many_workers_need_it_not(
    proven: tuple[str, ...], layout: Layout
) -> None:
    """pp=4 has lost a node at the step of its newest copy, and nobody knows of the next step."""
    story = Story(layout={3: "dp_shard=3", 4: "pp=4"}, peer_every=1)
    plan = story.running("a", "b", "c", "d")
    assert story.state.model is not None
    story.state = replace(story.state, model=replace(story.state.model, proven=proven))
    story.tick(Probed(plan.generation, 0, 3.0))
    story.steps(5)
    story.tick(NodeLost("d", "gone"))
    held = {name: [(r, 5, "live"), ((r + 1) % 4, 5, "peer")] for r, name in enumerate("abc")}
    story.quiesced(plan, held)
    assert story.state.target is not None and story.state.target.layout == layout
    assert ("no dp: nothing is known at step 5" in story.decisions[-1].reason) is (not proven)


@pytest.mark.parametrize(
    ("redoes", "step_s", "step"), [(True, 2.0, 0), (True, 20.0, 5), (False, 2.0, 5)]
)
def test_a_run_of_few_steps_begins_anew_where_nothing_older_would_tell(
    redoes: bool, step_s: float, step: int
) -> None:
    """dp_shard=3 is all that three workers may enter, and no copy but that of step 5 is left."""
    story = Story(layout={3: "dp_shard=3", 4: "pp=4"}, peer_every=1, durable_every=0)
    story.state = replace(story.state, redoes_unknown=redoes)
    plan = story.running("a", "b", "c", "d")
    story.tick(Probed(plan.generation, 0, 3.0))
    story.steps(5, step_time_s=step_s)
    story.tick(NodeLost("d", "gone"))
    held = {name: [(r, 5, "live"), ((r + 1) % 4, 5, "peer")] for r, name in enumerate("abc")}
    story.quiesced(plan, held)
    begun = story.state.target
    assert begun is not None and begun.resume.step == step
    assert begun.resume.source == ("peer" if step else "fresh")
    told = "not step 5: nothing is known there that would tell whether dp_shard=3 computes the same"
    assert (told in story.decisions[-1].reason) is (step == 0)
    if step == 0:
        story.tick(Probed(begun.generation, 0, 3.0), PlanEntered(begun.generation, 0))
        decision = story.tick(StepDone(begun.generation, 1, 9.0, 10, 0.1, digest="d1"))
        assert orders(decision, Abort) and list(story.state.unusable) == ["dp"]


@pytest.mark.parametrize("trusts", [True, False])
def test_what_a_transition_has_compared_is_not_avoided_afterwards(trusts: bool) -> None:
    """From dp_shard=2 to pp=3, whose probe sample has the same loss: neither dp nor pp is unknown
    after it, wherever the run begins from next."""
    story = Story(layout={2: "dp_shard=2", 3: "pp=3"})
    story.state = replace(story.state, trusts_compared=trusts)
    plan = story.running("a", "b")
    story.tick(Probed(plan.generation, 0, 3.0))
    story.steps(4)
    story.tick(NodeReady(Node("c", "spot", 1)), NodePrepared("c"))
    second = story.state.target
    assert second is not None and second.layout == Layout(pp=3)
    story.tick(Probed(plan.generation, 5, 2.5))
    at_the_old = story.state.compared
    story.tick(
        *(Quiesced(worker, plan.generation, 5) for worker in plan.ranks),
        Probed(second.generation, 5, 2.5, expected=2.5),
        PlanEntered(second.generation, 5),
    )
    assert not at_the_old and story.state.compared == ({"dp", "pp"} if trusts else set())
    from_copy = Resume("peer", 7, second.generation, second.layout)
    unknown = unknown_axes(story.state, Layout(dp_shard=3), from_copy)
    assert list(unknown) == ([] if trusts else ["dp"])
    assert list(unknown_axes(story.state, Layout(tp=3), from_copy)) == ["tp"]


def test_a_probe_that_differs_makes_no_axis_known() -> None:
    story = Story(layout={2: "dp_shard=2", 3: "pp=3"})
    plan = story.running("a", "b")
    story.state = replace(story.state, trusts_compared=True)
    story.tick(Probed(plan.generation, 0, 3.0), Probed(plan.generation, 0, 3.2, expected=3.0))
    assert not story.state.compared
