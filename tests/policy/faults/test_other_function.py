"""A layout that computes something else than the one before: back, and never again into one with
its axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import MODEL, Story, orders, plan_of

from elastic.policy.copies import recovery
from elastic.policy.faults import refused_layouts
from elastic.policy.state.fold import fold
from elastic.policy.state.newest_steps import with_loss
from elastic.types import (
    COMPUTES_IN,
    Abort,
    Copy,
    CopyStored,
    Decision,
    DigestChecked,
    Holding,
    Job,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    Probed,
    Quiesced,
    RemoveCopy,
    StepDone,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
    agree,
    coarsest,
    tolerance,
)

SHARDED = {2: "dp_shard=2", 3: "pp=3"}
WORDS = "the probe sample's loss is 2.51, it was 2.43"


def grown(story: Story) -> Plan:
    """A third node comes: the plan that takes it in."""
    story.tick(NodeReady(Node("c", "spot", 1)))
    story.tick(NodePrepared("c"))
    story.tick(after_s=5.0)
    assert story.state.target is not None, story.decisions[-1].reason
    return story.state.target


def reports(plan: Plan, step: int) -> list[WorkerFailed]:
    """All ranks say the same."""
    return [
        WorkerFailed(worker, plan.generation, "layout", WORDS, 0, step) for worker in plan.ranks
    ]


def still_held(story: Story, old: Plan, step: int, newer: Plan | None = None) -> Decision:
    """Everyone has left: with the boxes of the old generation, and those that it had taken over."""
    decision = Decision()
    there = list(dict.fromkeys((*old.ranks, *(newer.ranks if newer else ()))))
    for worker in there:
        held = (
            [Holding(worker, old.generation, old.ranks.index(worker), step, "live")]
            if worker in old.ranks
            else []
        )
        if newer and worker in newer.ranks:
            held.append(Holding(worker, newer.generation, newer.ranks.index(worker), step, "live"))
        decision = story.tick(Quiesced(worker, (newer or old).generation, step, tuple(held)))
    return decision


def rolled_back(story: Story, old: Plan) -> Plan:
    """The transition to pp=3 is rolled back; the plan after it."""
    new, step = grown(story), story.state.step
    assert new.layout == Layout(pp=3)
    decision = story.tick(Probed(new.generation, step, 2.51, 2.43), *reports(new, step))
    assert (
        orders(decision, Abort)
        and WORDS in decision.reason
        and "no layout with pp any more" in decision.reason
    )
    return plan_of(still_held(story, old, step, new))


def test_the_transition_is_rolled_back_to_the_boxes_of_the_generation_before() -> None:
    story = Story(layout=SHARDED)
    old = story.running("a", "b", steps=8)
    back = rolled_back(story, old)
    assert (back.cause, back.resume.source, back.resume.step) == ("rollback", "peer", 8)
    assert back.resume.generation == old.generation and {
        h.generation for h in back.resume.holdings
    } == {old.generation}
    assert back.layout == Layout(dp_shard=3), (
        "the map's layout is not to be had: the best other one"
    )
    (name, why) = back.unusable[0]
    assert (
        name == "pp"
        and "generation 2, pp=3," in why
        and "than dp_shard=2 at step 8" in why
        and WORDS in why
    )
    state = story.state
    assert (state.rollbacks, state.below_step, state.step) == (0, None, 8), (
        "the step is good, and no guard has tripped"
    )
    assert 8 not in state.probes, "what another function computes is not remembered"
    story.entered()
    story.steps(3)
    assert story.state.step == 11


def test_only_one_report_counts_and_one_that_comes_late_explains_the_abort() -> None:
    story = Story(layout=SHARDED)
    old = story.running("a", "b", steps=8)
    new = grown(story)
    story.tick(WorkerFailed(new.ranks[0], new.generation, "collective", "connection reset by peer"))
    assert (
        story.state.aborting is not None and story.state.aborting.failure.cause == "infrastructure"
    )
    story.tick(*reports(new, 8))
    story.tick(*reports(new, 8))
    assert story.state.aborting.failure.cause == "rollback" and list(story.state.unusable) == ["pp"]
    assert plan_of(still_held(story, old, 8, new)).layout == Layout(dp_shard=3)


def test_a_probe_of_an_older_generation_is_no_news_while_the_newest_is_broken_off() -> None:
    story = Story(layout=SHARDED)
    story.running("a", "b", steps=3)
    grown(story)
    newest = story.entered()
    story.steps(2)
    story.tick(NodeLost("c"))
    assert story.state.aborting is not None
    story.tick(Probed(newest.generation - 1, 4, 7.0), Probed(newest.generation, 5, 2.0))
    assert 4 not in story.state.probes and story.state.probes[5] == 2.0, (
        "the last word of the newest counts"
    )


def test_a_node_with_notice_that_only_sends_still_gives_its_boxes() -> None:
    """dp_shard=2 on a and b; b will be preempted, c has come: what b holds is nowhere else."""
    story = Story(layout={2: "pp=2", 1: "dp_shard=1"}, peer_every=0)
    plan = story.running("a", "b", steps=8)
    sent = replace(plan, generation=2, layout=Layout(tp=2), ranks=(WorkerId("a", 0),))
    story.state = replace(
        story.state,
        target=replace(sent, resume=live_of(plan)),
        plans={1: plan, 2: sent},
        generation=2,
    )
    story.tick(WorkerFailed(WorkerId("a", 0), 2, "layout", WORDS, 0, 8))
    back = plan_of(still_held(story, plan, 8))
    assert {h.worker.node_id for h in back.resume.holdings} == {"a", "b"}


def live_of(plan: Plan) -> Any:
    holdings = tuple(
        Holding(worker, plan.generation, rank, -1, "live") for rank, worker in enumerate(plan.ranks)
    )
    return replace(
        plan.resume,
        source="live",
        generation=plan.generation,
        layout=plan.layout,
        holdings=holdings,
    )


def test_the_family_is_the_axes_that_are_new() -> None:
    old = Layout(dp_shard=4)
    assert refused_layouts.closed_by(Layout(dp_shard=2, pp=2), old) == ("pp",)
    assert refused_layouts.closed_by(Layout(tp=2, pp=2), old) == ("pp", "tp")
    assert refused_layouts.closed_by(Layout(dp_replicate=2), Layout(tp=2)) == ("dp",)
    assert refused_layouts.closed_by(Layout(dp_replicate=2, dp_shard=2), old) == (
        "layout dp_replicate=2,dp_shard=2",
    )
    assert refused_layouts.closed_by(Layout(dp_shard=2, cp=2), None) == ("cp", "dp"), (
        "nobody knows what was before"
    )
    assert refused_layouts.closed_by(old, old) == ()


def test_a_pinned_layout_ends_the_run_with_the_reason() -> None:
    story = Story(
        durable=(Copy(6, "durable", 3, Layout(dp_shard=2), (4,), "s3://6"),), layout="pp=2"
    )
    plan = story.running("a", "b")
    assert plan.resume.source == "durable"
    story.tick(*reports(plan, 6))
    story.tick(*(Quiesced(worker, plan.generation, 6) for worker in plan.ranks))
    assert story.state.phase == "failed"
    assert (
        "InfeasiblePlan: no layout fits" in story.state.outcome_reason
        and WORDS in story.state.outcome_reason
    )


def test_a_very_layout_is_left_and_the_planner_takes_another() -> None:
    story = Story(layout={2: "dp_shard=2", 3: "dp_shard=3"})
    old = story.running("a", "b", steps=8)
    new = grown(story)
    story.tick(*reports(new, 8))
    back = plan_of(still_held(story, old, 8, new))
    assert list(story.state.unusable) == ["layout dp_shard=3"] and back.layout != new.layout
    assert story.state.rollbacks == 0


def test_the_same_layout_is_not_to_blame_and_three_times_is_the_end() -> None:
    story = Story(layout="dp_shard=2")
    plan = story.running("a", "b", steps=8)
    for n in range(1, 4):
        story.tick(WorkerFailed(plan.ranks[0], plan.generation, "collective", "reset"))
        story.tick(
            *(Quiesced(w, 9, 8, (Holding(w, 1, r, 8, "live"),)) for r, w in enumerate(plan.ranks)),
            after_s=60.0,
        )
        story.tick(after_s=60.0)
        again = story.state.target
        assert again is not None and again.resume.layout == again.layout
        story.tick(*reports(again, 8))
        assert not story.state.unusable and story.state.rollbacks == n
        plan = again
        story.tick(
            *(Quiesced(w, 9, 8, (Holding(w, 1, r, 8, "live"),)) for r, w in enumerate(plan.ranks))
        )
        if n < 3:
            plan = story.entered()
    assert story.state.phase == "failed" and "3 roll-backs" in story.state.outcome_reason


def test_what_is_closed_outlives_the_driver_and_losses_only_the_same_program() -> None:
    story = Story(layout=SHARDED)
    old = story.running("a", "b", steps=8)
    rolled_back(story, old)
    story.entered()
    story.steps(2)
    story.tick(Probed(3, 10, 2.3))
    start = story.start
    again = fold(story.state, replace(start, epoch=2), story.now_s + 100)
    assert list(again.unusable) == ["pp"] and again.probes[10] == 2.3 and 9 in again.losses
    changed = fold(
        story.state,
        replace(start, epoch=2, job={**start.job, "fingerprint": {"program": "x"}}),
        story.now_s + 100,
    )
    assert list(changed.unusable) == ["pp"] and not changed.probes and not changed.losses
    attached = fold(story.state, replace(start, epoch=2, attached=True), story.now_s + 100)
    assert attached.probes == story.state.probes and attached.unusable == story.state.unusable


# --------------------------------------------------------------------------------- the probe sample


def test_what_the_probe_gave_goes_with_the_plan_that_resumes_there() -> None:
    copy = Copy(6, "durable", 3, Layout(dp_shard=2), (4,), "s3://6")
    story = Story(durable=(copy,))
    plan = story.running("a", "b")
    assert plan.probe is None, "nothing is known yet"
    story.tick(Probed(plan.generation, 6, 2.43))
    story.steps(3)
    story.tick(
        NodeLost("b", "gone"),
        WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "reset"),
    )
    back = plan_of(story.tick(Quiesced(WorkerId("a", 0), plan.generation, 9)))
    assert (back.resume.source, back.resume.step, back.probe) == ("durable", 6, 2.43)
    live = Story()
    live.running("a", "b", steps=3)
    assert grown(live).probe is None, "those who stay know it themselves"


def test_probes_of_steps_that_are_done_again_are_forgotten_and_few_are_kept() -> None:
    story = Story(durable=(Copy(6, "durable", 3, Layout(dp_shard=2), (4,), "s3://6"),))
    plan = story.running("a", "b")
    story.steps(3)
    story.tick(Probed(plan.generation, 9, 2.2), Probed(plan.generation - 1, 8, 7.0))
    assert story.state.probes == {9: 2.2}, "that of another generation is not heard"
    story.tick(NodeLost("b", "gone"))
    story.tick(Quiesced(WorkerId("a", 0), plan.generation, 9))
    story.entered()
    assert story.state.probes == {} and story.state.step == 6
    for step in range(7, 7 + 2 * refused_layouts.KEPT_PROBES):
        story.state = fold(story.state, Probed(story.state.generation, step, 1.0), story.now_s)
    assert (
        len(story.state.probes) == refused_layouts.KEPT_PROBES
        and min(story.state.probes) == 7 + refused_layouts.KEPT_PROBES
    )


# ------------------------------------------------------------------------ steps that are done again


def lost(story: Story, plan: Plan) -> Plan:
    """Node b goes with the steps since the checkpoint; what is ordered then."""
    story.tick(
        NodeLost("b", "gone"),
        WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "reset"),
    )
    story.tick(Quiesced(WorkerId("a", 0), plan.generation, story.state.step))
    assert story.state.target is not None, story.decisions[-1].reason
    return story.state.target


def redone(**changes: Any) -> tuple[Story, Plan]:
    """Steps 7 to 10 were done on dp_shard=2; a and two new nodes resume from the copy of step 6 in
    pp=3."""
    copy = Copy(6, "durable", 3, Layout(dp_shard=2), (4,), "s3://6")
    model = changes.pop("model", MODEL)
    story = Story(
        durable=(copy,), layout=changes.pop("layout", {2: "dp_shard=2", 3: "pp=3"}), **changes
    )
    story.state = replace(story.state, model=model)
    plan = story.running("a", "b")
    for step in range(7, 11):
        story.tick(StepDone(1 + 3, step, 3.0 - step / 100, 10, 0.1, digest=f"d{step}"))
    story.tick(NodeReady(Node("c", "spot", 1)), NodeReady(Node("d", "spot", 1)))
    story.tick(NodePrepared("c"), NodePrepared("d"), NodeLost("b", "gone"))
    story.tick(Quiesced(WorkerId("a", 0), plan.generation, 10))
    assert story.state.target is not None and story.state.target.resume.step == 6
    return story, story.entered()


def again(plan: Plan, step: int, loss: float, **changes: Any) -> StepDone:
    return StepDone(plan.generation, step, loss, 10, 0.1, **({"digest": f"d{step}"} | changes))


def test_a_redone_step_with_another_loss_goes_back_to_the_copy() -> None:
    story, plan = redone()
    assert plan.layout == Layout(pp=3)
    decision = story.tick(again(plan, 7, 2.99))
    assert orders(decision, Abort)
    assert (
        "computes something else than dp_shard=2 at step 7: its train_loss is 2.99 now"
        in decision.reason
    )
    assert "it was 2.93" in decision.reason and list(story.state.unusable) == ["pp"]
    held = [
        Quiesced(w, 9, 7, (Holding(w, plan.generation, r, 7, "live"),))
        for r, w in enumerate(plan.ranks)
    ]
    back = plan_of(story.tick(*held))
    assert (back.resume.source, back.resume.step, back.layout) == ("durable", 6, Layout(dp_shard=3))
    right = story.entered()
    story.tick(*(again(right, step, 3.0 - step / 100) for step in range(7, 11)))
    assert story.state.step == 10 and story.state.phase == "running"


def test_what_is_wrong_only_in_the_gradients_shows_in_the_second_step() -> None:
    story, plan = redone()
    story.tick(again(plan, 7, 2.93))
    assert story.state.phase == "running"
    assert orders(story.tick(again(plan, 8, 2.95)), Abort)


def test_copies_of_a_generation_that_went_astray_are_removed_but_for_what_it_took_over() -> None:
    story, plan = redone()
    story.tick(again(plan, 7, 2.93))
    story.tick(
        CopyStored(Copy(7, "durable", plan.generation, plan.layout, plan.layers, "s3://7"), 1.0)
    )
    first = story.tick(again(plan, 8, 2.95))
    removed = [
        order.uri
        for d in (first, *(story.tick() for _ in range(3)))
        for order in orders(d, RemoveCopy)
    ]
    assert removed == ["s3://7"]
    state = replace(story.state, durable=())
    workers = [Quiesced(w, 9, 8, (Holding(w, plan.generation, r, 6, "peer"), Holding(w,
        plan.generation, r, 8, "live")))
               for r, w in enumerate(plan.ranks)]  # fmt: skip
    for event in workers:
        state = fold(state, event, story.now_s)
    found = recovery.newest(state)
    assert (found.source, found.step, found.generation) == ("peer", 6, plan.generation), (
        "the last resort"
    )


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({"model": replace(MODEL, draws=True)}, {}),
        ({"script": "train.py"}, {}),
        ({}, {"digest": "other samples"}),
        ({}, {"skipped": True}),
        ({"precision": "bfloat16"}, {"train_loss": 2.935}),
        ({"float8": True, "precision": "bfloat16"}, {"train_loss": 2.99}),
        ({}, {"train_loss": 2.9301}),
    ],
)
def test_what_is_not_held_against_a_layout(changes: dict[str, Any], event: dict[str, Any]) -> None:
    story, plan = redone(**changes)
    loss = event.pop("train_loss", 3.5)
    story.tick(again(plan, 7, loss, **event))
    assert story.state.phase == "running" and not story.state.unusable, story.state.unusable


def test_steps_that_do_not_repeat_close_nothing() -> None:
    """The layout that is gone back to has no new axis, and its loss is another one again: the data
    are drawn anew each time."""
    story, plan = redone()
    story.tick(again(plan, 7, 2.99))
    assert list(story.state.unusable) == ["pp"]
    story.tick(*(Quiesced(w, 9, 7) for w in plan.ranks))
    right = story.entered()
    assert right.layout == Layout(dp_shard=3)
    story.tick(again(right, 7, 2.7))
    assert (
        story.state.phase == "running"
        and not story.state.unusable
        and "no new axis" in story.state.unrepeatable
    )
    story.tick(again(right, 8, 2.0))
    assert story.state.phase == "running"


def test_what_came_of_wrong_content_is_nothing_to_compare_with_and_what_was_before_it_is() -> None:
    """Steps 7 to 10 were done before the content was found wrong; pp=3 resumes from the copy of
    step 6."""
    story, plan = redone()
    story.tick(Probed(plan.generation, 6, 2.43), again(plan, 7, 2.93), again(plan, 11, 2.5))
    assert list(story.state.losses) == [7, 8, 9, 10, 11] and story.state.probes
    story.state = replace(story.state, probes={5: 2.5, **story.state.probes})
    assert orders(story.tick(DigestChecked(plan.generation, False, 1000)), Abort)
    assert list(story.state.losses) == [7, 8, 9, 10] and story.state.probes == {5: 2.5}
    story.tick(DigestChecked(plan.generation - 1, False, 1000))
    assert not story.state.losses, "so does what it came of"


def test_steps_before_wrong_numbers_are_still_known() -> None:
    """They were right until step 8: a layout that does step 7 anew in another way is found out all
    the same."""
    story, plan = redone()
    workers = (plan.ranks[0],)
    story.state = replace(story.state, probes={8: 2.4, 9: 2.3})
    story.tick(WrongNumbers(plan.generation - 1, 10, 8, workers, "replicas differ"))
    assert list(story.state.losses) == [7, 8] and story.state.probes == {8: 2.4}
    assert story.state.phase == "running", "the copy of step 6 was right"
    assert orders(story.tick(again(plan, 7, 2.99)), Abort) and list(story.state.unusable) == ["pp"]


@pytest.mark.parametrize(("proven", "step"), [((), 5), (("dp", "pp"), 9)])
def test_an_older_copy_is_taken_where_nothing_could_be_compared_at_the_newest(
    proven: tuple[str, ...], step: int
) -> None:
    """Everyone has step 9, the copy is of step 5: pp=3 is new, so that it begins where a loss is
    known; unless pp was compared before the start."""
    story = Story(layout={2: "dp_shard=2", 3: "pp=3"}, peer_every=5)
    plan = story.running("a", "b")
    assert story.state.model is not None
    story.state = replace(story.state, model=replace(story.state.model, proven=proven))
    story.tick(Probed(plan.generation, 0, 3.0))
    story.steps(9)
    story.tick(NodeReady(Node("c", "spot", 1)))
    story.tick(
        NodePrepared("c"), WorkerFailed(WorkerId("a", 0), plan.generation, "collective", "reset")
    )
    for rank, worker in enumerate(plan.ranks):
        held = (
            Holding(worker, 1, rank, 9, "live"),
            *(Holding(worker, 1, k, 5, "peer") for k in (0, 1)),
        )
        story.tick(Quiesced(worker, 1, 9, held))
    story.tick(after_s=5.0)
    new = story.state.target
    assert new is not None and (new.layout, new.resume.step) == (Layout(pp=3), step)
    said = "not step 9: nothing is known there that would tell whether pp=3 computes the same"
    assert (said in story.decisions[-1].reason) is (step == 5)


# ------------------------------------------------------------------------------- numbers that agree


def test_tolerances_follow_the_precision() -> None:
    found = [
        tolerance(Job.from_plain({"precision": p}))
        for p in ("float32", "bfloat16", "float16", None)
    ]
    assert found == [1e-4, 1e-2, 1e-2, 1e-4]
    assert tolerance(Job(precision="bfloat16", float8=True)) == 5e-2


def test_tolerances_follow_what_the_model_was_seen_to_compute_in() -> None:
    found = [
        tolerance(Job.from_plain({"precision": "float32", COMPUTES_IN: seen}))
        for seen in ("", "bfloat16", "float16", "float8")
    ]
    assert found == [1e-4, 1e-2, 1e-2, 5e-2]
    assert tolerance(Job.from_plain({"precision": "bfloat16", COMPUTES_IN: ""})) == 1e-2
    assert [coarsest(types) for types in ((), ("float32", "float64"), ("float32", "float16"),
        ("bfloat16", "float8"))] == [
        "", "", "float16", "float8",
    ]  # fmt: skip


def test_numbers_agree_relative_to_the_larger_one() -> None:
    assert agree(2.0, 2.0001, 1e-4) and not agree(2.0, 2.001, 1e-4)
    assert agree(0.0, 1e-8, 1e-4) and not agree(0.0, 1e-6, 1e-4)
    nan, inf = float("nan"), float("inf")
    assert (
        agree(nan, inf, 1e-4)
        and agree(nan, nan, 1e-4)
        and not agree(nan, 1.0, 1e-4)
        and not agree(1.0, inf, 1e-4)
    )


def test_an_update_that_is_left_out_makes_other_steps_of_those_after_it() -> None:
    done = StepDone(1, 7, 2.0, 10, 0.1, digest="d7")
    known = with_loss(with_loss({}, done), replace(done, step=8, digest="d8"))
    assert sorted(known) == [7, 8]
    left_out = with_loss(known, replace(done, skipped=True))
    assert sorted(left_out) == [7] and sorted(with_loss(left_out, replace(done, skipped=True))) == [
        7
    ]
    assert with_loss(left_out, done)[7][0] == 2.0


def test_losses_are_bounded() -> None:
    known: Any = {}
    for step in range(1, 1200):
        known = with_loss(known, StepDone(1, step, 1.0, 10, 0.1))
    assert len(known) <= 500 and 1199 in known


def test_a_run_that_knows_of_no_probe_has_the_plans_that_it_had() -> None:
    story = Story(layout=SHARDED)
    plan = story.running("a", "b", steps=3)
    assert (plan.probe, plan.unusable) == (None, ())
