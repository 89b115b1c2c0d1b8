"""Runs of the real policy on markets: what the backend gives and takes, and that batches of steps
change nothing but the time it takes."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from elastic.errors import SpecError
from elastic.policy.decide import decide
from elastic.policy.state.fold import State
from elastic.sim.markets import market_backend, market_run
from elastic.sim.markets.calibration import calibrated
from elastic.sim.markets.market_backend import MarketBackend, PoolMarket
from elastic.sim.markets.market_run import COLLECTED_AFTER, RunResult, RunSubject, run_on
from elastic.sim.markets.study import (
    KNOWN,
    USUAL,
    PolicyTrial,
    StartResult,
    Study,
    carried_out,
    checked,
    from_start,
    policy_of,
    spread,
    summary,
    world_of,
)
from elastic.sim.markets.traces import Trace
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Delays
from elastic.types import (
    Decision,
    DrainNode,
    Job,
    ModelProfile,
    NodeLost,
    NodeReady,
    Notice,
    OptimizerSpec,
    Plan,
    Pool,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Stop,
    TensorSpec,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=2,
)
DELAYS = Delays(boot_s=60.0, prepare_s=30.0, enter_s=2.0)
HOUR = 3600.0


class Even:
    """Seconds of a step: `step_s` on all workers, in proportion on fewer."""

    def __init__(self, step_s: float, workers: int) -> None:
        self.step_s, self.workers = step_s, workers

    def __call__(self, plan: Plan) -> float:
        return self.step_s * self.workers / len(plan.ranks)


def subject(nodes: int = 4, hours: float = 4.0, batch_s: float = 60.0, **keys: Any) -> RunSubject:
    step_s = 10.0
    job = Job.from_plain(
        {
            "name": "j", "steps": int(hours * HOUR / step_s), "global_batch": 240,
            "layout": "auto", "min_workers": 1, "max_workers": nodes, "durable_every": 30,
        } | keys
    )  # fmt: skip
    pools = (
        Pool("spot", "CPU", 1, "spot", 1.0, 0, nodes, notice_s=120.0),
        Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, nodes),
    )
    return RunSubject(
        "j", job, pools, MODEL, Even(step_s, nodes), hours * HOUR, DELAYS, batch_s=batch_s
    )


def day(*levels: int) -> Trace:
    """An hour of each level, again and again."""
    at_s = tuple(k * HOUR for k in range(len(levels)))
    return Trace("t", at_s, levels, len(levels) * HOUR)


def events(result: RunResult, kind: type) -> list[tuple[float, Any]]:
    return [
        (at_s, event)
        for line in result.lines
        for at_s, event in line.events
        if isinstance(event, kind)
    ]


def test_nodes_come_and_go_as_the_trace_says() -> None:
    result = run_on(
        subject(purpose="cheapest", on_demand_floor=0),
        {"spot": PoolMarket(day(4, 2, 4))},
        keep=True,
    )
    assert result.done and result.violations == ()
    notices = events(result, Notice)
    assert [round(at_s) for at_s, _ in notices[:2]] == [3480, 3480]
    lost = [at_s for at_s, event in events(result, NodeLost) if at_s < 2 * HOUR]
    assert len(lost) == 2 and all(HOUR - 120 <= at_s <= HOUR + 10 for at_s in lost)
    there = [at_s for at_s, _ in events(result, NodeReady)]
    assert len([at_s for at_s in there if 2 * HOUR <= at_s < 2.5 * HOUR]) == 2
    assert any(HOUR < at_s < 2 * HOUR for at_s, _ in events(result, RequestFailed))
    again = replay(result.lines)
    assert again.identical, again.first_difference


def test_nodes_that_get_no_notice_are_lost_all_the_same() -> None:
    market = PoolMarket(day(4, 2, 4), unannounced=1.0)
    result = run_on(subject(purpose="cheapest", on_demand_floor=0), {"spot": market}, keep=True)
    assert result.done and events(result, Notice) == [] and result.causes.get("loss", 0) >= 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("unannounced", [1.0, 0.0])
def test_batches_of_steps_cost_and_take_what_single_steps_do(unannounced: float) -> None:
    """Dollars and hours within 1 %, the same generations."""
    market = {"spot": PoolMarket(day(4, 3, 1, 4), unannounced=unannounced)}
    one = run_on(subject(batch_s=0.0, purpose="cheapest", on_demand_floor=0), market, keep=True)
    many = run_on(subject(batch_s=300.0, purpose="cheapest", on_demand_floor=0), market, keep=True)
    assert one.done and many.done
    assert many.usd == pytest.approx(one.usd, rel=0.01)
    assert many.wall_s == pytest.approx(one.wall_s, rel=0.01)
    assert many.causes == one.causes
    assert len(many.lines) < 0.5 * len(one.lines)


def test_the_collector_is_as_it_was_behind_a_run() -> None:
    before, seen = gc.get_threshold(), set[int]()

    def decide_and_look(state: State, now_s: float) -> Decision:
        seen.add(gc.get_threshold()[0])
        return decide(state, now_s)

    run_on(subject(hours=0.5), {"spot": PoolMarket(day(4))}, decide=decide_and_look)
    assert seen == {COLLECTED_AFTER} and gc.get_threshold() == before


def test_a_price_that_changes_is_paid() -> None:
    trace = replace(day(1, 1), at_s=(0.0, HOUR), nodes=(1, 1), usd_per_node_h=(1.0, 5.0))
    result = run_on(
        subject(nodes=1, hours=1.5, purpose="cheapest", on_demand_floor=0),
        {"spot": PoolMarket(trace)},
    )
    assert result.done
    # its boot is paid too: an hour at $1, the rest at $5
    rest_h = (result.wall_s - HOUR) / HOUR
    assert result.usd == pytest.approx(1 + 5 * rest_h, rel=0.01)


def test_machines_that_are_seen_to_start_are_waited_for() -> None:
    """Twenty minutes to boot, where a run that wants to be cheap waits for six if it sees none."""
    slow = replace(
        subject(nodes=1, hours=0.5, purpose="cheapest", on_demand_floor=0),
        delays=replace(DELAYS, boot_s=1200.0),
    )
    result = run_on(slow, {"spot": PoolMarket(day(1))}, keep=True)
    assert result.done
    orders = [action for line in result.lines if line.decision for action in line.decision.actions]
    assert [order.count for order in orders if isinstance(order, RequestNodes)] == [1]


def test_a_deadline_is_met_where_on_demand_nodes_can_meet_it() -> None:
    late = subject(hours=4.0, purpose="deadline").with_deadline(6.0)
    result = run_on(late, {"spot": PoolMarket(day(0, 0, 0, 2, 1, 0))})
    assert result.done and result.wall_s <= 6 * HOUR, result.reason


def test_a_run_that_never_gets_a_node_is_given_up() -> None:
    hopeless = subject(nodes=1, hours=0.1)
    only_spot = replace(hopeless, pools=hopeless.pools[:1])
    result = run_on(only_spot, {"spot": PoolMarket(Trace("t", (0.0, 1.0), (1, 0), 1e9))})
    assert not result.done and "given up after 4.0 h" in result.reason


def study(policies: tuple[str, ...] = ("elastic", "greedy", "bound"), n: int = 3) -> Study:
    late = subject(hours=2.0, purpose="deadline").with_deadline(4.0)
    return Study(late, {"spot": day(4, 2, 0, 4, 3)}, policies, n)


def test_a_study_is_the_same_for_any_number_of_processes() -> None:
    alone, several = (carried_out(study(("greedy", "bound"), n=2), processes=k) for k in (1, 2))
    assert alone == several


def test_what_a_study_says() -> None:
    told: list[int] = []
    found = summary(carried_out(study(), processes=1, progress=told.append))
    assert told == [1, 2, 3] and list(found) == ["elastic", "greedy", "bound"]
    assert found["elastic"].deadline_misses == 0
    against = found["elastic"].cost_vs_bound
    assert against is not None and against.p5 >= 1.0
    plain = found["elastic"].plain()
    assert set(plain["cost_usd"]) == {"median", "p5", "p95"}
    assert plain["deadline_misses"] == 0 and 0 < plain["goodput"]["median"] <= 1


def test_each_part_can_be_left_out() -> None:
    names = tuple(name for name in KNOWN if name not in USUAL and name != "no-on-demand")
    found = summary(carried_out(study(("elastic", *names), n=1), processes=1))
    assert set(found) == {"elastic", *names}


def test_policies_are_known_by_name() -> None:
    assert checked(("greedy", "bound")) == ("elastic", "greedy", "bound")
    with pytest.raises(SpecError, match=r"no policy 'gready'; there are elastic, "):
        checked(("gready",))
    assert policy_of("elastic.policy.decide:decide").__name__ == "decide"
    for path in ("nowhere:at_all", "elastic.policy.decide:nothing", "elastic.policy.decide:"):
        with pytest.raises(SpecError, match="--policy"):
            policy_of(path)


def test_pools_without_a_price_are_refused() -> None:
    free = study()
    pools = tuple(replace(pool, usd_per_node_h=0.0) for pool in free.subject.pools)
    with pytest.raises(SpecError, match="pool spot has no price"):
        world_of(replace(free, subject=replace(free.subject, pools=pools)), 0.0)


def of_gpus(*pools: Pool) -> Study:
    """The study with these pools."""
    made = study(("elastic", "on-demand", "greedy", "skynomad", "bound"), n=1)
    return replace(made, subject=replace(made.subject, pools=pools))


def test_on_demand_costs_what_as_many_of_the_same_gpus_do() -> None:
    spot = Pool("spot", "A100-80GB", 8, "spot", 10.0, 0, 4)
    single = Pool("fixed", "A100-80GB", 1, "on-demand", 3.0, 0, 4)
    assert world_of(of_gpus(spot, single), 0.0).on_demand_usd_per_h == 24.0
    other = replace(single, accelerator_type="T4", usd_per_node_h=0.5)
    assert world_of(of_gpus(spot, other), 0.0).on_demand_usd_per_h == inf
    in_catalog = replace(spot, instance_type="p4de.24xlarge", region="us-east-1")
    assert 20 < world_of(of_gpus(in_catalog, other), 0.0).on_demand_usd_per_h < 50


def test_dollars_that_nobody_knows_are_none() -> None:
    """The bound has spot alone; so has greedy, which ends on demand where the deadline asks it."""
    spot = study().subject.pools[0]
    found = summary(carried_out(of_gpus(spot), processes=1))
    own, fixed = found["elastic"], found["on-demand"]
    assert own.cost_usd is not None and own.cost_vs_on_demand is None
    assert fixed.cost_usd is None and fixed.cost_vs_bound is None and fixed.deadline_misses == 0
    assert found["skynomad"].cost_usd is None, "its rule weighs that price"
    assert own.cost_vs_bound is not None and own.cost_vs_bound.median >= 1
    sold = replace(spot, instance_type="m5.2xlarge", region="us-east-1", usd_per_node_h=0.1)
    saved = summary(carried_out(of_gpus(sold), processes=1))["elastic"].cost_vs_on_demand
    assert saved is not None and saved.p95 < 0.5


def test_no_number_is_none_in_plain_data() -> None:
    """As that of a bound which is not computed."""
    trials = {
        "bound": PolicyTrial(nan, 60.0, False, 1.0),
        "greedy": PolicyTrial(1.0, 60.0, True, 1.0),
    }
    found = summary([StartResult(0.0, inf, trials)])
    assert found["bound"].cost_usd is None and found["greedy"].cost_vs_bound is None
    json.dumps({name: one.plain() for name, one in found.items()}, allow_nan=False)


def test_without_a_deadline_other_policies_see_each_change_too() -> None:
    """Twenty minutes with all nodes, twenty without: a start in each of them."""
    trace = Trace("t", (0.0, 1200.0), (4, 0), 2400.0)
    asked = Study(subject(hours=48.0), {"spot": trace}, ("greedy",), 1)
    found = from_start(asked, 0).trials["greedy"]
    assert found.done and found.transitions == pytest.approx(found.wall_s / 2400, abs=1)
    late = replace(asked, subject=asked.subject.with_deadline(400.0))
    assert from_start(late, 0).trials["greedy"].transitions == found.transitions


def test_goodput_is_of_what_is_productive() -> None:
    whole, half = (
        from_start(replace(study(n=1), subject=replace(study().subject, productive=share)), 0)
        for share in (1.0, 0.5)
    )
    for name in ("elastic", "greedy"):
        assert half.trials[name].goodput == pytest.approx(whole.trials[name].goodput / 2)


POLICIES = ("elastic", "on-demand", "greedy", "uniform-progress", "skynomad", "bound")


def dollars(one: Study) -> dict[str, list[float]]:
    found = carried_out(one, processes=1)
    return {name: [each.trials[name].usd for each in found] for name in one.policies}


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("own_usd", [3.0, 0.0])
def test_a_price_of_the_trace_stands_for_the_pools(own_usd: float, on_demand: bool) -> None:
    """For every policy and the bound, whatever the pool says of itself, or where it says none."""
    alone = study(POLICIES, n=2)
    if not on_demand:
        pools = alone.subject.pools[:1]
        alone = replace(alone, subject=replace(alone.subject, pools=pools))
    (trace,) = alone.traces.values()
    priced = replace(trace, usd_per_node_h=(1.0,) * len(trace.nodes))
    pools = tuple(
        replace(pool, usd_per_node_h=own_usd) if pool.name == "spot" else pool
        for pool in alone.subject.pools
    )
    other = replace(alone, traces={"spot": priced}, subject=replace(alone.subject, pools=pools))
    assert dollars(other) == dollars(alone)


@pytest.mark.slow
def test_where_the_price_changes_the_bound_stays_one() -> None:
    """Hours at three prices; also of two pools, of which one alone cannot hold the group."""
    trace = replace(day(4, 2, 0, 4, 3), usd_per_node_h=(0.5, 2.0, 1.0, 4.0, 0.1))
    one = replace(study(POLICIES, n=4), traces={"spot": trace})
    spot, fixed = one.subject.pools
    two = replace(spot, name="other", usd_per_node_h=0.0)
    both = replace(
        one, traces={"spot": trace, "other": replace(trace, nodes=(3, 4, 4, 1, 2))},
        subject=replace(
            one.subject, pools=(spot, two, fixed), job=replace(one.subject.job, max_nodes=4)
        ),
    )  # fmt: skip
    halves = tuple(replace(pool, max_nodes=2) for pool in (spot, two))
    split = replace(both, subject=replace(both.subject, pools=(*halves, fixed)))
    for asked in (one, both, split):
        paid = dollars(asked)
        for name in POLICIES:
            assert all(a >= b > 0 for a, b in zip(paid[name], paid["bound"], strict=True)), name
    assert len(set(dollars(one)["greedy"])) > 1


def test_a_spread_is_between_the_values() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found.median, found.p5, found.p95) == (3.0, pytest.approx(1.2), pytest.approx(4.8))


def test_a_run_says_how_long_things_take() -> None:
    """What a simulated run is calibrated to is what it was made of."""
    result = run_on(
        subject(batch_s=0.0, purpose="cheapest", on_demand_floor=0),
        {"spot": PoolMarket(day(4, 2, 4))},
        keep=True,
    )
    found = calibrated(result.lines)
    assert found.delays.boot_s == pytest.approx(DELAYS.boot_s, abs=2.0)
    assert found.delays.prepare_s == pytest.approx(DELAYS.prepare_s, abs=0.5)
    assert found.delays.store_s == DELAYS.store_s or "store_s" in found.seen
    assert found.step_s[0, "dp_shard=4"] == pytest.approx(10.0)
    with pytest.raises(SpecError, match="measures nothing"):
        calibrated(result.lines[:3])


def test_nodes_on_demand_do_not_go_for_spot_that_a_dry_pool_is_asked_for() -> None:
    """A pool that gives nothing is asked again every ten minutes; nodes that start meanwhile, since
    the deadline needs them, are taken in."""
    late = subject(hours=4.0, purpose="deadline").with_deadline(8.0)
    late = replace(late, delays=replace(DELAYS, boot_s=180.0, prepare_s=540.0))
    result = run_on(late, {"spot": PoolMarket(Trace("t", (0.0, 1e9), (0, 4), 2e9))}, keep=True)
    assert result.done
    lost = [event.node_id for _, event in events(result, NodeLost)]
    assert lost == [] and result.goodput > 0.9


def test_what_is_over_is_forgotten_but_for_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes and generations that are over: the bill and all else are what they were."""
    market = PoolMarket(day(4, 2, 3, 0, 4), unannounced=0.5)
    asked = subject(hours=8.0, purpose="cheapest", on_demand_floor=0)
    made: list[market_backend.MarketBackend] = []

    class Seen(market_backend.MarketBackend):
        def __init__(self, *parts: Any, **keys: Any) -> None:
            super().__init__(*parts, **keys)
            made.append(self)

    monkeypatch.setattr(market_run, "MarketBackend", Seen)
    whole = run_on(asked, {"spot": market})
    monkeypatch.setattr(market_backend, "KEPT_GONE", 1)
    monkeypatch.setattr(market_backend, "KEPT_GROUPS", 1)
    small = run_on(asked, {"spot": market})
    assert replace(small, usd=0.0, goodput=0.0) == replace(whole, usd=0.0, goodput=0.0)
    assert small.usd == pytest.approx(whole.usd) and small.goodput == pytest.approx(whole.goodput)
    before, now = made
    assert len(now._machines) < len(before._machines) and len(now._groups) < len(before._groups)


def test_a_large_request_comes_in_waves() -> None:
    pool = Pool("spot", "CPU", 1, "spot", 1.0, 0, 100)
    backend = MarketBackend((pool,), Job(), {}, delays=DELAYS, until_s=HOUR)
    backend.execute(RequestNodes("spot", 100, "spot-1"))
    came: list[float] = []
    while len(came) < 100:
        came += [backend.now_s() for event in backend.poll(HOUR) if isinstance(event, NodeReady)]
    assert len(set(came)) == 25 and came[0] == 60.0 and came[-1] == 72.0


# ---------------------------------------------------------------------------------- left, and not


def back_and_forth(*later: tuple[float, int]) -> RunResult:
    """One node each: spot for an hour, none until the slack is spent, and spot again."""
    levels = ((0.0, 1), (HOUR, 0), (2.5 * HOUR, 1), *later)
    trace = Trace("t", *zip(*levels, strict=True), 12 * HOUR)
    made = subject(1, layout="dp_shard=1", purpose="deadline", on_demand_floor=0)
    pools = (replace(made.pools[0], notice_s=0.0), made.pools[1])
    late = replace(made, pools=pools, job=replace(made.job, durable_every=10)).with_deadline(5.5)
    return run_on(late, {"spot": PoolMarket(trace)}, keep=True)


def test_an_on_demand_node_that_trains_on_counts_as_others_do() -> None:
    """What was to stand in for it is taken while the plan on it begins; the next one stands in."""
    calm = back_and_forth()
    orders = [line for line in calm.lines if line.decision is not None]
    left_s = [
        line.at_s
        for line in orders
        if any(isinstance(action, DrainNode) for action in line.decision.actions)
    ]
    assert calm.done and len(left_s) == 1
    taken = back_and_forth((left_s[0] + 1.0, 0), (left_s[0] + 600.0, 1))
    assert taken.done and taken.causes == calm.causes | {"loss": 2, "release": 2}
    assert taken.usd < calm.usd + 0.2 * 3.0 + 0.1
    assert len({event.node.node_id for _, event in events(taken, NodeReady)}) == 4
    again = replay(taken.lines)
    assert again.identical, again.first_difference


def test_a_pool_gives_no_node_for_one_that_is_still_paid() -> None:
    """What a request gets is what is billed."""
    pool = Pool("spot", "CPU", 1, "spot", 1.0, 0, 1)
    market = {"spot": PoolMarket(day(1))}
    backend = MarketBackend((pool,), Job(), market, delays=DELAYS, until_s=HOUR)
    told: list[Any] = []

    def until(at_s: float) -> None:
        while backend.now_s() < at_s:
            told.extend(backend.poll(at_s))

    backend.execute(RequestNodes("spot", 1, "spot-1"))
    until(100.0)
    (node,) = (event.node for event in told if isinstance(event, NodeReady))
    backend.execute(ReleaseNode(node.node_id))
    backend.execute(RequestNodes("spot", 1, "spot-2"))
    until(HOUR)
    assert [event.request_id for event in told if isinstance(event, RequestFailed)] == ["spot-2"]
    backend.execute(Stop("stopped", "enough"))
    assert backend.usd() == pytest.approx((100.0 + DELAYS.release_s) / HOUR)
