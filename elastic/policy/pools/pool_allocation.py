"""How many nodes of each pool are wanted now, spot or on demand, and why.

Two ways. `fastest`: all that the pools give. `cheapest`: what is owned and reserved, then spot,
and on-demand nodes only for the floor, while too few others are there for longer than waiting is
worth, or while the deadline needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from elastic.errors import InfeasiblePlan
from elastic.planner.cost.memory import USABLE
from elastic.planner.cost.model_cost import ModelCost
from elastic.policy.plans import choice_of
from elastic.policy.pools import deadline, drain, hard_limits, hazard, slack
from elastic.policy.speed import speeds
from elastic.policy.state.state import Request, State
from elastic.types import Layout, Node, Pool, is_auto, parse_layout
from elastic.types.replacing import follows_from

ORDER = {"owned": 0, "reserved": 1, "spot": 2, "on-demand": 3}
REQUEST_LASTS_S = 900.0  # a request without an answer is withdrawn then
REQUEST_MOST_S = 3600.0  # or then, where those before it were withdrawn too
PATIENCE, PATIENCE_LEAST_S = 2.0, 60.0  # times an ordinary start, where another pool could give
# of the spend, that the floor's default bears; and below which a floor is given up
LOSS_SHARE, LOSS_SHARE_KEPT = 0.01, 0.005
TOGETHER = 0.2  # of the losses, believed to take the holders of the peer replicas with them
UNSCORED = 5
END_NOTICE_S = 600.0  # a reservation's end is a notice from then on


@dataclass(frozen=True)
class PoolDemand:
    """At most so many nodes of a pool, those that are available or joining included. `instead`:
    only where some that are on demand cannot be asked for, by the budget or so late."""

    pool: Pool
    nodes: int
    why: str = ""
    instead: bool = False


@dataclass(frozen=True)
class OnDemandNeed:
    """Workers on demand beyond the floor; `wakes`: when to look again; `note`: why no more of
    them; `urgent`: they are asked for before spot; `alone`: and in place of it. `beside`: workers
    of nodes that still start and are not counted, beside which they are asked for although the job
    can use no more; None = of none, whatever is asked for now."""

    workers: int = 0
    why: str = ""
    wakes: tuple[float, ...] = ()
    note: str = ""
    urgent: bool = False
    alone: bool = False
    beside: int | None = None


def cheapest(state: State) -> bool:
    """Is the run to be as cheap as its limits allow, not as fast as possible?"""
    job = state.job
    if job.purpose == "auto":
        return job.deadline_h is not None or job.on_demand_floor != "auto"
    return job.purpose in ("cheapest", "deadline")


def pool_demands(state: State, now_s: float) -> tuple[list[PoolDemand], OnDemandNeed]:
    """In the order in which pools are asked; and what was found of on-demand nodes."""
    pools = [pool for pool in by_price(state) if not ends_soon(state, pool, now_s)]
    cheap = [pool for pool in pools if pool.market_type != "on-demand"]
    if not cheapest(state) or not cheap:
        return [PoolDemand(pool, pool.max_nodes) for pool in pools], OnDemandNeed()
    fixed = [pool for pool in pools if pool.market_type == "on-demand"]
    floor, why = floor_nodes(state, fixed)
    first = _shared(state, fixed, floor, why=why, now_s=now_s)
    need = fall_back(state, now_s)
    last = _shared(state, fixed, floor + _nodes_for(fixed, need.workers), why=need.why, now_s=now_s)
    covered = sum(one.nodes for one in last) >= floor + _nodes_for(fixed, need.workers)
    alone = need.alone and covered and state.spares_last
    others = [
        PoolDemand(pool, pool.max_nodes, instead=alone and pool.market_type == "spot")
        for pool in _by_worth(state, cheap)
    ]
    return [*first, *(([*last, *others]) if need.urgent else [*others, *last])], need


@follows_from("hardware", "job", "pools", "spends_slack")
def on_demand(state: State) -> Sequence[Pool]:
    """The cheapest first."""
    return [pool for pool in by_price(state) if pool.market_type == "on-demand"]


@follows_from("hardware", "job", "pools", "spends_slack")
def by_price(state: State) -> Sequence[Pool]:
    """By the price of what a GPU computes: eight H100 cost more than eight A100, and less than the
    A100 that do the same work in the same time."""
    rates = _rates(state)

    def worth(pool: Pool) -> tuple[int, float, str]:
        return ORDER[pool.market_type], pool.usd_per_gpu_h / rates[pool.name], pool.name

    return sorted(state.pools, key=worth)


@follows_from("hardware", "job", "pools", "spends_slack")
def _rates(state: State) -> Mapping[str, float]:
    """What a GPU of each pool computes, by the cost model; 1 where the kind of one is not known."""
    rates = speeds.by_hardware(state) if state.spends_slack else {}
    known = all(rates.get(pool.name) for pool in state.pools)
    return {pool.name: rates[pool.name] if known else 1.0 for pool in state.pools}


def _by_worth(state: State, pools: Sequence[Pool]) -> Sequence[Pool]:
    """As `by_price`, with the reclaims that a pool brings; what is owned or reserved is paid for
    anyway."""
    rates = _rates(state)

    def worth(pool: Pool) -> tuple[int, float, str]:
        n, pause_s = len(state.alive), drain.lead_of(state).pause_s
        usd = hazard.usd_per_gpu_h(
            state, pool, max(1, n), pause_s=pause_s, wait_s=_vain_wait_s(state, pool)
        )
        return ORDER[pool.market_type], usd / rates[pool.name], pool.name

    return sorted(pools, key=worth)


def _vain_wait_s(state: State, pool: Pool) -> float:
    """How long a node of a spot pool is waited for in vain on average: the patience x the chance
    that it does not come, for which one tenth of what the placement score lacks of 10 is taken; of
    a pool without a score, beside ones with, UNSCORED."""
    if pool.market_type != "spot" or not state.scores:
        return 0.0
    return patience_s(state, pool.name) * (1 - state.scores.get(pool.name, UNSCORED) / 10)


def _nodes_for(fixed: Sequence[Pool], workers: int) -> int:
    return ceil(workers / max(1, fixed[0].gpus_per_node)) if fixed and workers > 0 else 0


def _shared(
    state: State, fixed: Sequence[Pool], nodes: int, *, why: str, now_s: float
) -> list[PoolDemand]:
    """So many nodes on demand, from the cheapest pool that gives some; one that said no keeps what
    it has."""
    found = []
    for pool in fixed:
        backoff = state.backoff.get(pool.name)
        most = pool.max_nodes
        if backoff is not None and now_s < backoff.until_s:
            most = min(most, _nodes_there(state, pool) + asked(state, pool.name, now_s))
        found.append(PoolDemand(pool, min(nodes, most), why))
        nodes -= min(nodes, most)
    return found


# ------------------------------------------------------------------------------------ what there is


def _nodes_there(state: State, pool: Pool) -> int:
    """Nodes that are or will be of use."""
    return state.there.get(pool.name, (0, 0))[0]


def patience_s(state: State, pool: str) -> float:
    """How long an answer to a request is waited for: longer, each time that one was withdrawn in
    vain."""
    longer = 2.0 ** min(10, hazard.of(state, pool).unanswered)
    if not cheapest(state):
        return min(REQUEST_MOST_S, longer * REQUEST_LASTS_S)
    ordinary_s = min(REQUEST_LASTS_S, max(PATIENCE_LEAST_S, PATIENCE * hazard.start_s(state, pool)))
    return min(REQUEST_MOST_S, longer * ordinary_s)


def withdrawn_at_s(state: State, request: Request) -> float:
    """While machines of its pool start, which are paid for, what buys them says when they are not
    waited for any more."""
    seen = state.instances.get(request.pool)
    if state.waits_for_started and seen is not None and seen.starting:
        return request.at_s + REQUEST_MOST_S
    return request.at_s + patience_s(state, request.pool)


def unanswered(state: State, request: Request, now_s: float) -> bool:
    return now_s >= withdrawn_at_s(state, request)


def asked(state: State, pool: str, now_s: float) -> int:
    """Nodes of the pool that may still come."""
    return sum(
        r.count
        for r in state.requests.values()
        if r.pool == pool and not unanswered(state, r, now_s)
    )


def ends_soon(state: State, pool: Pool, now_s: float) -> bool:
    """Is it too late to ask for a node of a reservation?"""
    if pool.ends_at_s is None:
        return False
    return (
        now_s + notice_of_end_s(state, pool) + 2 * hazard.start_s(state, pool.name)
        >= pool.ends_at_s
    )


def notice_of_end_s(state: State, pool: Pool) -> float:
    """How long before a reservation's end its nodes are looked upon as ones with a notice: others
    can be there by then."""
    others = [hazard.start_s(state, other.name) for other in state.pools if other.name != pool.name]
    return max(END_NOTICE_S, 2 * max(others, default=0.0), 3 * drain.lead_of(state).seconds)


@follows_from("job", "pools", "model")
def least_workers(state: State) -> int:
    """With fewer the job cannot run: min_workers, the smallest layout that it names, and memory for
    its state."""
    job = state.job
    wanted = job.layout
    if not isinstance(wanted, str):
        layouts = [parse_layout(text) for text in wanted.values()]
    else:
        layouts = [Layout(**job.pins) if is_auto(wanted) else parse_layout(wanted)]
    least = max(job.min_workers, min(layout.world_size for layout in layouts))
    memory = max((pool.memory_bytes_per_gpu for pool in state.pools), default=0)
    if state.model is None or not memory or job.offload:
        return least
    return max(least, ceil(ModelCost.of(state.model).state_bytes / (USABLE * memory)))


# ---------------------------------------------------------------------------------------- the floor


@follows_from()
def floor_nodes(state: State, fixed: Sequence[Pool]) -> tuple[int, str]:
    """Nodes on demand that are kept whatever spot does, and why."""
    wanted = state.job.on_demand_floor
    if not fixed:
        return 0, ""
    if not isinstance(wanted, str):
        return wanted, f"on_demand_floor is {wanted}"
    n = _copy_nodes(state, fixed[0])
    price = (
        f"{n} on-demand node{'s' * (n > 1)} for one whole copy of the state, "
        f"${n * fixed[0].usd_per_node_h:.2f}/h"
    )
    if wanted == "copy":
        return n, price
    share = expected_loss_share(state)
    have = any(_nodes_there(state, pool) for pool in fixed)
    if share <= (LOSS_SHARE_KEPT if have else LOSS_SHARE):
        return 0, ""
    saved, more = share * state.usd_per_h, _more_usd_per_h(state, fixed[0], n)
    if saved < (0.5 * more if have else more):
        return 0, ""  # the nodes would cost more than what is done again
    return n, (
        f"{price}: with checkpoints alone more than {LOSS_SHARE:.0%} of the spend would be done "
        "again"
    )


def _more_usd_per_h(state: State, fixed: Pool, n: int) -> float:
    """What so many nodes on demand cost more than spot nodes that do their work."""
    spot = [pool.usd_per_gpu_h for pool in state.pools if pool.market_type == "spot"]
    return n * fixed.gpus_per_node * max(0.0, fixed.usd_per_gpu_h - min(spot, default=0.0))


def _copy_nodes(state: State, pool: Pool) -> int:
    """As many nodes of the pool as hold the parameters and what the optimizer keeps, once."""
    room = pool.memory_bytes_per_gpu * pool.gpus_per_node * USABLE
    if state.model is None or not room:
        return 1
    return max(1, ceil(ModelCost.of(state.model).state_bytes / room))


def expected_loss_share(state: State) -> float:
    """Of the spend, what is expected to be done again because nodes are lost with every copy of
    their state in memory: losses per hour of the plan's spot nodes x half the time between
    checkpoints; where peer replicas are kept, the share TOGETHER of that."""
    plan, step_s = state.plan, state.step_time_s
    if plan is None or not step_s:
        return 0.0
    spot = [pool.name for pool in state.pools if pool.market_type == "spot"]
    nodes = {name: n for name in spot if (n := state.plan_by_pool.get(name))}
    kept = TOGETHER if plan.copies_to and plan.peer_every else 1.0
    return (
        kept
        * hazard.losses_by_pool_per_h(state, nodes)
        * (plan.durable_every or state.steps)
        * step_s
        / 2
        / 3600
    )


# ------------------------------------------------------------------------------------- falling back


@follows_from()
def fall_back(state: State, now_s: float) -> OnDemandNeed:
    """Workers on demand beyond the floor that are wanted now: the most that the minimum or the
    deadline asks for."""
    fixed = on_demand(state)
    if not fixed:
        return OnDemandNeed()
    by_minimum, by_deadline = _for_minimum(state, fixed, now_s), _for_deadline(state, fixed, now_s)
    wakes = (*by_minimum.wakes, *by_deadline.wakes)
    most = max(by_deadline, by_minimum, key=lambda need: need.workers)
    return replace(most, wakes=wakes, note=by_minimum.note)


def on_demand_workers(state: State, fixed: Sequence[Pool], now_s: float | None = None) -> int:
    """There, and coming where `now_s` is given."""
    return _workers_of(state, fixed, now_s)


def _workers_of(state: State, pools: Sequence[Pool], now_s: float | None) -> int:
    gpus = {pool.name: pool.gpus_per_node for pool in pools}
    n = sum(state.there.get(name, (0, 0))[1] for name in gpus)
    return (
        n
        if now_s is None
        else n + sum(asked(state, name, now_s) * each for name, each in gpus.items())
    )


def floor_workers(state: State, fixed: Sequence[Pool]) -> int:
    return floor_nodes(state, fixed)[0] * fixed[0].gpus_per_node if fixed else 0


@follows_from()
def stand_in_workers(state: State, now_s: float) -> int:
    """On demand beyond the floor: what spot may come for although the job can use no more."""
    fixed = on_demand(state)
    if not fixed or not cheapest(state):
        return 0
    n = max(0, on_demand_workers(state, fixed, now_s) - floor_workers(state, fixed))
    return n if not n or not state.spends_slack or _worth_a_stand_in(state, fixed, now_s) else 0


def _worth_a_stand_in(state: State, fixed: Sequence[Pool], now_s: float) -> bool:
    """Is there slack for another reclaim, and does what spot saves until then pay for its start?"""
    found = slack_of(state, fixed, now_s)
    if found is not None and found.last_call:
        return False
    for pool in state.pools:
        if pool.market_type == "spot":
            start_usd = hazard.start_s(state, pool.name) / 3600 * pool.usd_per_gpu_h
            worth = slack.stand_in(state, fixed[:1], [pool], workers=steady_workers(state, fixed))
            if worth.usd > start_usd * fixed[0].gpus_per_node:
                return True
    return False


@follows_from()
def slack_of(state: State, fixed: Sequence[Pool], now_s: float) -> slack.Slack | None:
    """None = no deadline, nothing on demand, or no step yet."""
    if not fixed:
        return None
    step = slack.step_at(state, deadline.safe_step(state), now_s)
    return slack.of(state, fixed[0], steady_workers(state, fixed), step=step, now_s=now_s)


def cheap_workers(state: State, now_s: float | None = None) -> int:
    """Workers not on demand that are there, and asked for where `now_s` is given."""
    return _workers_of(
        state, [pool for pool in state.pools if pool.market_type != "on-demand"], now_s
    )


def _for_minimum(state: State, fixed: Sequence[Pool], now_s: float) -> OnDemandNeed:
    """Too few nodes to run at all: on demand, when waiting on costs more."""
    floor = floor_workers(state, fixed)
    have = max(0, on_demand_workers(state, fixed, now_s) - floor)
    missing = _missing(state, fixed, cheap_workers(state) + floor)
    if missing <= 0:
        return OnDemandNeed()
    kept = OnDemandNeed(min(missing, have), "too few spot nodes are there to run without")
    ask_s = [withdrawn_at_s(state, request) for request in state.requests.values()]
    wakes = tuple(at_s for at_s in ask_s if at_s > now_s)
    if missing <= cheap_workers(state, now_s) - cheap_workers(state) or _can_be_asked(state, now_s):
        return OnDemandNeed(kept.workers, kept.why, wakes)  # they may come yet
    worth = deadline.waiting(state, fixed[0], missing, now_s=now_s)
    if worth.falls_back:
        return OnDemandNeed(missing, worth.why)
    if worth.look_s is not None:
        wakes = (*wakes, worth.look_s)
    return OnDemandNeed(kept.workers, kept.why, wakes, worth.why)


def _can_be_asked(state: State, now_s: float) -> bool:
    """Is there a pool other than on demand that has not said no lately, and has nodes that it was
    not asked for?"""
    silent = {r.pool for r in state.requests.values() if unanswered(state, r, now_s)}
    for pool in state.pools:
        backoff = state.backoff.get(pool.name)
        if (
            pool.market_type == "on-demand"
            or pool.name in silent
            or (backoff and now_s < backoff.until_s)
        ):
            continue
        have = _nodes_there(state, pool) + asked(state, pool.name, now_s)
        if have < pool.max_nodes and not ends_soon(state, pool, now_s):
            return True
    return False


def _missing(state: State, fixed: Sequence[Pool], workers: int) -> int:
    """Workers without which no plan is possible; the search is asked where memory needs more than
    the least."""
    missing = least_workers(state) - workers
    if missing > 0 or state.phase != "waiting" or state.preparing or state.by_status.get("ready"):
        return missing
    nodes = list(drain.usable(state, state.billed_at_s))
    gpus = fixed[0].gpus_per_node
    for k in range(fixed[0].max_nodes + 1):
        try:
            choice_of(state, nodes)
        except InfeasiblePlan:
            nodes.append(Node(f"?{k}", fixed[0].name, gpus))
            continue
        return k * gpus
    return 0


def _for_deadline(state: State, fixed: Sequence[Pool], now_s: float) -> OnDemandNeed:
    """Progress is below what the deadline needs."""
    spare = slack_of(state, fixed, now_s) if state.spends_slack else None
    if spare is not None:
        return _by_slack(state, fixed, spare, now_s=now_s)
    floor = floor_workers(state, fixed)
    found = deadline.needed(state, fixed[0], steady_workers(state, fixed), now_s=now_s)
    if found is None:
        return OnDemandNeed()
    # asked for again of a pool that said no: nodes on demand do not go for that
    hoped = sum(
        asked(state, pool.name, now_s) * pool.gpus_per_node
        for pool in state.pools
        if pool.market_type != "on-demand" and hazard.of(state, pool.name).dry_since_s is not None
    )
    steady = [p.name for p in state.pools if p.market_type in ("owned", "reserved")]
    owned = sum(state.there.get(name, (0, 0))[1] for name in steady)
    workers = max(found.workers, least_workers(state))
    if found.last_call:
        return OnDemandNeed(max(0, workers - owned - floor), found.why)
    missing = max(0, workers - (cheap_workers(state, now_s) - hoped) - floor)
    if found.behind:
        return OnDemandNeed(missing, found.why)
    have = max(0, on_demand_workers(state, fixed, now_s) - floor)
    kept = 0 if found.ahead else min(have, missing)
    return OnDemandNeed(
        kept, "the lead on the deadline is still small" if kept else "", found.wakes
    )


def _by_slack(
    state: State, fixed: Sequence[Pool], spare: slack.Slack, *, now_s: float
) -> OnDemandNeed:
    """All that works is counted, and what still starts is not: nodes on demand stay until spot
    nodes are prepared. With less slack than another start takes, spot is counted no more."""
    least, floor = (
        max(steady_workers(state, fixed), least_workers(state)),
        floor_workers(state, fixed),
    )
    kinds = {pool.name: pool.market_type for pool in state.pools}
    ready = [node for node in state.available if kinds.get(node.pool) != "on-demand"]
    works = sum(node.gpus for node in ready)
    at_risk = sum(node.gpus for node in ready if kinds.get(node.pool) == "spot")
    counted_s = spare.spare_s - spare.start_s * at_risk / least  # so long, if nothing runs
    if counted_s < 0:
        works -= at_risk
    missing = max(0, least - works - floor - _left_behind(state))
    turns_s = [turn_s for turn_s in (spare.lasts_s, counted_s) if turn_s >= 0]
    look_s = max(deadline.LOOK_LEAST_S, min(turns_s, default=slack.LOOK_S))
    wakes = (now_s + look_s,)
    if spare.behind:
        starting = cheap_workers(state, now_s) - sum(node.gpus for node in ready)
        beside = max(0, starting) if state.asks_beside else None
        alone = spare.last_call and spare.spare_s >= 0
        return OnDemandNeed(
            missing, str(spare), wakes, urgent=spare.last_call, alone=alone, beside=beside
        )
    have = max(0, on_demand_workers(state, fixed, now_s) - floor)
    kept = 0 if spare.ahead else min(have, missing)
    return OnDemandNeed(kept, f"{spare}: still kept" if kept else "", wakes)


def _left_behind(state: State) -> int:
    """Workers of nodes that were to be left, and that train on since those that stood in are
    gone."""
    plan = state.plan
    nodes = [state.nodes[name] for name in state.given_up if name in state.nodes]
    if plan is None or state.phase != "running":
        return 0
    return sum(n.gpus for n in nodes if n.status == "draining" and n.node_id in plan.nodes)


@follows_from("pools", "job", "first_started_at_s", "heeds_ends")
def steady_workers(state: State, fixed: Sequence[Pool]) -> int:
    """The most workers that depend neither on spot nor on what ends before the deadline."""
    until_s = (hard_limits.deadline_s(state) or 0.0) if state.heeds_ends else 0.0
    lasting = (p for p in state.pools if p.ends_at_s is None or p.ends_at_s >= until_s)
    steady = [pool for pool in lasting if pool.market_type in ("owned", "reserved")]
    nodes = sorted(
        [p.gpus_per_node for p in (*fixed, *steady) for _ in range(p.max_nodes)], reverse=True
    )
    n = sum(nodes[: state.job.max_nodes])
    return min(n, state.job.max_workers or n)
