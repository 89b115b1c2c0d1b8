"""What is learned of each pool: reclaims, droughts, starts, and nodes that die at start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, job, orders

from elastic.policy.pools import hazard
from elastic.policy.pools.node_orders import PREPARE_MOST_S
from elastic.policy.state.fold import PoolSeen, State, fold
from elastic.policy.state.state import Backoff
from elastic.types import (
    Decided,
    Decision,
    DriverStarted,
    Job,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeWarned,
    Notice,
    NoticeWithdrawn,
    Pool,
    PriceSeen,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
)

FIXED = Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 2)
STATE = State(run="r", job=Job.from_plain(job()), pools=(SPOT, FIXED))


def seen(**changes: PoolSeen) -> State:
    return replace(STATE, history=changes)


@pytest.mark.parametrize(
    ("pool", "found", "per_h"),
    [
        ("spot", PoolSeen(), 0.05),
        ("fixed", PoolSeen(), 0.002),
        # 20 h without any, as many as the prior's weight
        ("spot", PoolSeen(node_s=20 * 3600.0), 0.025),
        ("spot", PoolSeen(node_s=20 * 3600.0, reclaims=3), 0.1),
        ("spot", PoolSeen(node_s=980 * 3600.0, reclaims=99), 0.1),
    ],
)
def test_the_posterior_mean_of_reclaims(pool: str, found: PoolSeen, per_h: float) -> None:
    assert hazard.reclaims_per_node_h(seen(**{pool: found}), pool) == pytest.approx(per_h)


def test_each_pool_is_judged_by_what_it_did_itself() -> None:
    state = seen(spot=PoolSeen(losses=19, reclaims=19))
    nodes = [Node("a", "spot"), Node("b", "fixed")]
    assert hazard.losses_per_h(state, nodes) == pytest.approx(1.0 + 0.002)
    assert hazard.reclaims_per_h(state, [nodes[1]]) == pytest.approx(0.002)


def test_reclaims_count_once_and_what_is_given_back_is_none() -> None:
    story = Story(pools=(SPOT, FIXED))
    story.running("a", "b", "c", steps=2)
    story.tick(Notice("b", story.now_s + 10))
    story.tick(Notice("b", story.now_s + 8))  # another deadline
    story.entered()
    for order in orders(story.tick(after_s=10), ReleaseNode):
        story.tick(NodeLost(order.node_id, "released"))
    found = story.state.history["spot"]
    assert (found.reclaims, found.losses) == (1, 0)
    story.tick(NodeLost("c"))
    found = story.state.history["spot"]
    assert (found.reclaims, found.losses) == (2, 1)
    assert found.node_s == pytest.approx(story.state.node_s) and found.node_s > 3 * 20


@pytest.mark.parametrize(("counts_taken", "taken"), [(True, 1), (False, 0)])
def test_a_node_that_is_released_and_was_taken_before_that_counts_as_taken(
    counts_taken: bool, taken: int
) -> None:
    """Without the gate as drivers before it decided."""
    first = Story(pools=(SPOT, FIXED))
    first.running("a", "b", steps=2)
    first.state = replace(first.state, counts_taken=counts_taken)
    state = fold(first.state, Decided(Decision((ReleaseNode("b"),), "")), first.now_s)
    told = fold(state, Notice("b", first.now_s + 30), first.now_s)
    found = told.history["spot"]
    assert (found.reclaims, found.losses, told.n_notices) == (taken, 0, taken)
    found = fold(told, Notice("b", first.now_s + 20), first.now_s).history["spot"]
    assert found.reclaims == taken, "another deadline is no other reclaim"
    lost = fold(state, NodeLost("b", "taken"), first.now_s)
    found = lost.history["spot"]
    assert (found.reclaims, found.losses, lost.n_losses) == (taken, taken, taken)
    found = fold(told, NodeLost("b", "taken"), first.now_s).history["spot"]
    assert (found.reclaims, found.losses) == (taken, taken), "it was announced"
    for before in (state, told):
        found = fold(before, NodeLost("b", "released"), first.now_s).history["spot"]
        assert found.losses == 0 and found.reclaims == (taken if before is told else 0)


def test_a_warned_node_counts_a_little_until_it_is_taken() -> None:
    """A fifth of a reclaim, once for each node; a reclaim in place of it where the cloud was
    right."""

    def rate() -> float:
        return hazard.reclaims_per_node_h(
            replace(
                story.state, history={"spot": replace(story.state.history["spot"], node_s=0.0)}
            ),
            "spot",
        )

    story = Story(pools=(SPOT, FIXED))
    story.running("a", "b", "c", steps=2)
    losses = hazard.losses_per_h(story.state, [story.state.nodes["b"]])
    decision = story.tick(NodeWarned("b", "AWS: rebalance recommendation", risk=True))
    assert not decision.actions and story.state.nodes["b"].status == "prepared", "it trains on"
    assert rate() == pytest.approx((1.0 + 0.2) / 20)
    story.tick(
        NodeWarned("b", "again, in other words", risk=True),
        NodeWarned("c", "GCP: it stalls", risk=False),
    )
    assert rate() == pytest.approx((1.0 + 0.2) / 20)
    assert hazard.losses_per_h(story.state, [story.state.nodes["b"]]) <= losses, (
        "it says nothing of losses without a notice"
    )
    story.tick(NodeWarned("a", "AWS: rebalance recommendation", risk=True))
    assert rate() == pytest.approx((1.0 + 0.4) / 20)
    story.tick(Notice("b", story.now_s + 10))
    assert rate() == pytest.approx((1.0 + 0.2 + 1.0) / 20), "one of the two was taken"
    story.tick(
        NodeWarned("b", "late", risk=True), NodeWarned("gone", "of a node nobody knows", risk=True)
    )
    assert rate() == pytest.approx((1.0 + 0.2 + 1.0) / 20)
    story.entered()
    story.tick(NodeLost("a", "taken"))
    assert (story.state.history["spot"].warnings, story.state.history["spot"].reclaims) == (0, 2)


def test_a_pool_that_is_warned_of_costs_more() -> None:
    pool = replace(SPOT, name="warned")
    state = replace(STATE, pools=(SPOT, pool), history={"warned": PoolSeen(warnings=5)})
    assert hazard.usd_per_gpu_h(state, pool) > hazard.usd_per_gpu_h(state, SPOT)


def test_a_drought_that_lasts_is_expected_to_last() -> None:
    story = Story(pools=(SPOT,))
    (request,) = orders(story.decisions[0], RequestNodes)
    story.tick(RequestFailed("spot", request.request_id, "no capacity"))
    assert hazard.dry_for_h(story.state, "spot", story.now_s) == pytest.approx(0.25)
    assert hazard.dry_for_h(story.state, "spot", story.now_s + 1800) == pytest.approx(0.75)
    story.tick(NodeReady(Node("a", "spot")), after_s=1800)
    assert hazard.dry_for_h(story.state, "spot", story.now_s) == pytest.approx(0.75 / 2)


def test_starts_are_timed_from_the_request_on() -> None:
    story = Story(pools=(SPOT,))
    assert hazard.start_s(story.state, "spot") == hazard.START_PRIOR_S
    story.tick(NodeReady(Node("a", "spot")), after_s=60)
    story.tick(NodePrepared("a"), after_s=30)
    assert hazard.start_s(story.state, "spot") == pytest.approx(90)


def test_a_pool_whose_nodes_die_at_start_is_asked_again_at_once_and_then_ever_later() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2), FIXED))
    waits = []
    for k in range(6):
        names = [f"a{k}", f"b{k}"]
        story.tick(*(NodeReady(Node(name, "spot")) for name in names), after_s=30)
        decision = story.tick(*(NodeLost(name, "boot failed") for name in names), after_s=5)
        asked = [order for order in orders(decision, RequestNodes) if order.pool == "spot"]
        assert bool(asked) == (k == 0), (
            "both of a request are one start; the second in a row is one too many"
        )
        if asked:
            continue
        assert (
            f"pool spot: {k + 1} starts in a row" in decision.reason
            and "retried after" in decision.reason
        )
        backoff = story.state.backoff["spot"]
        waits.append(backoff.wait_s)
        assert f"{k + 1} starts in a row" in backoff.reason and "boot failed" in backoff.reason
        decision = story.tick(after_s=backoff.until_s - story.now_s)
        assert "spot" in [order.pool for order in orders(decision, RequestNodes)]
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0]
    story.tick(NodeReady(Node("good", "spot")))
    assert "spot" in story.state.backoff, "a node that has come has not started yet"
    story.tick(NodePrepared("good"))
    assert "spot" not in story.state.backoff and story.state.history["spot"].deaths == 0


def reclaimed_start(story: Story, name: str) -> Decision:
    """A node comes, and has a notice before it is prepared."""
    story.tick(NodeReady(Node(name, "spot")), after_s=60)
    decision = story.tick(Notice(name, story.now_s + 120), after_s=60)
    if orders(decision, ReleaseNode):
        story.tick(NodeLost(name, "released"))
    return decision


@pytest.mark.parametrize("flag", [True, False])
def test_a_pool_that_takes_each_node_before_it_is_prepared_is_asked_ever_later(flag: bool) -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),), min_workers=2)
    story.state = replace(story.state, spends_slack=True, counts_taken=True, bounds_reclaims=flag)
    story.nodes("good")
    waits = []
    for k in range(9):
        decision = reclaimed_start(story, f"n{k}")
        assert bool(orders(decision, RequestNodes)) == (k < hazard.RECLAIMS_BORNE or not flag)
        backoff = story.state.backoff.get("spot")
        if backoff is None:
            continue
        assert (
            f"pool spot: {k + 1} starts in a row were reclaimed before a node was prepared (the "
            f"last one: it had a notice), retried after {backoff.wait_s:.0f} s" in decision.reason
        )
        waits.append(backoff.wait_s)
        (again,) = orders(story.tick(after_s=backoff.until_s - story.now_s), RequestNodes)
        assert again.count == 1
    assert waits == ([30.0, 60.0, 120.0, 240.0, 480.0, 600.0] if flag else [])
    story.tick(NodeReady(Node("well", "spot")))
    story.tick(NodePrepared("well"))
    assert "spot" not in story.state.backoff
    assert story.state.history["spot"].reclaimed_starts == 0


@pytest.mark.parametrize("prepared_first", [True, False])
@pytest.mark.parametrize("known_s", [0.0, 50.0])
def test_a_node_whose_notice_is_withdrawn_has_started(known_s: float, prepared_first: bool) -> None:
    """As if there had been none, of a pool that has started nodes or not."""
    backoff, history = {"spot": Backoff(0.0, 30.0, "taken", 1)}, {"spot": PoolSeen(start_s=known_s)}
    state = replace(
        STATE, spends_slack=True, bounds_reclaims=True, backoff=backoff, history=history
    )
    state = fold(state, NodeReady(Node("a", "spot")), 1.0)
    state = fold(state, Notice("a", 150.0), 30.0)
    found = state.history["spot"]
    assert (found.deaths, found.reclaimed_starts) == ((0, 1) if known_s else (1, 0))
    first, second = NodePrepared("a"), NoticeWithdrawn("a")
    state = fold(state, first if prepared_first else second, 60.0)
    assert state.history["spot"].start_s == known_s and state.backoff
    state = fold(state, second if prepared_first else first, 61.0)
    found = state.history["spot"]
    assert (found.deaths, found.reclaimed_starts) == (0, 0) and found.start_s > known_s
    assert not state.backoff and not state.born and state.nodes["a"].status == "prepared"


def test_a_node_with_a_notice_counts_once_whether_it_is_prepared_or_not() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),))
    story.state = replace(story.state, spends_slack=True, counts_taken=True, bounds_reclaims=True)
    story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("b", "spot")))
    story.tick(Notice("a", story.now_s + 120), after_s=60)
    story.tick(NodePrepared("b"))
    assert story.state.history["spot"].deaths == 0
    story.tick(NodePrepared("a"))
    story.tick(NodeLost("a"))
    seen = story.state.history["spot"]
    assert (seen.deaths, seen.reclaimed_starts) == (0, 0) and not story.state.born


def test_of_a_pool_that_has_started_none_a_notice_is_a_death_like_others() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=1),))
    story.state = replace(story.state, spends_slack=True, counts_taken=True, bounds_reclaims=True)
    for k in range(2):
        reclaimed_start(story, f"n{k}")
        assert story.state.history["spot"].deaths == k + 1
    assert story.state.backoff["spot"].deaths == 2


def starts_in_vain(story: Story, pool: str, n: int) -> None:
    """Nodes of the pool come, one after the other, and their preparation does not get on."""
    for k in range(n):
        story.tick(NodeReady(Node(f"{pool}-{k}", pool)), after_s=hazard.DEATH_BACKOFF_MAX_S)
        story.tick(after_s=PREPARE_MOST_S + 1.0)
        if story.state.phase == "waiting":
            story.tick(NodeLost(f"{pool}-{k}", "released"))


def test_a_run_of_which_no_node_is_ever_prepared_ends() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=1),))
    starts_in_vain(story, "spot", hazard.STARTS_MOST - 1)
    assert story.state.phase == "waiting"
    starts_in_vain(story, "spot", 1)
    assert story.state.phase == "failed"
    assert story.state.outcome_reason == (
        "no node can be prepared: pool spot: 12 starts in a row ended before a node was prepared "
        "(the last one: its "
        "preparation has made no progress for 600 s); step 0 reached, last checkpoint at step 0"
    )


def test_it_goes_on_while_a_pool_may_still_give_nodes_or_one_was_prepared() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=1), FIXED))
    starts_in_vain(story, "spot", hazard.STARTS_MOST + 1)
    assert story.state.phase == "waiting", "nobody knows how those of the other pool start"
    story = Story(pools=(SPOT,), min_workers=2)
    story.nodes("good")
    starts_in_vain(story, "spot", hazard.STARTS_MOST + 1)
    assert (
        story.state.phase == "waiting" and story.state.history["spot"].deaths > hazard.STARTS_MOST
    )


def test_a_new_driver_knows_what_was_seen_and_when_the_run_began() -> None:
    story = Story()
    story.running("a", "b", steps=2)
    before = story.state.history["spot"]
    start = DriverStarted("story", 2, story.start.job, (SPOT,), story.start.model)
    story.tick(start, after_s=3600)
    assert story.state.history["spot"] == before and before.node_s > 0
    assert story.state.first_started_at_s == pytest.approx(0.1)


def test_prices_are_those_seen_last_and_hazard_is_in_them() -> None:
    story = Story(pools=(SPOT, FIXED))
    story.running("a", "b", steps=2)
    usd = story.state.usd
    story.tick(PriceSeen("spot", 2.0), after_s=1800)
    # what was used was cheaper
    assert story.state.usd == pytest.approx(usd + 1.0) and story.state.usd_per_h == 4.0
    pool = story.state.pool("spot")
    assert pool is not None
    reclaimed = replace(
        story.state, history={"spot": PoolSeen(node_s=0.0, reclaims=19, start_s=360.0)}
    )
    assert hazard.usd_per_gpu_h(reclaimed, pool) == pytest.approx(2.0 * (1 + 1.0 * 0.1))
