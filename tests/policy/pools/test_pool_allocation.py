"""How many nodes of each pool are wanted, and which are left again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import MODEL, Story, orders, plan_of

from elastic.api.planning.plan_nodes import known_of
from elastic.policy.pools import deadline, pool_allocation
from elastic.policy.pools.hard_limits import STOP_MOST_S
from elastic.policy.state.fold import PoolSeen
from elastic.types import (
    Copy,
    CopyStored,
    DrainNode,
    EnterPlan,
    InstancesSeen,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Pool,
    PriceSeen,
    Quiesce,
    Quiesced,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Stop,
    WorkerId,
)

SPOT = Pool("spot", "CPU", 1, "spot", 1.0, 0, 4)
FIXED = Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 4)


def story(*pools: Pool, **changes: Any) -> Story:
    values = {"purpose": "cheapest", "min_workers": 2, "max_workers": 4} | changes
    return Story(pools or (SPOT, FIXED), **values)


def asked(told: Story, back: int = 1) -> dict[str, int]:
    """Pool -> nodes requested, in the newest decision."""
    return {order.pool: order.count for order in orders(told.decisions[-back], RequestNodes)}


def refused(told: Story, pool: str, after_s: float = 0.1) -> None:
    request = next(r for r in told.state.requests.values() if r.pool == pool)
    told.tick(RequestFailed(pool, request.request_id, "no capacity"), after_s=after_s)


def on_demand(told: Story, *names: str) -> None:
    told.tick(*(NodeReady(Node(name, "fixed")) for name in names), after_s=60)
    told.tick(*(NodePrepared(name) for name in names), after_s=30)


# -------------------------------------------------------------------------------- purpose and floor


@pytest.mark.parametrize(
    ("keys", "cheap"),
    [
        ({}, False),
        ({"purpose": None}, False),
        ({"purpose": "auto"}, False),
        ({"purpose": "auto", "deadline_h": 3.0}, True),
        ({"purpose": "auto", "on_demand_floor": 0}, True),
        ({"purpose": "fastest", "deadline_h": 3.0}, False),
        ({"purpose": "deadline", "deadline_h": 3.0}, True),
        ({"purpose": "cheapest"}, True),
    ],
)
def test_without_the_new_keys_every_pool_is_filled(keys: dict[str, Any], cheap: bool) -> None:
    told = Story((SPOT, FIXED), **keys)
    assert pool_allocation.cheapest(told.state) == cheap
    assert asked(told) == ({"spot": 4} if cheap else {"spot": 4, "fixed": 4})


def test_the_floor_is_asked_for_first() -> None:
    assert asked(story(on_demand_floor=1)) == {"fixed": 1, "spot": 3}
    assert asked(story(on_demand_floor=1, max_nodes=2)) == {"fixed": 1, "spot": 1}


@pytest.mark.parametrize(("memory", "nodes"), [(0, 1), (1 << 30, 1), (5 << 20, 4)])
def test_a_copy_is_as_many_nodes_as_hold_the_state(memory: int, nodes: int) -> None:
    """MODEL has 4 MB of parameters, as much in gradients, and twice that in AdamW's moments: 16
    MB."""
    told = story(
        SPOT, replace(FIXED, memory_bytes_per_gpu=memory), on_demand_floor="copy", max_workers=None
    )
    assert asked(told) == {"fixed": nodes, "spot": 4}
    assert (
        f"{nodes} on-demand node{'s' * (nodes > 1)} for one whole copy of the state, "
        f"${3 * nodes:.2f}/h"
    ) in told.decisions[0].reason


def test_the_floor_comes_by_itself_when_durable_copies_are_too_far_apart() -> None:
    told = story(durable_every=200, steps=10_000, max_workers=5)
    told.running("a", "b", "c", "d")
    told.steps(2, step_time_s=1.0)
    assert pool_allocation.expected_loss_share(told.state) == pytest.approx(
        0.2 * 0.05 * 4 * 100 / 3600, rel=0.01
    )
    assert pool_allocation.floor_nodes(told.state, [FIXED]) == (0, "")
    told.steps(1, step_time_s=600.0)
    told.steps(40, step_time_s=600.0)
    n, why = pool_allocation.floor_nodes(told.state, [FIXED])
    assert n == 1 and "more than 1% of the spend" in why and "$3.00/h" in why


def test_no_floor_that_costs_more_than_what_is_done_again() -> None:
    """Of the spend of $4/h more than 1 % is lost; a node on demand in the place of a spot node
    costs $2/h more, or $29."""
    told = story(durable_every=200, steps=10_000, max_workers=5)
    told.running("a", "b", "c", "d")
    told.steps(41, step_time_s=600.0)
    share = pool_allocation.expected_loss_share(told.state)
    assert share > 0.5 and 2.0 < share * told.state.usd_per_h < 29.0
    assert pool_allocation.floor_nodes(told.state, [FIXED])[0] == 1
    dear = replace(FIXED, usd_per_node_h=30.0)
    assert pool_allocation.floor_nodes(told.state, [dear]) == (0, "")


def test_an_unanswered_request_is_waited_for_twice_as_long_the_next_time() -> None:
    """A pool may only be slow to start; a node that comes ends that."""
    told = story(SPOT, min_workers=1)
    waits = []
    for _ in range(7):
        patience_s = pool_allocation.patience_s(told.state, "spot")
        waits.append(patience_s)
        told.tick(after_s=patience_s + 0.1)
        told.tick(after_s=600.1)  # the pool counts as one that said no
    assert waits == [360.0, 720.0, 1440.0, 2880.0, 3600.0, 3600.0, 3600.0]
    told.tick(NodeReady(Node("a", "spot")))
    assert pool_allocation.patience_s(told.state, "spot") == 360.0


@pytest.mark.parametrize("flag", [True, False])
def test_machines_that_start_slowly_are_not_withdrawn(flag: bool) -> None:
    """Such as the first ones of a cluster, which install the package."""
    told = story(SPOT, min_workers=1)
    told.state = replace(told.state, waits_for_started=flag)
    told.tick(InstancesSeen("spot", starting=1), after_s=100.0)
    told.tick(after_s=260.1)
    assert asked(told) == ({} if flag else {"spot": 0})
    if flag:
        told.tick(after_s=3239.0)  # 3599.1 s
        assert asked(told) == {}
        told.tick(after_s=1.0)
        assert asked(told) == {"spot": 0}


def test_a_request_whose_machines_are_gone_is_withdrawn_as_ever() -> None:
    told = story(SPOT, min_workers=1)
    told.state = replace(told.state, waits_for_started=True)
    told.tick(InstancesSeen("spot", starting=1), after_s=100.0)
    told.tick(InstancesSeen("spot"), after_s=100.0)
    told.tick(after_s=160.1)
    assert asked(told) == {"spot": 0}


@pytest.mark.parametrize("flag", [True, False])
def test_the_rest_of_a_request_is_waited_for_when_its_first_node_comes_late(flag: bool) -> None:
    """The second request is waited for for 720 s; its two nodes come 400 s after it."""
    told = story(Pool("spot", "CPU", 1, "spot", 1.0, 0, 2))
    told.state = replace(told.state, asks_beside=flag)
    told.tick(after_s=360.1)
    told.tick(after_s=30.1)
    assert asked(told) == {"spot": 2}
    told.tick(NodeReady(Node("a", "spot")), after_s=400.0)
    assert asked(told) == ({} if flag else {"spot": 0})
    told.tick(NodePrepared("a"), after_s=50.0)
    assert pool_allocation.patience_s(told.state, "spot") == (900.0 if flag else 1800.0)


# ------------------------------------------------------------------------------------ too few nodes


def test_a_pool_that_says_no_costs_no_time_when_waiting_is_dear() -> None:
    """Waiting: $6/h. On demand: about $4/h more than spot. 15 min of that are $0.49; a start of 3
    min costs $0.31."""
    told = story()
    refused(told, "spot")
    assert asked(told) == {"fixed": 2}
    reason = told.decisions[-1].reason
    assert (
        "waiting costs $6.00/h ($0.00 of it idle nodes)" in reason
        and "spot is expected in 15 min" in reason
    )
    assert "falling back saves $0.5" in reason and "for $0.32 once" in reason


def test_waiting_goes_on_while_it_is_worth_it() -> None:
    """$4.50/h of waiting against $3.98/h: the start's $0.32 are reached after 36 min."""
    told = story(waiting_usd_per_h=4.5)
    refused(told, "spot")
    assert asked(told) == {}
    found = deadline.waiting(told.state, FIXED, 2, now_s=told.now_s)
    less = 4.5 - (6.0 - 2 * 1.0 * (1 + 0.05 * 185 / 3600))
    assert found.look_s - told.now_s == pytest.approx(
        3600 * (2 * 3.0 * 190 / 3600 / less - 0.25), rel=1e-3
    )
    while told.now_s < found.look_s - 1:
        assert "fixed" not in asked(told)
        told.tick(after_s=min(20.0, found.look_s - 1 - told.now_s))
        if any(r.pool == "spot" for r in told.state.requests.values()):
            refused(told, "spot")
    assert told.state.backoff["spot"].wait_s > 100
    for _ in range(3):
        told.tick(after_s=5.0)
    assert (
        orders(told.decisions[-3], RequestNodes)
        or orders(told.decisions[-2], RequestNodes)
        or asked(told)
    )
    assert told.state.requests and {r.pool for r in told.state.requests.values()} >= {"fixed"}


def test_nothing_is_bought_where_waiting_costs_nothing() -> None:
    told = story(waiting_usd_per_h=0)
    refused(told, "spot")
    for _ in range(50):
        told.tick(after_s=600)
        assert "fixed" not in asked(told)
        if told.state.requests:
            refused(told, "spot")
    assert told.decisions[-1].wake_at_s is not None


def test_idle_nodes_make_waiting_dear() -> None:
    told = story(waiting_usd_per_h=0, min_workers=4)
    told.nodes("a", "b", "c")
    told.tick(after_s=20)
    refused(told, "spot")
    assert asked(told) == {"fixed": 1}, (
        "three idle nodes at $1.00 against $1.99 more for one on demand"
    )
    assert "($3.00 of it idle nodes)" in told.decisions[-1].reason


def test_a_request_without_an_answer_is_taken_back_and_the_next_pool_is_asked_at_once() -> None:
    told = story(SPOT, Pool("spot-b", "CPU", 1, "spot", 1.1, 0, 4), FIXED)
    assert asked(told) == {"spot": 4}
    wake_at_s = told.tick().wake_at_s
    assert wake_at_s == pytest.approx(360.1), "twice an ordinary start"
    told.tick(after_s=wake_at_s - told.now_s)
    assert asked(told) == {"spot": 0, "spot-b": 4}
    assert "pool spot has not answered for 360 s" in told.decisions[-1].reason
    assert (
        told.state.backoff["spot"].wait_s == 30
        and "no answer for 360 s" in told.state.backoff["spot"].reason
    )


def test_on_demand_that_is_asked_for_is_kept_when_spot_is_asked_again() -> None:
    told = story()
    refused(told, "spot")
    told.tick(after_s=30)
    assert asked(told) == {"spot": 4}, "asked again while the on-demand nodes are on their way"
    on_demand(told, "x", "y")
    assert not orders(told.decisions[-1], ReleaseNode) and not orders(
        told.decisions[-2], ReleaseNode
    )
    told.tick(after_s=10)
    assert set(
        plan_of(told.decisions[-1]).nodes
        if orders(told.decisions[-1], EnterPlan)
        else told.state.target.nodes
    ) == {"x", "y"}  # type: ignore[union-attr]


def test_the_next_on_demand_pool_takes_the_place_of_one_that_says_no() -> None:
    told = story(SPOT, FIXED, replace(FIXED, name="dear", usd_per_node_h=3.5))
    refused(told, "spot")
    assert asked(told) == {"fixed": 2}
    refused(told, "fixed")
    assert asked(told) == {"dear": 2}


# ------------------------------------------------------------------------------------- back to spot


def fallen_back(**changes: Any) -> Story:
    """A run on two on-demand nodes, spot is away."""
    step_s = changes.pop("step_s", 60.0)
    told = story(**({"steps": 600} | changes))
    refused(told, "spot")
    on_demand(told, "x", "y")
    told.tick(after_s=20)
    told.entered()
    told.steps(3, step_time_s=step_s)
    return told


def test_on_demand_is_left_for_spot_in_one_transition() -> None:
    told = fallen_back()
    told.tick(*(NodeReady(Node(name, "spot")) for name in "ab"), after_s=60)
    decision = told.tick(*(NodePrepared(name) for name in "ab"), after_s=30)
    decision = decision if orders(decision, EnterPlan) else told.tick(after_s=5)
    assert {order.node_id for order in orders(decision, DrainNode)} == {"x", "y"}
    plan = plan_of(decision)
    assert (
        set(plan.nodes) == {"a", "b"} and plan.cause == "release" and plan.resume.source == "live"
    )
    assert (
        "$4.00/h less" in decision.reason
        and "saved for" in decision.reason
        and "of pause" in decision.reason
    )
    assert "on demand are left: " in decision.reason
    told.entered()
    for name in "xy":
        told.tick(Quiesced(WorkerId(name, 0), plan.generation, told.state.step))
    released = {order.node_id for d in told.decisions for order in orders(d, ReleaseNode)}
    assert released == {"x", "y"}


def test_a_node_that_was_given_up_is_not_taken_in_again_because_the_cluster_drains_it() -> None:
    told = fallen_back()
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=5)
    plan = told.entered()
    assert set(plan.nodes) == {"a", "b"}
    told.tick(*(Notice(name, told.now_s + 600) for name in "xy"))
    told.tick(after_s=5)
    assert told.state.target is None and told.state.history["fixed"].reclaims == 0


def test_the_way_back_must_pay() -> None:
    """Three seconds before the end nothing is left to be saved."""
    told = fallen_back(steps=6, step_s=1.0)
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=5)
    assert not any(orders(d, DrainNode) for d in told.decisions)
    assert told.state.target is not None and len(told.state.target.nodes) == 4, (
        "all of them finish it"
    )


def test_spot_that_is_dearer_by_now_is_no_reason_to_leave() -> None:
    told = fallen_back()
    told.tick(PriceSeen("spot", 3.2))
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=5)
    assert not any(orders(d, DrainNode) for d in told.decisions)


def test_often_reclaimed_spot_is_not_worth_a_move() -> None:
    told = fallen_back()
    told.state = replace(
        told.state, history=told.state.history | {"spot": PoolSeen(reclaims=10_000, start_s=600.0)}
    )
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=5)
    assert not any(orders(d, DrainNode) for d in told.decisions)


def test_on_demand_nodes_that_come_too_late_are_given_back() -> None:
    told = story()
    refused(told, "spot")
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=20)
    told.entered()
    on_demand(told, "x", "y")
    released = [order.node_id for d in told.decisions for order in orders(d, ReleaseNode)]
    assert sorted(released) == ["x", "y"]
    assert any("$6.00/h less" in d.reason or "$3.00/h less" in d.reason for d in told.decisions)


def test_when_the_new_nodes_die_the_ones_that_were_given_up_are_still_good() -> None:
    told = fallen_back()
    told.nodes("a", "b", pool="spot")
    told.tick(after_s=5)
    plan = told.entered()
    told.tick(NodeLost("a"), NodeLost("b"))
    told.quiesced(plan, {})
    told.tick(CopyStored(Copy(1, "durable", 1, Layout(dp_shard=2), (), "file://c1")))
    target = told.state.target
    assert target is not None and set(target.nodes) == {"x", "y"}


# ----------------------------------------------------------------------------------------- deadline


def measured(step: int, hours: float, step_s: float = 60.0, **changes: Any) -> Story:
    """After `step` steps on two spot nodes, and `hours` since the start."""
    told = story(deadline_h=10.0, steps=500, min_workers=1, **changes)
    told.running("a", "b")
    told.steps(step, step_time_s=step_s)
    told.tick(after_s=hours * 3600 - told.now_s)
    return told


def need(told: Story) -> pool_allocation.OnDemandNeed:
    return pool_allocation.fall_back(told.state, told.now_s)


def test_progress_ahead_of_the_deadline_needs_nothing() -> None:
    assert need(measured(300, 5.0)).workers == 0


def test_progress_behind_the_deadline_is_made_up_for_on_demand() -> None:
    """400 steps of 120 worker-seconds in 5 h, less 3 % and twice 185 s: 2.8 workers. Two are
    there."""
    told = measured(100, 5.0)
    told.state = replace(told.state, requests={}, backoff={})
    found = need(told)
    assert found.workers == 1
    assert (
        "step 100 of 500" in found.why
        and "behind even progress" in found.why
        and "asks for 3 workers" in found.why
    )


def test_the_safety_net_does_not_count_on_spot() -> None:
    """The rest takes 4.3 h on the four on-demand nodes alone, and that much time is left."""
    told = measured(10, 5.9, step_s=55.0 * 2)
    found = need(told)
    assert found.workers >= 4 and "spot is no longer counted on" in found.why


def test_on_demand_stays_until_the_lead_is_two_changes_wide() -> None:
    told = measured(300, 5.0)
    on_time = 300 / 500 * (10 * 3600 - 185) + 185
    for lead_s, kept in ((-60, 0), (-1000, 0)):
        found = deadline.needed(told.state, FIXED, 4, now_s=on_time + lead_s)
        assert found is not None and not found.behind and found.ahead == (lead_s < -370), kept
    late = deadline.needed(told.state, FIXED, 4, now_s=on_time + 60)
    assert late is not None and late.behind and "1 min behind" in late.why


def test_the_deadline_ends_the_run_with_its_state_saved() -> None:
    told = story(deadline_h=1.0, steps=500)
    plan = told.running("a", "b", steps=4)
    told.state = replace(told.state, requests={})
    decision = told.tick(after_s=3600)
    assert (
        orders(decision, Quiesce) == [Quiesce(plan.generation, save=True)]
        and "the deadline of 1 h" in decision.reason
    )
    stored = CopyStored(Copy(4, "durable", plan.generation, Layout(dp_shard=2), (), "file://c4"))
    told.tick(
        Quiesced(WorkerId("a", 0), plan.generation, 4),
        Quiesced(WorkerId("b", 0), plan.generation, 4),
        stored,
    )
    (stop,) = orders(told.decisions[-1], Stop)
    assert (
        stop.outcome == "stopped" and "the deadline of 1 h is over at step 4 of 500" in stop.reason
    )


def test_what_gets_done_in_time_is_not_cut_short() -> None:
    told = story(deadline_h=1.0, steps=10)
    told.running("a", "b")
    told.steps(8, step_time_s=100.0)
    told.tick(after_s=3600 + 0.1 - 250 - told.now_s)
    assert told.state.stop is None, "two steps of 100 s, and 250 s are left"
    told.tick(after_s=200)
    assert told.state.stop is not None or orders(told.decisions[-1], Quiesce)


# ------------------------------------------------------------------------------------------ limits


def test_what_would_outrun_the_budget_is_not_asked_for() -> None:
    """Before a start was seen, 20 s of four nodes; with starts of 6 min, $0.40 bear two nodes at
    $1/h for 12 min."""
    assert asked(story(budget_usd=0.4)) == {"spot": 4}
    told = story(budget_usd=0.4)
    told.state = replace(told.state, requests={}, history={"spot": PoolSeen(start_s=360.0)})
    told.tick()
    assert asked(told) == {"spot": 2}


def test_a_budget_that_buys_nothing_ends_the_run() -> None:
    told = story(SPOT, budget_usd=0.004)
    (stop,) = orders(told.decisions[-1], Stop)
    assert stop.outcome == "stopped" and "the budget of $0.00 buys no more nodes" in stop.reason
    assert told.state.phase == "stopped" and told.now_s < STOP_MOST_S


def test_the_state_is_saved_before_the_budget_is_gone() -> None:
    told = story(budget_usd=2.0)
    plan = told.running("a", "b")
    told.steps(4, step_time_s=30.0)
    told.tick(
        CopyStored(Copy(2, "durable", plan.generation, Layout(dp_shard=2), (), "file://c2"), 20.0)
    )
    decision = told.tick(after_s=3600 - 89 - told.now_s)
    assert (
        orders(decision, Quiesce)
        and "$2.00 is almost spent ($1.95; the last 90 s are kept for saving)" in decision.reason
    )
    assert told.state.stop is not None
    told.tick(after_s=88)
    assert not orders(told.decisions[-1], Stop)
    told.tick(after_s=3)
    (stop,) = orders(told.decisions[-1], Stop)
    assert "were not enough to save more" in stop.reason and told.state.usd < 2.01


def test_nodes_above_max_nodes_are_given_back_and_those_that_leave_count() -> None:
    told = story(max_nodes=2)
    assert asked(told) == {"spot": 2}
    told.running("a", "b", steps=2)
    told.tick(NodeReady(Node("c", "spot")))
    released = [order.node_id for d in told.decisions for order in orders(d, ReleaseNode)]
    assert released == ["c"] and "released, max_nodes is 2" in "; ".join(
        d.reason for d in told.decisions
    )
    told.tick(NodeLost("c", "released"))
    told.tick(Notice("b", told.now_s + 600))
    assert not asked(told), "two are paid for"


# ------------------------------------------------------------------------------------- reservations


def test_a_reservation_is_left_before_it_ends_and_not_asked_when_it_nearly_has() -> None:
    ours = Pool("ours", "CPU", 1, "reserved", 0.5, 0, 1, ends_at_s=5000.0)
    told = Story((ours, SPOT))
    assert asked(told) == {"ours": 1, "spot": 4}
    told.nodes("r", pool="ours")
    told.nodes("a", "b")
    told.tick(after_s=20)
    told.entered()
    told.steps(3, step_time_s=1.0)
    told.tick(after_s=4399 - told.now_s)
    assert not any(orders(d, DrainNode) for d in told.decisions)
    decision = told.tick(after_s=2)
    assert (
        orders(decision, DrainNode) == [DrainNode("r")]
        and "the reservation ends (ours in 10 min)" in decision.reason
    )
    assert told.state.nodes["r"].deadline_s == 5000.0 and told.state.target is None, (
        "it works on until it must be left"
    )
    told.tick(after_s=590)
    plan = plan_of(told.decisions[-1])
    assert set(plan.nodes) == {"a", "b"} and plan.cause == "notice"
    late = Story((replace(ours, ends_at_s=900.0), SPOT))
    assert asked(late) == {"spot": 4}


def test_memory_is_part_of_the_least() -> None:
    told = story(replace(SPOT, memory_bytes_per_gpu=5 << 20), min_workers=1)
    assert pool_allocation.least_workers(told.state) == 4 and MODEL.n_params == 1_000_000
    assert pool_allocation.least_workers(story(min_workers=1).state) == 1
    assert (
        pool_allocation.least_workers(
            story(min_workers=1, layout={"2": "dp_shard=2", "4": "dp_shard=4"}).state
        )
        == 2
    )


# --------------------------------------------------------------------------------- placement scores


@pytest.mark.parametrize(
    ("usd_of_a", "scores", "first"),
    [
        (1.0, {}, "a"),
        (1.0, {"a": 2, "b": 9}, "b"),
        (1.0, {"b": 9}, "b"),
        (1.0, {"a": 9}, "a"),
        (0.95, {"a": 1, "b": 10}, "a"),
    ],
)
def test_between_equal_prices_the_better_placement_score_is_asked_first(
    usd_of_a: float, scores: dict[str, int], first: str
) -> None:
    pools = [Pool(name, "CPU", 1, "spot", usd, 0, 4) for name, usd in (("a", usd_of_a), ("b", 1.0))]
    told = story(*pools, FIXED)
    told.tick(
        *(PriceSeen(pool.name, pool.usd_per_node_h, scores.get(pool.name, 0)) for pool in pools)
    )
    wanted, _ = pool_allocation.pool_demands(told.state, told.now_s)
    assert [want.pool.name for want in wanted if want.pool.market_type == "spot"][0] == first
    assert told.state.scores == scores


def test_pools_are_compared_by_the_price_of_what_they_compute() -> None:
    """An H100 that costs 2.9 times as much as an A100 computes three times as much."""
    pools = (
        Pool("old", "A100", 8, "spot", 8.0, 0, 8), Pool("new", "H100", 8, "spot", 23.0, 0, 8),
        Pool("dear", "A100", 8, "on-demand", 30.0, 0, 8),
    )  # fmt: skip
    known = known_of(pools)
    state = replace(story(*pools).state, hardware=known, spends_slack=True)
    assert [pool.name for pool in pool_allocation.by_price(state)] == ["new", "old", "dear"]
    dearer = tuple(replace(p, usd_per_node_h=28.0) if p.name == "new" else p for p in pools)
    for changes in (
        {"pools": dearer},
        {"hardware": tuple(kind for kind in known if kind.accelerator_type == "A100")},
        {"spends_slack": False},
    ):
        found = pool_allocation.by_price(replace(state, **changes))
        assert [pool.name for pool in found] == ["old", "new", "dear"], changes
