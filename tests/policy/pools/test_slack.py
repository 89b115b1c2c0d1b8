"""What the slack of a deadline is spent on, and when spot stands in for nodes on demand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, durable, orders

from elastic.policy.copies.cadence import durable_every
from elastic.policy.pools import deadline, hard_limits, hazard, pool_allocation, release, slack
from elastic.policy.speed import measured_steps
from elastic.policy.state.fold import PoolSeen, State
from elastic.policy.state.state import Backoff, MeasuredSteps, Request
from elastic.types import (
    DrainNode,
    EnterPlan,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    Pool,
    Quiesce,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    StoreCopy,
)

SPOT = Pool("spot", "CPU", 1, "spot", 1.0, 0, 4)
FIXED = Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 4)
START_S = 400.0
HOUR = 3600.0


def told(spare_starts: float, *names: str, fixed: int = 0, **changes: Any) -> Story:
    """A run on these nodes with a start of 400 s, the pause included, whose slack is so many
    starts; `fixed` of the nodes are on demand."""
    story = Story((SPOT, FIXED), min_workers=1, max_workers=4, purpose="fastest", on_demand_floor=0,
                  steps=500, **changes)  # fmt: skip
    on_demand = names[:fixed]
    story.tick(*(NodeReady(Node(n, "fixed" if n in on_demand else "spot")) for n in names))
    story.tick(*(NodePrepared(name) for name in names))
    story.tick(after_s=20)
    story.entered()
    story.steps(4, step_time_s=60.0)
    workers = len(names)
    story.state = replace(story.state, step_time_s=240.0 / workers, worker_step_s=240.0)
    pause_s = pool_allocation.drain.lead_of(story.state).pause_s
    seen = {name: PoolSeen(start_s=START_S - pause_s) for name in ("spot", "fixed")}
    story.state = replace(story.state, requests={}, backoff={}, history=seen)
    rest_s = (500 - story.state.step) * story.state.worker_step_s / 4
    left_s = (rest_s + spare_starts * START_S) / (1 - slack.KEPT)
    whole = story.state.job
    deadline_h = (story.now_s + left_s) / HOUR + 100.0
    story.state = replace(story.state, job=replace(whole, deadline_h=deadline_h, purpose="cheapest"),
                          first_started_at_s=-100 * HOUR, spends_slack=True)  # fmt: skip
    return story


def spare(story: Story) -> slack.Slack:
    found = pool_allocation.slack_of(story.state, [FIXED], story.now_s)
    assert found is not None
    return found


def need(story: Story) -> pool_allocation.OnDemandNeed:
    return pool_allocation.fall_back(story.state, story.now_s)


# ------------------------------------------------------------------------------------------- slack


def test_slack_is_what_on_demand_nodes_alone_would_leave_over() -> None:
    found = spare(told(20.0, "a", "b"))
    assert found.start_s == pytest.approx(START_S)
    assert found.spare_s == pytest.approx(20 * START_S, abs=1.0)
    assert found.lasts_s == pytest.approx((20 - slack.RESERVE) * START_S, abs=1.0)


@pytest.mark.parametrize(
    ("starts", "behind", "ahead", "last_call"),
    [
        (slack.RESERVE + slack.AHEAD + 0.5, False, True, False),
        (slack.RESERVE + slack.AHEAD - 0.5, False, False, False),
        (slack.RESERVE - 0.5, True, False, False),
        (slack.RISKED - 0.2, True, False, True),
    ],
)
def test_it_is_not_spent_to_the_end(
    starts: float, behind: bool, ahead: bool, last_call: bool
) -> None:
    found = spare(told(starts, "a", "b"))
    assert (found.behind, found.ahead, found.last_call) == (behind, ahead, last_call)


def test_what_runs_since_the_last_step_counts() -> None:
    story = told(20.0, "a", "b", "c", "d")
    before = spare(story)
    story.now_s += 30.0
    assert spare(story).spare_s == pytest.approx(before.spare_s, abs=2.0), "as fast as on demand"
    story.now_s += 2 * slack.RUNNING_MOST_S
    assert spare(story).spare_s < before.spare_s - 0.9 * slack.RUNNING_MOST_S, "not for ever"


def test_before_on_demand_has_given_a_node_it_starts_as_others_do() -> None:
    story = told(20.0, "a", "b")
    seen = {"spot": PoolSeen(start_s=720.0)}
    assert slack.start_s(replace(story.state, history=seen), FIXED) == 720.0
    assert slack.start_s(replace(story.state, history={}), FIXED) == slack.START_PRIOR_S


def test_no_more_than_half_of_the_slack_is_kept() -> None:
    story = told(7.0, "a", "b")
    assert spare(story).behind
    whole_h = (story.state.job.deadline_h or 0.0) - 100.0
    state = replace(story.state, job=replace(story.state.job, deadline_h=whole_h))
    story.state = replace(state, first_started_at_s=0.0)
    found = spare(story)
    assert found.reserve_s == pytest.approx(3.5 * START_S, rel=0.1) and not found.behind
    little = replace(found, whole_s=START_S)
    assert little.reserve_s == slack.RESERVE_LEAST * START_S


# ------------------------------------------------------------------------- how many nodes on demand


def test_with_slack_nothing_is_paid_but_spot_however_late_it_is() -> None:
    story = told(slack.RESERVE + 1, "a", "b")
    late = deadline.needed(story.state, FIXED, 4, now_s=story.now_s)
    assert late is not None and late.behind
    assert need(story).workers == 0
    story.state = replace(story.state, spends_slack=False)
    assert need(story).workers > 0, "the rule of journals before"


def test_at_the_reserve_on_demand_nodes_make_up_for_what_does_not_work() -> None:
    found = need(told(slack.RESERVE - 1, "a", "b"))
    assert found.workers == 2
    assert "are kept for 9 starts" in found.why


def test_nodes_on_demand_stay_until_spot_nodes_are_prepared() -> None:
    story = told(slack.RESERVE - 1, "a", "b", "c", "d", fixed=4)
    story.tick(*(NodeReady(Node(name, "spot")) for name in "wxyz"))
    assert need(story).workers == 4
    story.tick(*(NodePrepared(name) for name in "wxyz"))
    assert need(story).workers == 0


@pytest.mark.parametrize(("flag", "n"), [(True, 2), (False, 0)])
@pytest.mark.parametrize("before", [True, False])
def test_spot_nodes_that_start_leave_room_for_nodes_on_demand(
    before: bool, flag: bool, n: int
) -> None:
    """The job can use four workers, and two work: two spot nodes that were asked for, `before` or
    in the same decision, may yet be taken while they start."""
    story = told(5.0, "a", "b")
    request = Request("r", "spot", 2, story.now_s)
    story.state = replace(story.state, requests={"r": request} if before else {}, asks_beside=flag)
    ordered = orders(story.tick(), RequestNodes)
    assert sum(order.count for order in ordered if order.pool == "fixed") == n
    assert sum(order.count for order in ordered if order.pool == "spot") == (0 if before else 2)
    assert not orders(story.tick(), RequestNodes), "they are counted among those on demand"


@pytest.mark.parametrize(
    ("flag", "ends_in_s", "n"), [(True, 600.0, 4), (True, 1e6, 6), (False, 600.0, 6)]
)
def test_what_ends_before_the_deadline_does_not_do_the_rest(
    flag: bool, ends_in_s: float, n: int
) -> None:
    story = told(20.0, "a", "b")
    reserved = Pool("reserved", "CPU", 1, "reserved", 1.0, 0, 2, ends_at_s=story.now_s + ends_in_s)
    job = replace(story.state.job, max_workers=None)
    pools = (*story.state.pools, reserved)
    state = replace(story.state, job=job, pools=pools, heeds_ends=flag)
    assert pool_allocation.steady_workers(state, [FIXED]) == n


def test_they_are_kept_until_the_lead_is_wide() -> None:
    story = told(slack.RESERVE + 1, "a", "b", fixed=1)
    assert need(story).workers == 1
    story = told(slack.RESERVE + slack.AHEAD + 1, "a", "b", fixed=1)
    assert need(story).workers == 0


def test_with_less_slack_than_another_start_spot_is_not_counted() -> None:
    assert need(told(1.1, "a", "b", "c", "d")).workers == 0, "they may work on"
    assert need(told(0.9, "a", "b", "c", "d")).workers == 4
    assert need(told(0.6, "a", "b")).workers == 2, "half of the work would start again"


# --------------------------------------------------------------------------- what is not stored yet


@pytest.mark.parametrize(
    ("starts", "changes", "asked"),
    [
        (4.0, {}, True),
        (4.0, {"saves_in_time": False}, False),
        (20.0, {}, False),  # 180 s of 8,000 are no tenth
        (-0.2, {}, False),  # the deadline cannot be met on demand, and no slack is left to lose
        (4.0, {"copy_asked_step": 3}, False),  # it is under way
        (4.0, {"job": {"durable_every": 0}}, False),
    ],
)
def test_a_checkpoint_is_taken_before_what_is_not_stored_is_much_of_the_slack(
    starts: float, changes: dict[str, Any], asked: bool
) -> None:
    """Three steps that take a minute on demand; the job stores one every 30."""
    told_with = {"durable_every": 30} | changes.pop("job", {})
    story = told(starts, "a", "b", **told_with)
    known = {"saves_in_time": True, "copy_asked_step": 0, "durable": (durable(story, 1).copy,)}
    story.state = replace(story.state, **(known | changes))
    decision = story.tick()
    assert bool(orders(decision, StoreCopy)) == asked
    if asked:
        assert "3 steps since the last checkpoint would take 180 s of the 16" in decision.reason
        assert not orders(story.tick(), StoreCopy), "once"


def test_what_no_market_takes_is_not_stored_out_of_turn() -> None:
    story = told(4.0, "a", "b", fixed=2, durable_every=30)
    known = (durable(story, 1).copy,)
    story.state = replace(story.state, saves_in_time=True, copy_asked_step=0, durable=known)
    assert not orders(story.tick(), StoreCopy)


# ------------------------------------------------------------------------ steps on demand, measured


@pytest.mark.parametrize(("flag", "worker_s"), [(True, 6 * 30.0), (False, 140.0)])
def test_the_rest_takes_on_demand_what_the_plans_that_were_measured_say(
    flag: bool, worker_s: float
) -> None:
    """10 s of each step are shared by nobody: on six workers 30 s, and not 140 / 6."""
    story = told(20.0, "a", "b")
    plan = story.state.plan
    assert plan is not None
    layouts = [(2, 70.0), (3, 50.0), (4, 40.0), (6, 30.0)]
    seen = tuple(
        MeasuredSteps(replace(plan, layout=Layout(dp_shard=n)), (step_s,) * 3)
        for n, step_s in layouts
    )
    state = replace(story.state, measured=seen, worker_step_s=140.0, heeds_scaling=flag)
    assert measured_steps.worker_s(state, 6) == pytest.approx(worker_s)
    fewer = measured_steps.worker_s(replace(state, measured=seen[:3]), 6)
    assert fewer == pytest.approx(6 * 28.8 if flag else worker_s, abs=1.0), "as it follows"
    reads = tuple(replace(one, waited=(0.1, 0.1, 0.4)) for one in seen)
    reading = measured_steps.worker_s(replace(state, measured=reads), 6)
    assert reading == pytest.approx(worker_s / 0.8 if flag else worker_s)
    alike = replace(state, measured=seen[1:3])
    assert measured_steps.worker_s(alike, 6) == 140.0, "from 3 to 4 workers nothing follows"


def test_one_slow_read_of_data_does_not_make_the_rest_of_the_job_as_slow() -> None:
    """Of nine steps one took 20 times as long."""
    story = told(20.0, "a", "b")
    seen = tuple(
        MeasuredSteps(Plan(0, Layout(dp_shard=n), (), (), ()), (60.0 / n,) * 3, (0.0,) * 3)
        for n in (1, 4)
    )
    story.state = replace(story.state, measured=seen, heeds_scaling=True)
    story.steps(2, step_time_s=30.0)
    story.steps(1, step_time_s=600.0, data_s=570.0)
    assert story.state.measured[-1].waited == (0.0, 0.0, 0.95)
    assert measured_steps.worker_s(story.state, 4) == pytest.approx(60.0 / (1 - 0.95 / 9))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("says_no", [True, False])
def test_at_the_last_call_spot_is_asked_for_only_where_on_demand_says_no(
    says_no: bool, flag: bool
) -> None:
    story = told(slack.RISKED - 0.1, "a", "b")
    job = replace(story.state.job, max_workers=None)
    until = story.now_s + 600.0
    backoff = {"fixed": Backoff(until, 600.0, "no capacity")} if says_no else {}
    story.state = replace(story.state, job=job, backoff=backoff, spares_last=flag)
    wanted = {order.pool: order.count for order in orders(story.tick(), RequestNodes)}
    assert wanted == ({} if says_no else {"fixed": 2}) | (
        {"spot": 2} if says_no or not flag else {}
    )


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [(0.0, {}), (1.1, {"spot": 1}), (4.1, {"fixed": 1, "spot": 1}), (9.0, {"fixed": 2})],
)
def test_and_where_the_budget_does_not_bear_what_is_missing_on_demand(
    nodes: float, wanted: dict[str, int]
) -> None:
    """So many nodes of spot more."""
    story = told(slack.RISKED - 0.1, "a", "b")
    state = story.state
    bears_usd = (state.usd_per_h + nodes) * hard_limits.useful_s(state, FIXED) / HOUR
    job = replace(state.job, max_workers=None, budget_usd=state.usd_at(story.now_s) + bears_usd)
    story.state = replace(state, job=job, spares_last=True)
    got = {order.pool: order.count for order in orders(story.tick(), RequestNodes)}
    assert got == wanted


@pytest.mark.parametrize(("starts", "spot"), [(0.1, 0), (-0.1, 2), (-50.0, 2)])
def test_where_on_demand_alone_misses_the_deadline_spot_is_asked_for_behind_it(
    starts: float, spot: int
) -> None:
    story = told(starts, "a", "b")
    job = replace(story.state.job, max_workers=None)
    story.state = replace(story.state, job=job, spares_last=True)
    first, *more = orders(story.tick(), RequestNodes)
    assert first.pool == "fixed"
    assert sum(order.count for order in more) == spot


# ---------------------------------------------------------------------------------------- stand-ins


def test_a_stand_in_is_asked_for_where_it_pays_and_there_is_slack_for_its_reclaim() -> None:
    story = told(slack.RESERVE - 1, "a", "b", "c", "d", fixed=4)
    assert pool_allocation.stand_in_workers(story.state, story.now_s) == 4
    flickers = {
        name: replace(seen, moments=300, there_s=HOUR) for name, seen in story.state.history.items()
    }
    short = replace(story.state, history=flickers)
    assert pool_allocation.stand_in_workers(short, story.now_s) == 0
    late = told(slack.RISKED - 0.1, "a", "b", "c", "d", fixed=4)
    assert pool_allocation.stand_in_workers(late.state, late.now_s) == 0


def test_on_demand_nodes_are_left_for_spot_once_and_not_at_the_last_call() -> None:
    def moved(starts: float) -> list[DrainNode]:
        story = told(starts, "a", "b", "c", "d", fixed=4)
        story.tick(*(NodeReady(Node(name, "spot")) for name in "wxyz"))
        decision = story.tick(*(NodePrepared(name) for name in "wxyz"))
        later = story.tick(after_s=release.SETTLE_S + 1)
        return [*orders(decision, DrainNode), *orders(later, DrainNode)]

    assert {order.node_id for order in moved(slack.RESERVE - 1)} == {"a", "b", "c", "d"}
    assert moved(slack.RISKED - 0.3) == []


def test_spot_nodes_that_can_stand_in_for_none_are_released() -> None:
    story = told(slack.RISKED - 0.3, "a", "b", "c", "d", fixed=4)
    story.tick(*(NodeReady(Node(name, "spot")) for name in "wx"))
    decision = story.tick(NodePrepared("w"), NodePrepared("x"))
    assert {order.node_id for order in orders(decision, ReleaseNode)} == {"w", "x"}
    assert "these can stand in for none" in decision.reason


@pytest.mark.parametrize("flag", [True, False])
def test_what_a_plan_takes_in_is_not_released(flag: bool) -> None:
    """A node that costs more to start than it saves is not asked for, and used where it is."""
    story = told(slack.RESERVE - 1, "a", "b", "c", "d", fixed=4)
    seen = {**story.state.history, "spot": PoolSeen(start_s=100 * HOUR)}
    story.state = replace(story.state, keeps_left=flag, history=seen)
    story.tick(*(NodeReady(Node(name, "spot")) for name in "wxyz"))
    story.state = replace(story.state, history=seen, preparing={})
    nodes = {n: replace(node, status="prepared") for n, node in story.state.nodes.items()}
    story.state = replace(story.state, nodes=nodes, prepared=frozenset(nodes))
    decision = story.tick(after_s=release.SETTLE_S + 1)
    used = {name for order in orders(decision, EnterPlan) for name in order.plan.nodes}
    gone = {order.node_id for order in orders(decision, ReleaseNode)}
    assert used == set("wxyz") and gone == (set() if flag else used)


def test_what_a_stand_in_is_worth() -> None:
    """Two nodes at $3/h for ones at $1/h: $4/h less for an hour, and half of the time a start of
    400 s again."""
    story = told(slack.RESERVE - 1, "a", "b", "c", "d", fixed=4)
    seen = {name: replace(one, moments=9, there_s=0.0)
            for name, one in story.state.history.items()}  # fmt: skip
    state = replace(story.state, history=seen)  # (1 + 9) in 20 h
    found = slack.stand_in(state, [FIXED, FIXED], [SPOT], workers=4)
    assert found.less_usd_per_h == pytest.approx(4.0)
    rest_h = state.rest_steps * state.worker_step_s / 4 / HOUR
    assert found.hours == pytest.approx(min(2.0, rest_h))
    assert found.again_usd == pytest.approx(found.hours / 2 * START_S / HOUR * 6.0)


def test_on_demand_nodes_train_on_when_those_that_stood_in_are_taken_at_once() -> None:
    story = told(slack.RESERVE - 1, "a", fixed=1)
    state = replace(story.state, given_up=frozenset({"a"}))
    nodes = {**state.nodes, "a": replace(state.nodes["a"], status="draining")}
    story.state = replace(state, nodes=nodes)
    decision = story.tick()
    assert not orders(decision, Quiesce) and "a trains on" in decision.reason
    assert need(story).workers == 3, "it is one of four that work"
    story.state = replace(story.state, spends_slack=False)
    assert orders(story.tick(), Quiesce), "the rule of journals before"


# ------------------------------------------------------------------------------ what pools have done


def seen_after(*events: Any, flag: bool = True) -> State:
    story = Story((SPOT, FIXED))
    story.state = replace(story.state, spends_slack=flag)
    story.nodes("a", "b", "c", "d")
    for event in events:
        story.tick(event, after_s=10.0)
    return story.state


def test_nodes_that_are_taken_at_once_are_one_reclaim() -> None:
    state = seen_after(*(NodeLost(name) for name in "abcd"))
    seen = hazard.of(state, "spot")
    assert (seen.reclaims, seen.moments) == (4, 1)
    hours = 20 + seen.there_s / HOUR
    assert hazard.calm_h(state, {"spot"}) == pytest.approx(hours / 2, rel=1e-6)
    two = seen_after(Notice("a", 1000.0), NodeLost("a"))
    assert hazard.of(two, "spot").moments == 1, "a notice and its loss are one"


def test_moments_of_several_pools_add_up() -> None:
    state = seen_after(NodeLost("a"))
    assert hazard.calm_h(state, {"spot", "fixed"}) == pytest.approx(
        1 / (1 / hazard.calm_h(state, {"spot"}) + 0.002), rel=1e-6
    )
    assert hazard.calm_h(state, set()) == float("inf")


def test_hours_without_a_node_are_no_calm() -> None:
    story = Story((SPOT, FIXED))
    story.tick(after_s=HOUR)
    story.nodes("a", "b")
    story.tick(after_s=HOUR)
    seen = hazard.of(story.state, "spot")
    assert seen.there_s == pytest.approx(HOUR, abs=1.0) and seen.node_s > 1.9 * HOUR


@pytest.mark.parametrize(("flag", "most_s"), [(True, 120.0), (False, 600.0)])
def test_a_spot_pool_is_asked_again_soon(flag: bool, most_s: float) -> None:
    story = Story((SPOT, FIXED))
    state = replace(story.state, spends_slack=flag)
    for _ in range(8):
        state = hazard.refused(state, RequestFailed("spot", "r", "none"), at_s=0.0)
        state = hazard.refused(state, RequestFailed("fixed", "r", "none"), at_s=0.0)
    assert state.backoff["spot"].wait_s == most_s and state.backoff["fixed"].wait_s == 600.0


@pytest.mark.parametrize(("flag", "deaths"), [(True, 0), (False, 2)])
def test_a_reclaim_is_no_death_at_start(flag: bool, deaths: int) -> None:
    """A pool whose nodes have been prepared before is not left alone since the market flickers."""
    story = Story((SPOT, FIXED))
    seen = {"spot": PoolSeen(start_s=60.0)}
    state = replace(story.state, spends_slack=flag, history=seen)
    for name, at_s in (("x", 100.0), ("y", 300.0)):
        state = replace(state, born={name: at_s - 50})
        state = hazard.died(state, Node(name, "spot"), "taken", at_s=at_s, reclaimed=True)
    assert hazard.of(state, "spot").deaths == deaths
    assert ("spot" in state.backoff) == bool(deaths)
    state = replace(state, born={"z": 350.0})
    worse = hazard.died(state, Node("z", "spot"), "quarantined", at_s=400.0)
    assert hazard.of(worse, "spot").deaths == deaths + 1, "that was no reclaim"


def test_reclaims_at_once_share_their_pause() -> None:
    state = seen_after(*(NodeLost(name) for name in "abcd"))
    seen = {"spot": replace(hazard.of(state, "spot"), start_s=360.0)}
    state = replace(state, history=seen)
    per_node_h = hazard.reclaims_per_node_h(state, "spot")
    per_h = 1 / hazard.calm_h(state, {"spot"})
    usd = hazard.usd_per_gpu_h(state, SPOT, 1000, pause_s=36.0)
    assert usd == pytest.approx(1.0 + per_node_h * 0.1 + per_h * 0.01)


# ------------------------------------------------------------------------- starts and checkpoints


def test_a_start_after_a_loss_waits_for_nodes_that_are_almost_there() -> None:
    def started(flag: bool) -> list[EnterPlan]:
        story = told(20.0, "a", "b", "c", "d")
        story.state = replace(story.state, spends_slack=flag)
        story.tick(*(NodeLost(name) for name in "abcd"))
        story.tick(*(NodeReady(Node(name, "spot")) for name in "wxyz"), after_s=60)
        return orders(story.tick(NodePrepared("w")), EnterPlan)

    assert started(False) and not started(True)


def test_long_steps_have_checkpoints_close_together() -> None:
    story = told(20.0, "a", "b", "c", "d")
    nodes = list(story.state.nodes.values())
    often = replace(story.state, history={"spot": PoolSeen(losses=500, node_s=HOUR)})
    assert durable_every(often, nodes) == 1, "steps of a minute"
    slow = replace(often, durable_s=150.0)
    assert durable_every(slow, nodes) == 5, "not before the one before is stored"
    assert durable_every(replace(often, spends_slack=False), nodes) == 20
    quick = replace(often, step_time_s=0.1)
    assert durable_every(quick, nodes) >= 20


def test_the_orders_that_follow() -> None:
    """At the reserve the missing nodes are asked for, and spot nodes go on being asked for beside
    them; with slack nothing is asked for on demand."""
    story = told(slack.RESERVE - 1, "a", "b")
    assert orders(story.tick(), RequestNodes) == [RequestNodes("spot", 2, "spot-2")]
    failed = next(iter(story.state.requests.values()))
    (order,) = orders(story.tick(RequestFailed("spot", failed.request_id, "none")), RequestNodes)
    assert (order.pool, order.count) == ("fixed", 2), "spot has none, and these make up for it"
    story = told(slack.RISKED - 0.1, "a", "b")
    (order,) = orders(story.tick(), RequestNodes)
    assert (order.pool, order.count) == ("fixed", 2), "at the last call it is not waited for"
    story = told(slack.RESERVE + 3, "a", "b")
    wanted = {order.pool: order.count for order in orders(story.tick(), RequestNodes)}
    assert wanted == {"spot": 2}
    failed = next(iter(story.state.requests.values()))
    story.tick(RequestFailed("spot", failed.request_id, "none"))
    assert not orders(story.decisions[-1], RequestNodes)
