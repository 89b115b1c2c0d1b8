"""The bill, the limits and the drivers of a script that is restarted: all of them are the run's."""

from __future__ import annotations

import pytest
from support.policy.script_story import POOLS, RAN_EVERY_S, ScriptStory, grown, three

from elastic.api.running.start_checks import paid_until_s
from elastic.cluster.nodes.demand import LEAVE_MOST_S
from elastic.driver import LINE_EVERY_S
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.policy import restarts
from elastic.sim.replay import replay
from elastic.types import (
    Decision,
    DriverStarted,
    EnterPlan,
    ModelProfile,
    Node,
    NodeLost,
    NodeReady,
    PriceSeen,
    Quiesce,
    RequestNodes,
    Stop,
)


def paid(before: ScriptStory | None = None, embedded: bool = True, **job: object) -> ScriptStory:
    """One node; `before`: the driver before this one."""
    lines = before.lines if before is not None else ()
    until_s = paid_until_s(lines, 900.0, embedded)
    return ScriptStory("n0", before=lines, paid_until_s=until_s, **job)  # type: ignore[arg-type]


def test_the_budget_outlives_its_driver() -> None:
    first = paid(budget_usd=200.0)
    first.meet(steps=False)
    first.wait(60)
    spent = first.state.usd
    assert first.state.stop is None and spent == pytest.approx(first.now_s)
    second = paid(first, at_s=1000.0, budget_usd=200.0)
    begun = second.state.usd
    assert begun == pytest.approx(spent + 10.0, abs=RAN_EVERY_S), (
        "embedded nodes ended with their driver"
    )
    second.meet(steps=False)
    while not second.orders(Quiesce):
        second.wait(1)
    second.leave()
    assert second.stop.reason.startswith("the budget of $200.00 is almost spent ($19")
    assert second.state.usd <= 200.0
    third = ScriptStory(before=second.lines, at_s=2000.0, budget_usd=200.0)
    third.wait(20)
    assert not third.plans[2:], "what is left of it starts nothing"
    assert replay(second.lines).identical


def test_on_a_cluster_the_nodes_outlive_a_driver_for_a_while_and_not_longer() -> None:
    first = paid(budget_usd=1e6)
    first.meet(steps=False)
    first.wait(60)
    spent, end_s = first.state.usd, first.now_s
    soon, late = (
        paid(first, embedded=False, at_s=end_s + s, budget_usd=1e6) for s in (30.0, 50_000.0)
    )
    waited = 10.0  # the new driver's own
    assert soon.state.usd == pytest.approx(spent + 30.0 + waited, abs=RAN_EVERY_S)
    outlived_s = LINE_EVERY_S + 900.0 + LEAVE_MOST_S
    assert late.state.usd == pytest.approx(spent + outlived_s + waited, abs=RAN_EVERY_S)
    ended = [*first.lines, Line(end_s, 1, (), Decision((Stop("stopped", "asked"),), "asked"))]
    first.lines = ended
    after = paid(first, embedded=False, at_s=50_000.0, budget_usd=1e6)
    assert after.state.usd == pytest.approx(spent + waited, abs=RAN_EVERY_S), (
        "it has given its nodes back"
    )


def test_prices_that_change_count() -> None:
    story = paid(budget_usd=1e6)
    begun = story.state.usd
    story.meet(steps=False)
    story.wait(10)
    story.hear(PriceSeen("spot", 7200.0))
    story.wait(20)
    assert story.state.usd - begun == pytest.approx(10 + 2 * 20, abs=1)
    story.hear(NodeLost("n0", "gone"))
    story.wait(100)
    assert story.state.usd - begun == pytest.approx(50, abs=1)


def test_the_deadline_is_the_runs() -> None:
    first = paid(deadline_h=1.0, budget_usd=1e6)
    first.meet()
    first.step(1)
    first.wait(60)
    second = paid(first, at_s=3570.0, deadline_h=1.0, budget_usd=1e6)
    second.meet()
    second.step(2)
    second.wait(10)
    assert second.state.stop is None
    second.wait(10)
    assert second.orders(Quiesce), "it has time to save before"
    second.leave()
    assert second.stop.reason == "the deadline of 1 h is over"
    assert second.now_s <= 3600.0


# ----------------------------------------------------------------------------------------- drivers


def test_a_driver_that_comes_back_on_a_cluster_finds_the_group_running() -> None:
    first = three()
    first.meet()
    first.step(5)
    second = ScriptStory(before=first.lines, at_s=first.now_s + 60, attached=True)
    second.plan = first.plan
    second.hear(*(NodeReady(Node(name, "spot")) for name in ("n0", "n1", "n2")))
    second.step(90)
    second.wait(20)
    assert len(second.plans) == 1 and second.state.step == 90
    second.end()
    assert second.stop.outcome == "succeeded"
    assert replay(second.lines).identical


def test_it_repeats_the_order_that_the_driver_before_may_not_have_given() -> None:
    first = grown()
    second = ScriptStory(before=first.lines, at_s=first.now_s + 60, attached=True)
    second.plan = first.plan
    second.hear(*(NodeReady(Node(name, "spot")) for name in ("n0", "n1", "n2", "n3")))
    assert second.orders(Quiesce)[-1] == Quiesce(1, grace_s=restarts.GRACE_S, cause="growth")
    second.leave()
    second.wait(12)
    assert second.plans[-1].cause == "growth"


def test_where_everything_ended_with_the_driver_the_next_group_resumes_after_the_steps_known() -> (
    None
):
    first = three()
    first.meet()
    first.step(7)
    second = ScriptStory("n0", before=first.lines, at_s=first.now_s + 60)
    (plan,) = second.plans[1:]
    assert (plan.generation, plan.cause, plan.resume.source, plan.resume.step) == (
        2,
        "start",
        "durable",
        7,
    )
    assert "resumes from its own checkpoint" in second.decisions(EnterPlan)[-1].reason
    second.meet(5)
    second.step(6)
    transition = second.account().transitions[-1]
    assert (transition.at_step, transition.steps_lost) == (5, 2)


def test_a_journal_of_when_ray_train_decided_is_not_replayed() -> None:
    job = {"script": "train.py", "restarted": True}
    start = DriverStarted("run", 1, job, POOLS, ModelProfile(0, 0, ()))
    with pytest.raises(SpecError, match="older version, where Ray Train restarted scripts"):
        replay([Line(0.0, 1, ((0.0, start),))])


def test_the_pools_are_filled_as_the_job_bounds_them() -> None:
    story = ScriptStory(pools=POOLS, max_workers=2)
    (asked,) = story.orders(RequestNodes)
    assert isinstance(asked, RequestNodes) and asked.count == 2
