"""Late drain: nodes with notice are used until a transition must begin, and one transition leaves
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story, orders, plan_of

from elastic.policy.decide import decide
from elastic.policy.pools import drain
from elastic.types import (
    Abort,
    Decision,
    EnterPlan,
    HardwareProfile,
    Move,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Quiesce,
    StepDone,
    Stop,
    StopAsked,
    StoreCopy,
    TensorSpec,
)

FAR_S = 120.0


def until(story: Story, at_s: float) -> None:
    """Steps pass, half a second each, and nothing is ordered."""
    plan = story.state.plan
    assert plan is not None
    while story.now_s < at_s - 0.51:
        done = StepDone(plan.generation, story.state.step + 1, 1.0, 10, 0.1)
        decision = story.tick(done, after_s=0.5)
        assert not decision.actions, decision.reason


def acted(story: Story, deadline_s: float) -> Decision:
    """Trains on until the transition must begin; the decision of that moment."""
    act_s = deadline_s - drain.lead_of(story.state).seconds
    until(story, act_s - 0.1)
    return story.tick(after_s=act_s + 0.001 - story.now_s)


def acted_near(story: Story, deadline_s: float) -> Decision:
    """The first decision with a plan, looked for every half second."""
    while story.now_s < deadline_s:
        decision = story.tick(after_s=0.5)
        if orders(decision, EnterPlan):
            return decision
    raise AssertionError("it never moved")


def test_the_old_generation_trains_on_until_the_transition_must_begin() -> None:
    story = Story(steps=10_000)
    story.running("a", "b", "c", steps=5)
    deadline_s = story.now_s + FAR_S
    decision = story.tick(Notice("b", deadline_s))
    lead_s = drain.lead_of(story.state).seconds
    assert lead_s == pytest.approx(2 * drain.PRIOR_PAUSE_S + 2 * 0.1 + drain.MARGIN_S, abs=0.05)
    assert not orders(decision, EnterPlan) and decision.wake_at_s == pytest.approx(
        deadline_s - drain.NEAR * lead_s
    )
    assert (
        f"{lead_s:.1f} s before" in decision.reason
        and "2 x 5.0 s for a transition (none measured yet)" in decision.reason
    )
    plan = plan_of(acted(story, deadline_s))
    assert story.state.step > 200, "the node was used"
    assert (plan.cause, plan.nodes, plan.resume.source) == ("notice", ("a", "c"), "live")


def test_the_lead_follows_what_transitions_have_taken_and_what_the_state_weighs() -> None:
    story = Story()
    story.running("a", "b", steps=3)
    for pauses_s, longest_s in (((0.4, 0.5, 9.0), drain.PAUSE_LEAST_S), ((2.0, 3.0, 9.0), 3.0)):
        lead = drain.lead_of(replace(story.state, pauses_s=pauses_s))
        assert lead.pause_s == longest_s and "median of 3" in str(lead)
    slow = replace(story.state, pauses_s=(0.5,), hardware=(HardwareProfile(link_bytes_per_s=1e5),))
    # half of weights and two moments
    assert drain.lead_of(slow).pause_s == pytest.approx(1_000_000 * 4 * 3 / 2 / 1e5)
    assert story.state.plan is not None and slow.model is not None
    frozen = TensorSpec("frozen", (1000, 1000), "float32", 0, 0, trainable=False, reread=True)
    half = replace(slow.model, specs=(frozen, *slow.model.specs))
    assert drain.lead_of(replace(slow, model=half)).pause_s == drain.lead_of(slow).pause_s, (
        "weights that are read again stay"
    )
    assert drain.lead_of(slow, 9.5).pause_s == 9.5, "the coming move itself"
    stated = replace(story.state.plan, move=Move(seconds=7.5))
    told = replace(story.state, plans={stated.generation: stated})
    assert drain.lead_of(told).pause_s == 7.5
    copying = replace(stated, copies_to=((1,), (0,)), peer_every=1, copy_bytes_per_s=2e6)
    assert drain.lead_of(replace(told, plans={stated.generation: copying})).copy_s == pytest.approx(
        3.0
    )


def test_the_coming_move_itself_is_predicted_when_its_time_is_near() -> None:
    """The link is slow: what leaves with the node takes longer than any transition before."""
    story = Story(steps=10_000)
    story.running("a", "b", "c", steps=5)
    story.state = replace(
        story.state, pauses_s=(1.0,), hardware=(HardwareProfile(link_bytes_per_s=1e6),)
    )
    deadline_s = story.now_s + FAR_S
    story.tick(Notice("b", deadline_s))
    plan = plan_of(acted_near(story, deadline_s))
    left_s = deadline_s - story.now_s
    assert plan.move is not None and plan.move.seconds > 3.0
    assert 2 * plan.move.seconds < left_s < 2 * plan.move.seconds + 8


def test_pauses_of_live_transitions_are_measured() -> None:
    story = Story()
    story.running("a", "b", steps=3)
    story.nodes("c")
    plan = story.entered()
    story.tick(StepDone(plan.generation, story.state.step + 1, 1.0, 10, 0.9), after_s=1.0)
    (pause_s,) = story.state.pauses_s
    assert 1.0 < pause_s < 1.5  # two ticks and a second, less a step
    assert "median of 1" in story.tick(Notice("a", story.now_s + FAR_S)).reason


def test_a_notice_that_is_withdrawn_before_leaves_no_trace() -> None:
    story = Story(steps=10_000)
    plan = story.running("a", "b", steps=3)
    deadline_s = story.now_s + 60
    story.tick(Notice("b", deadline_s))
    until(story, deadline_s - 20)
    assert not story.tick(NoticeWithdrawn("b")).actions
    until(story, deadline_s + 20)
    assert story.state.plan == plan and story.state.phase == "running"


def test_a_repeated_notice_moves_the_time() -> None:
    story = Story(steps=10_000)
    story.running("a", "b", steps=3)
    first_s, second_s = story.now_s + 40, story.now_s + 90
    story.tick(Notice("b", first_s))
    story.tick(Notice("b", second_s))
    until(story, first_s + 5)
    assert story.state.n_notices == 1
    sooner = story.tick(Notice("b", story.now_s + 5))
    assert plan_of(sooner).nodes == ("a",)


@pytest.mark.parametrize("stagger_s", [0.0, 1.0, 3.0])
def test_staggered_notices_become_one_transition(stagger_s: float) -> None:
    story = Story(steps=10_000)
    story.running("a", "b", "c", "d", steps=3)
    first_s = story.now_s + 60
    for k, name in enumerate("bcd"):
        story.tick(Notice(name, first_s + k * stagger_s))
    act_s = first_s - drain.lead_of(story.state).seconds
    assert not story.tick(after_s=act_s - 0.1 - story.now_s).actions
    plan = plan_of(story.tick(after_s=act_s - story.now_s))
    assert plan.nodes == ("a",)


def test_a_node_with_a_much_later_deadline_stays_and_the_reason_says_so() -> None:
    story = Story(steps=10_000)
    story.running("a", "b", "c", "d", steps=3)
    deadline_s = story.now_s + 600
    story.tick(Notice("c", deadline_s))
    decision = story.tick(Notice("b", story.now_s + 5))
    plan = plan_of(decision)
    assert plan.nodes == ("a", "c", "d") and "c stays for a while" in decision.reason
    story.entered()
    story.steps(2)
    story.tick(after_s=6)  # b is released
    assert plan_of(acted(story, deadline_s)).nodes == ("a", "d")
    assert story.now_s > 500


def test_nodes_with_later_deadlines_share_one_pause() -> None:
    story = Story()
    story.running("a", "b", "c", "d", steps=3)
    lead_s = drain.lead_of(story.state).seconds
    price_s = drain.price_gpu_s(story.state, 4)  # GPU-seconds; each node has one GPU
    alone, both = (story.now_s + lead_s + gain for gain in (price_s - 5, price_s / 2 + 5))
    story.tick(Notice("c", alone))
    assert [n.node_id for n in drain.kept(story.state, story.now_s)] == []
    story.tick(Notice("c", both), Notice("d", both))
    assert [n.node_id for n in drain.kept(story.state, story.now_s)] == ["c", "d"]


# ------------------------------------------------------------------------------------- replacements


def test_a_replacement_that_is_prepared_in_time_is_taken_in_the_same_transition() -> None:
    story = Story(steps=10_000)
    story.running("a", "b", "c", steps=3)
    deadline_s = story.now_s + 45
    story.tick(Notice("b", deadline_s))
    until(story, story.now_s + 5)
    story.tick(NodeReady(Node("d", "spot")))
    assert not orders(story.tick(NodePrepared("d")), EnterPlan)
    story.tick(NodeReady(Node("e", "spot")))
    decision = story.tick(NodePrepared("e"))
    assert (
        "d, e can join 3 workers when the nodes with notice are left: sooner would gain"
        in decision.reason
    )
    assert "GPU-seconds and cost" in decision.reason and not decision.actions
    plan = plan_of(acted(story, deadline_s))
    assert (plan.cause, set(plan.nodes)) == ("notice", set("acde"))


def test_new_nodes_do_not_wait_where_that_costs_more_than_a_pause() -> None:
    story = Story(steps=10_000)
    story.running("a", "b", steps=3)
    deadline_s = story.now_s + 600
    story.tick(Notice("b", deadline_s))
    story.tick(NodeReady(Node("c", "spot")), NodeReady(Node("d", "spot")))
    decision = story.tick(NodePrepared("c"), NodePrepared("d"))
    plan = plan_of(decision)
    assert (plan.cause, set(plan.nodes)) == (
        "growth",
        set("abcd"),
    ) and "GPU-seconds gained" in decision.reason
    story.entered()
    story.steps(2)
    assert plan_of(acted(story, deadline_s)).nodes == ("a", "c", "d")


def test_a_loss_meanwhile_goes_on_with_the_node_that_still_has_time() -> None:
    story = Story(peer_every=1)
    plan = story.running("a", "b", "c", steps=3)
    story.tick(Notice("b", story.now_s + 300))
    story.tick(NodeLost("c"))
    held = {"a": [(0, 3, "peer"), (2, 3, "peer")], "b": [(1, 3, "peer")]}
    assert plan_of(story.quiesced(plan, held)).nodes == ("a", "b")
    short = Story(peer_every=1)
    plan = short.running("a", "b", "c", steps=3)
    short.tick(Notice("b", short.now_s + 20))
    short.tick(NodeLost("c"))
    assert plan_of(short.quiesced(plan, held)).nodes == ("a",)


def test_a_node_that_dies_before_its_deadline_is_a_loss_as_ever() -> None:
    story = Story(peer_every=1)
    plan = story.running("a", "b", steps=3)
    story.tick(Notice("b", story.now_s + FAR_S))
    assert orders(story.tick(NodeLost("b")), Abort) == [Abort(plan.generation)]
    recovered = plan_of(story.quiesced(plan, {"a": [(0, 3, "peer"), (1, 3, "peer")]}))
    assert (recovered.cause, recovered.resume.step) == ("loss", 3)


# ------------------------------------------------------------------------------------------ ends


def test_a_short_job_never_moves() -> None:
    story = Story(steps=20)
    story.running("a", "b", steps=3)
    story.tick(Notice("b", story.now_s + FAR_S))
    story.steps(17)
    assert all(not orders(decision, EnterPlan) for decision in story.decisions[-18:])
    assert "waiting for the checkpoint of the last one" in story.decisions[-1].reason


def test_a_stop_meanwhile_still_saves_and_ends() -> None:
    story = Story()
    plan = story.running("a", "b", steps=3)
    story.tick(Notice("b", story.now_s + FAR_S))
    assert orders(story.tick(StopAsked("enough")), Quiesce) == [Quiesce(plan.generation, save=True)]
    story.tick(after_s=60)
    assert orders(story.decisions[-1], Stop)


def test_the_budget_meanwhile_still_ends_the_run() -> None:
    story = Story(budget_usd=0.05, steps=100_000)
    plan = story.running("a", "b", steps=3)
    decision = story.tick(Notice("b", story.now_s + 3000))
    assert decision.wake_at_s is not None and decision.wake_at_s < story.now_s + 120
    story.tick(after_s=decision.wake_at_s - story.now_s)
    assert orders(story.decisions[-1], Quiesce) == [Quiesce(plan.generation, save=True)]


def test_too_few_are_saved_at_once_unless_a_replacement_comes() -> None:
    story = Story(min_workers=2, steps=10_000)
    plan = story.running("a", "b", steps=3)
    deadline_s = story.now_s + FAR_S
    assert orders(story.tick(Notice("b", deadline_s)), StoreCopy) == [StoreCopy(plan.generation)]
    until(story, deadline_s - 40)
    story.nodes("c")
    assert not story.decisions[-1].actions, "it joins when b is left"
    assert plan_of(acted(story, deadline_s)).nodes == ("a", "c")


def test_a_saved_run_goes_on_with_other_nodes_though_the_one_with_notice_was_never_taken() -> None:
    story = Story(steps=10_000)
    plan = story.running("a", steps=3)
    assert orders(story.tick(Notice("a", story.now_s + 1)), Quiesce) == [
        Quiesce(plan.generation, save=True)
    ]
    story.quiesced(plan, {"a": [(0, 4, "live")]})
    story.tick(after_s=300)
    assert "waits for other nodes" in story.decisions[-1].reason
    story.nodes("b")
    assert any(orders(decision, Abort) for decision in story.decisions[-4:]), story.decisions[-1]
    story.quiesced(plan, {"a": [(0, 4, "live")]})
    story.tick(after_s=2)
    newest = [order.plan for decision in story.decisions for order in orders(decision, EnterPlan)][
        -1
    ]
    assert (newest.nodes, newest.resume.source) == (("b",), "peer"), [
        d.reason for d in story.decisions[-4:]
    ]


def test_waiting_changes_nothing_and_says_the_same() -> None:
    story = Story()
    story.running("a", "b", "c", steps=3)
    first = story.tick(Notice("b", story.now_s + FAR_S))
    second = decide(story.state, story.now_s + 20)
    assert (first.wake_at_s, second.actions) == (second.wake_at_s, ())
    assert second.reason.startswith("b will be preempted: trains on until")
