"""What is made of reports of the ranks' speeds: estimates, rates for the planner, and orders that
wait to be confirmed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, orders

from elastic.policy import plans
from elastic.policy.faults.failures import infeasible
from elastic.policy.speed import share_rebalance, speeds
from elastic.policy.state.state import Moved, Window
from elastic.types import (
    Layout,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    RanksTimed,
    SetShares,
    SharesSet,
    TensorSpec,
    WorkerFailed,
    WorkerId,
)
from elastic.types import Node as NodeOf

A, B, C = (WorkerId(name, 0) for name in "abc")


def timed(
    plan: Plan, step: int, unit_s: dict[str, float], n_steps: int = 3, spread: float = 0.01
) -> RanksTimed:
    values = tuple(unit_s[worker.node_id] for worker in plan.ranks)
    return RanksTimed(
        plan.generation, step, n_steps, values, (spread,) * len(values), (0.0,) * len(values)
    )


def window(at_s: float, unit_s: float, n_steps: int = 10) -> Window:
    return Window(at_s - 10, at_s, unit_s, n_steps, 0.05, 0.0, 1, int(at_s))


def test_an_estimate_is_made_from_the_windows_that_agree() -> None:
    found = speeds.estimate((window(10, 2.0), window(20, 1.0), window(30, 1.1)))
    assert found.unit_s == pytest.approx(1.05) and (found.n_steps, found.since_s) == (20, 10)
    assert found.error == pytest.approx(2 * 1.86 * 0.05 / 20**0.5)
    assert speeds.estimate((window(10, 2.0),)).n_steps == 10


def test_more_steps_make_an_estimate_surer_and_it_goes_back_no_further_than_64() -> None:
    many = speeds.estimate([window(10.0 * k, 1.0) for k in range(1, 30)])
    assert many.n_steps == 64 and many.error < speeds.estimate((window(10, 1.0),)).error
    assert many.since_s == 0.0, "but it says since when it is so"


def test_the_first_steps_of_a_generation_are_not_believed() -> None:
    story = Story()
    plan = story.running("a", "b", steps=5)
    story.tick(timed(plan, 4, {"a": 1.0, "b": 3.0}))
    assert not story.state.speeds
    story.tick(timed(plan, 5, {"a": 1.0, "b": 1.0}))
    assert set(story.state.speeds) == {A, B}
    story.tick(
        RanksTimed(plan.generation + 1, 30, 3, (1.0, 1.0)),
        RanksTimed(plan.generation, 30, 3, (1.0,)),
    )
    assert len(story.state.speeds[A]) == 1, "of another generation, or of other ranks"


def test_rates_outlive_the_generation_and_end_with_the_node() -> None:
    story = Story()
    plan = story.running("a", "b", "c", steps=6)
    story.tick(timed(plan, 6, {"a": 1.0, "b": 2.0, "c": 1.05}))
    story.tick(WorkerFailed(C, plan.generation, "process", "gone"))
    nodes = [story.state.nodes[name] for name in "abc"]
    assert speeds.rates(story.state, nodes) == pytest.approx({A: 1 / 1.05, B: 0.5, C: 1 / 1.05}), (
        "within the band: the median"
    )
    story.tick(NodeLost("b"))
    assert set(story.state.speeds) == {A, C}
    story.tick(NodeReady(NodeOf("b", "spot")), NodePrepared("b"))
    again = speeds.rates(story.state, nodes)
    assert again is not None and again[B] == pytest.approx((1 + 1 / 1.05) / 2), (
        "never measured: the median of its pool"
    )


def test_without_measurements_the_planner_is_told_nothing() -> None:
    story = Story()
    plan = story.running("a", "b", steps=6)
    assert speeds.rates(story.state, list(story.state.nodes.values())) is None
    story.tick(timed(plan, 6, {"a": 1.0, "b": 2.0}))
    assert speeds.rates(story.state, list(story.state.nodes.values())) is not None


def test_an_order_that_waits_for_its_answer_is_not_given_again() -> None:
    story = Story()
    plan = story.running("a", "b", steps=30)
    slow = {"a": 1.0, "b": 2.0}
    story.tick(timed(plan, 30, slow, 8))
    first = story.tick(after_s=1)
    (order,) = orders(first, SetShares)
    assert (order.samples, order.from_step) == ((8, 4), 30)
    story.steps(3)
    assert not orders(story.tick(timed(plan, 33, slow, 8), after_s=5), SetShares)
    story.steps(3)
    late = story.tick(timed(plan, 36, slow, 8), after_s=40)
    assert orders(late, SetShares), "it was lost"
    story.tick(SharesSet(plan.generation, (8, 4), 38))
    assert (
        story.state.plan is not None
        and story.state.plan.samples == (8, 4) == story.state.plans[plan.generation].samples
    )
    assert story.state.shares_ordered is None
    story.tick(timed(plan, 39, slow, 8))
    assert not orders(story.tick(after_s=1), SetShares)


def test_a_change_that_is_a_moment_old_is_looked_at_again() -> None:
    story = Story()
    plan = story.running("a", "b", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 1.0}, 8))
    story.steps(3, step_time_s=0.02)
    soon = story.tick(timed(plan, 33, {"a": 1.0, "b": 2.0}))
    assert not soon.actions and soon.wake_at_s is not None
    later = story.tick(after_s=soon.wake_at_s - story.now_s + 0.01)
    assert orders(later, SetShares)


@pytest.mark.parametrize(("lately", "moves"), [(1.06, True), (0.98, False)])
def test_a_small_difference_must_last_to_the_end_to_be_acted_upon(
    lately: float, moves: bool
) -> None:
    """For a quarter of an hour b was a little slower than a; in the last third of it, it was so
    still, or no more."""
    story = Story(global_batch=120, steps=1_000_000)
    plan = story.running("a", "b", steps=30)
    now_s = story.now_s + share_rebalance.LASTING_S
    unit_s, then = 1e-3, now_s - share_rebalance.LASTING_S / 3
    rows = {
        A: ((0.0, then, 1.0), (then, now_s, 1.0)),
        B: ((0.0, then, 1.08), (then, now_s, lately)),
    }
    seen = {
        who: tuple(Window(a, b, unit_s * times, 1000, 0.01, 0.0, 1, 30) for a, b, times in of)
        for who, of in rows.items()
    }
    story.state = replace(story.state, speeds=seen, timed_at_s=now_s, entered_at_s=0.0)
    found = share_rebalance.shares(story.state, now_s)
    assert bool(found and orders(found, SetShares)) == moves
    assert not found or "better all through the last" in found.reason and plan.samples == (60, 60)


def test_shares_stay_within_what_the_job_pins() -> None:
    story = Story(microbatch_size=7, layout="auto")
    plan = story.running("a", "b", "c", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 10.0, "c": 10.0}, 8))
    (order,) = orders(story.tick(after_s=1), SetShares)
    assert max(order.samples) == 7 and sum(order.samples) == 12


def test_shares_stay_whole_groups_of_samples() -> None:
    """What BatchNorm keeps together."""
    story = Story(layout="auto")
    plan = story.running("a", "b", steps=30)
    assert story.state.model is not None
    story.state = replace(story.state, model=replace(story.state.model, together=3))
    story.tick(timed(plan, 30, {"a": 1.0, "b": 10.0}, 8))
    (order,) = orders(story.tick(after_s=1), SetShares)
    assert order.samples == (9, 3)


def test_nothing_is_moved_in_the_last_steps() -> None:
    story = Story(steps=34)
    plan = story.running("a", "b", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 9.0}, 8))
    assert not orders(story.tick(after_s=1), SetShares)
    assert share_rebalance.LAST_STEPS >= 34 - 30


def test_shares_that_do_not_fit_leave_the_layout_and_make_shares_equal_again() -> None:
    story = Story()
    plan = story.running("a", "b", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 2.0}, 8), after_s=5)
    story.tick(SharesSet(plan.generation, (8, 4), 32))
    story.tick(WorkerFailed(A, plan.generation, "out_of_memory", "out of memory", 1 << 30))
    assert (
        not story.state.infeasible
        and "shares of 8, 4 samples do not fit" in story.state.uneven_failed
    )
    assert speeds.rates(story.state, list(story.state.nodes.values())) is None and SPOT.max_nodes


def test_moves_of_long_ago_are_forgotten() -> None:
    """They make the next ones harder for a quarter of an hour, and no longer."""
    story = Story()
    plan = story.running("a", "b", steps=30)
    old = tuple(Moved(story.now_s - 3600, 64) for _ in range(4))
    story.state = replace(story.state, shares_moved=old, stages_moved=old)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 2.0}, 8))
    assert orders(story.tick(after_s=1), SetShares)
    assert speeds.recent(old, story.now_s) == () and len(speeds.recent(old, old[0].at_s + 1)) == 4


def test_who_is_left_out_of_the_plan_counts_as_measured_for_a_while_only() -> None:
    story = Story()
    plan = story.running("a", "b", steps=6)
    story.tick(timed(plan, 6, {"a": 1.0, "b": 3.0}))
    assert story.state.plan is not None
    alone = replace(story.state.plan, ranks=(A,), samples=(12,))
    nodes = [story.state.nodes[name] for name in "ab"]
    soon = replace(story.state, plan=alone)
    late = replace(soon, timed_at_s=soon.timed_at_s + 2 * speeds.REMEMBERED_S)
    assert speeds.rates(soon, nodes) == pytest.approx({A: 1.0, B: 1 / 3})
    assert speeds.rates(late, nodes) == pytest.approx({A: 1.0, B: 1.0})


def test_shares_do_not_vary_where_the_compiler_could_not_follow() -> None:
    story = Story(compile=True)
    plan = story.running("a", "b", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 2.0}, 8))
    assert share_rebalance.ready(story.state, story.now_s)
    cut = replace(plan, layout=Layout(tp=2), samples=(12,))
    assert not share_rebalance.ready(replace(story.state, plan=cut), story.now_s)
    assert share_rebalance.ready(
        replace(story.state, plan=cut, job=replace(story.state.job, compile=False)), story.now_s
    )


def test_unequal_shares_that_do_not_fit_are_given_up_before_the_layout() -> None:
    story = Story()
    plan = story.running("a", "b", steps=6)
    story.tick(timed(plan, 6, {"a": 1.0, "b": 3.0}))
    assert story.state.plan is not None
    uneven = replace(story.state.plan, samples=(9, 3))
    state = replace(story.state, plan=uneven, plans={**story.state.plans, plan.generation: uneven})
    found = infeasible(
        state, plan.generation, "out of memory", measured_bytes=1 << 30, at_s=story.now_s
    )
    assert found.uneven_failed and not found.infeasible
    again = infeasible(
        replace(found, failure=None),
        plan.generation,
        "out of memory",
        measured_bytes=1 << 30,
        at_s=story.now_s,
    )
    assert plan.layout in again.infeasible


def uneven_shares() -> tuple[Story, Plan]:
    """They run, as the speeds were measured."""
    story = Story()
    plan = story.running("a", "b", steps=6)
    story.tick(timed(plan, 6, {"a": 1.0, "b": 3.0}))
    uneven = replace(plan, samples=(9, 3))
    plans = {**story.state.plans, plan.generation: uneven}
    story.state = replace(story.state, plan=uneven, plans=plans, heeds_memory=True)
    return story, uneven


@pytest.mark.parametrize("apart", [False, True], ids=["one tick", "two ticks"])
def test_unequal_shares_that_fit_on_neither_of_two_ranks_leave_the_layout(apart: bool) -> None:
    story, plan = uneven_shares()
    both = [
        WorkerFailed(rank, plan.generation, "out_of_memory", "out of memory", 1 << 30)
        for rank in (A, B)
    ]
    for some in [both[:1], both[1:]] if apart else [both]:
        story.tick(*some)
    assert story.state.aborting and story.state.aborting.failure.cause == "infeasible"
    assert "shares of 9, 3 samples do not fit" in story.state.aborting.failure.reason
    assert story.state.uneven_failed and not story.state.infeasible


def test_memory_that_unequal_shares_lack_explains_what_peers_reported_before() -> None:
    story, plan = uneven_shares()
    story.tick(WorkerFailed(B, plan.generation, "collective", "remote error"))
    before = story.state.aborting
    story.tick(WorkerFailed(A, plan.generation, "out_of_memory", "out of memory", 1 << 30))
    after = story.state.aborting
    assert before is not None and before.failure.cause == "infrastructure"
    assert after is not None and after.failure.cause == "infeasible"
    assert story.state.uneven_failed and not story.state.infeasible


def test_a_stage_with_heavier_blocks_is_not_a_slow_node() -> None:
    story = Story()
    plan = story.running("a", "b")
    plan = replace(plan, layout=Layout(pp=2), samples=(12,), layers=(1, 1))
    state = replace(story.state, plan=plan, speeds={A: (window(20, 1.0),), B: (window(20, 4.0),)})
    assert speeds.times_slower(state)[B] == 4.0
    assert state.model is not None
    unlike = replace(
        state.model,
        n_blocks=2,
        specs=tuple(TensorSpec(f"{k}", (4 + k, 4), "float32", block=k) for k in range(2)),
    )
    assert speeds.times_slower(replace(state, model=unlike)) == {A: 1.0, B: 1.0}


def test_the_same_question_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    plan = story.running("a", "b", steps=30)
    story.tick(timed(plan, 30, {"a": 1.0, "b": 1.0}, 8))
    asked = []
    searched = plans.plan_layout
    monkeypatch.setattr(
        plans, "plan_layout", lambda *parts, **more: asked.append(1) or searched(*parts, **more)
    )
    first = plans.choice_of(story.state, story.state.available)
    story.steps(2)
    assert plans.choice_of(story.state, story.state.available) == first and len(asked) <= 1
    before = len(asked)
    story.tick(timed(plan, 36, {"a": 1.0, "b": 3.0}, 8))
    assert plans.choice_of(story.state, story.state.available) != first and len(asked) > before
    fewer = plans.choice_of(story.state, story.state.available[:1])
    assert len(fewer.ranks) == 1
