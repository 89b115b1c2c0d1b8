"""What the run has seen of each pool: how often its nodes are taken, how long it gives nothing, how
long a start takes.

Rates have a Gamma prior, so that the first hours are not believed too much: with `a` events in `b`
hours believed beforehand, and n seen in t, the posterior mean is (a + n) / (b + t) (Gelman et al.,
Bayesian Data Analysis, section 2.6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import inf

from elastic.policy.state.layered import less
from elastic.policy.state.state import Backoff, PoolSeen, State
from elastic.types import Node, Pool, RequestFailed
from elastic.types.replacing import replace

# prior: one per 20 and 500 h
RECLAIMS_PER_NODE_H = {"spot": 0.05, "on-demand": 0.002, "reserved": 0.002, "owned": 0.002}
PRIOR_NODE_H = 20.0  # weight of the prior against what the run sees
# of a reclaim, that a warned node counts as until it is taken; nobody publishes how many of them
# are
WARNED_SHARE = 0.2
# how long a pool that said no is believed to continue with that, before any drought has ended
DROUGHT_PRIOR_H = 0.25
START_PRIOR_S = 180.0  # from the request to a node that is prepared, before the pool has given one
BACKOFF_S, BACKOFF_MAX_S = 30.0, 600.0  # of a pool that has no capacity
BACKOFF_SPOT_S = 120.0  # at most, of a spot pool: what comes back is not missed for long
MOMENT_S = 60.0  # nodes that are taken within it are taken at once
DEATHS_BORNE = 1  # at start, in a row, before the pool is left alone
RECLAIMS_BORNE = 3  # likewise, where each was reclaimed, of a spot pool that had started nodes
DEATH_BACKOFF_S, DEATH_BACKOFF_MAX_S = 30.0, 3600.0
# in a row that end before a node is prepared, of every pool: more than four hours with the waits
# between
STARTS_MOST = 12
NOTHING_SEEN = PoolSeen()


def of(state: State, pool: str) -> PoolSeen:
    return state.history.get(pool, NOTHING_SEEN)


def _rate_per_node_h(state: State, pool: str, n_seen: float) -> float:
    known = state.pool(pool)
    market = known.market_type if known is not None else "owned"
    prior = RECLAIMS_PER_NODE_H[market] * PRIOR_NODE_H
    return (prior + n_seen) / (PRIOR_NODE_H + of(state, pool).node_s / 3600)


def reclaims_per_node_h(state: State, pool: str) -> float:
    """How often a node of the pool is taken, with a notice or without: the posterior mean per hour.
    Nodes that the cloud has only warned of count as WARNED_SHARE of a reclaim each."""
    seen = of(state, pool)
    return _rate_per_node_h(state, pool, seen.reclaims + WARNED_SHARE * seen.warnings)


def losses_per_h(state: State, nodes: Sequence[Node]) -> float:
    """Expected losses per hour of these nodes; what was released in time is none."""
    return losses_by_pool_per_h(state, Counter(node.pool for node in nodes))


def losses_by_pool_per_h(state: State, n_nodes: Mapping[str, int]) -> float:
    """Of so many nodes of each pool."""
    return sum(
        n * _rate_per_node_h(state, name, of(state, name).losses) for name, n in n_nodes.items()
    )


def reclaims_per_h(state: State, nodes: Sequence[Node]) -> float:
    return reclaims_by_pool_per_h(state, Counter(node.pool for node in nodes))


def reclaims_by_pool_per_h(state: State, n_nodes: Mapping[str, int]) -> float:
    """Of so many nodes of each pool."""
    return sum(n * reclaims_per_node_h(state, name) for name, n in n_nodes.items())


def calm_h(state: State, pools: Collection[str]) -> float:
    """Expected hours until some node of these pools is taken next, one or all of them: the market
    takes many at once, so moments are counted, in the hours in which nodes were there."""
    per_h = 0.0
    for pool in state.pools:
        if pool.name in pools:
            seen, prior = of(state, pool.name), RECLAIMS_PER_NODE_H[pool.market_type]
            moments = prior * PRIOR_NODE_H + seen.moments
            per_h += moments / (PRIOR_NODE_H + seen.there_s / 3600)
    return 1 / per_h if per_h else inf


def dry_for_h(state: State, pool: str, now_s: float) -> float:
    """How long a pool that gives nothing is expected to continue with that.

    Droughts are believed to end at a rate with a Gamma prior of one end in DROUGHT_PRIOR_H; hours
    without an end count too, so the longer this one lasts, the longer it is expected to last.
    """
    seen = of(state, pool)
    lasted_s = max(0.0, now_s - seen.dry_since_s) if seen.dry_since_s is not None else 0.0
    return (DROUGHT_PRIOR_H + (seen.dry_s + lasted_s) / 3600) / (1 + seen.droughts)


def start_s(state: State, pool: str, prior_s: float = START_PRIOR_S) -> float:
    """Seconds from a request to a node that is prepared: a running mean."""
    return of(state, pool).start_s or prior_s


# --------------------------------------------------------------------------------------------- fold


def _is_spot(state: State, pool: str) -> bool:
    found = state.pool(pool)
    return found is not None and found.market_type == "spot"


def _with(state: State, pool: str, seen: PoolSeen) -> State:
    return replace(state, history={**state.history, pool: seen})


def lived(state: State, passed_s: float) -> dict[str, PoolSeen]:
    """The history when the nodes that are paid for have lived so much longer."""
    history = dict(state.history)
    for pool, n in state.alive_by_pool.items():
        seen = history.get(pool, NOTHING_SEEN)
        there_s = seen.there_s + passed_s * (n > 0)
        history[pool] = replace(seen, node_s=seen.node_s + n * passed_s, there_s=there_s)
    return history


def announced(state: State, node: Node) -> bool:
    """Has there been a notice of the node? One that the run itself leaves or releases has none."""
    ours = state.counts_taken and node.deadline_s is None
    return node.status == "draining" and not ours


def gone(state: State, node: Node, cause: str) -> tuple[bool, bool]:
    """Of a node that is gone: whether the run has released it, and whether that was to be expected.
    One that was ordered to be released may have been taken before."""
    ordered = node.node_id in state.releasing
    released = cause == "released" or (ordered and not state.counts_taken)
    return released, announced(state, node) if ordered else node.status == "draining"


def taken(state: State, node: Node, lost: bool, *, known: bool, at_s: float) -> State:
    """The node will be or is taken. `lost`: it is gone, and was not released; `known`: there was a
    notice. A warning of it was right, and counts no more beside the reclaim."""
    seen, warned = of(state, node.pool), not known and node.node_id in state.warned
    state = replace(state, warned=state.warned - {node.node_id}) if warned else state
    if not known and (seen.taken_at_s is None or at_s > seen.taken_at_s + MOMENT_S):
        seen = replace(seen, moments=seen.moments + 1, taken_at_s=at_s)
    found = replace(
        seen,
        losses=seen.losses + lost,
        reclaims=seen.reclaims + (not known),
        warnings=max(0, seen.warnings - warned),
    )
    return _with(state, node.pool, found)


def warned(state: State, node: Node) -> State:
    """The cloud has said that a reclaim of the node has become more likely. Said again, it counts
    once."""
    if node.node_id in state.warned:
        return state
    seen = of(state, node.pool)
    alive = {other.node_id for other in state.alive}
    state = replace(state, warned=(state.warned & alive) | {node.node_id})
    return _with(state, node.pool, replace(seen, warnings=seen.warnings + 1))


def refused(state: State, failed: RequestFailed, *, at_s: float) -> State:
    """The pool said no, or nothing at all: it is left alone, twice as long each time until it gives
    a node. What starts for the request all the same is still expected; less of that is no other
    no."""
    pool, request_id = failed.pool, failed.request_id
    seen, backoff = of(state, pool), state.backoff
    asked, requests = state.requests.get(request_id), less(state.requests, request_id)
    if asked is None or not asked.failed:
        old = backoff.get(pool)
        most_s = BACKOFF_SPOT_S if state.spends_slack and _is_spot(state, pool) else BACKOFF_MAX_S
        wait_s = min(most_s, old.wait_s * 2) if old else BACKOFF_S
        no = Backoff(at_s + wait_s, wait_s, failed.reason, old.deaths if old else 0)
        backoff = {**backoff, pool: no}
    if asked is not None and failed.coming and state.expects_started:
        left = replace(asked, count=failed.coming, failed=True)
        requests = {**state.requests, request_id: left}
    state = replace(state, backoff=backoff, requests=requests)
    return (
        state
        if seen.dry_since_s is not None
        else _with(state, pool, replace(seen, dry_since_s=at_s))
    )


def unanswered(state: State, pool: str) -> State:
    """A request is withdrawn: the next one is waited for twice as long, since its nodes may only be
    slow to start."""
    seen = of(state, pool)
    return _with(state, pool, replace(seen, unanswered=seen.unanswered + 1))


def gave(state: State, node: Node, asked_s: float, *, at_s: float) -> State:
    """A node has come; how it starts is waited for. The rest of its request has as much time as
    before, until it is prepared, which tells what time a start takes."""
    seen = of(state, node.pool)
    if seen.unanswered and not state.asks_beside:
        seen = replace(seen, unanswered=0)
        state = _with(state, node.pool, seen)
    if seen.dry_since_s is not None:
        dry_s = seen.dry_s + max(0.0, at_s - seen.dry_since_s)
        state = _with(
            state,
            node.pool,
            replace(seen, dry_s=dry_s, droughts=seen.droughts + 1, dry_since_s=None),
        )
    return replace(state, born={**state.born, node.node_id: asked_s})


def started(state: State, node: Node, at_s: float) -> State:
    """It is prepared for the first time, and not about to go."""
    counted = state.bounds_reclaims and announced(state, node)
    if node.node_id not in state.born or counted:
        return state
    seen, took_s = of(state, node.pool), at_s - state.born[node.node_id]
    state = replace(state, born=less(state.born, node.node_id))
    mean_s = 0.5 * (seen.start_s + took_s) if seen.start_s else took_s
    unanswered = 0 if state.asks_beside else seen.unanswered
    found = replace(seen, start_s=mean_s, deaths=0, reclaimed_starts=0, unanswered=unanswered)
    state = _with(state, node.pool, found)
    bad = state.backoff.get(node.pool)
    return without_backoff(state, node.pool) if bad and bad.deaths else state


def died(state: State, node: Node, why: str, *, at_s: float, reclaimed: bool = False) -> State:
    """The node is gone or quarantined before it was prepared: after the second in a row the pool is
    left alone, twice as long each time. Those that were asked for before the last one had died
    count with it. `reclaimed`: it went by itself, or is about to, no fault of a spot pool whose
    nodes have been prepared in this run: more of these are borne."""
    asked_s = state.born.get(node.node_id)
    if asked_s is None:
        return state
    state = replace(state, born=less(state.born, node.node_id))
    seen = of(state, node.pool)
    if (seen.deaths or seen.reclaimed_starts) and asked_s < seen.died_at_s:
        return state
    n, borne, most_s = seen.deaths + 1, DEATHS_BORNE, DEATH_BACKOFF_MAX_S
    found, what = replace(seen, deaths=n, died_at_s=at_s), "ended"
    if reclaimed and seen.start_s and state.spends_slack and _is_spot(state, node.pool):
        if not state.bounds_reclaims:
            return state
        n, borne, most_s = seen.reclaimed_starts + 1, RECLAIMS_BORNE, BACKOFF_MAX_S
        found, what = replace(seen, reclaimed_starts=n, died_at_s=at_s), "were reclaimed"
    state = _with(state, node.pool, found)
    if n <= borne:
        return state
    wait_s = min(most_s, DEATH_BACKOFF_S * 2.0 ** min(20, n - borne - 1))
    reason = f"{n} starts in a row {what} before a node was prepared (the last one: {why})"
    return replace(
        state, backoff={**state.backoff, node.pool: Backoff(at_s + wait_s, wait_s, reason, n)}
    )


def in_vain(state: State) -> str:
    """Why no node will ever be prepared again: every pool gives nodes, and none of them gets so
    far; '' = some may. A pool that gives no nodes is waited for."""
    usable = [pool.name for pool in state.pools if pool.max_nodes > 0]
    inside = any(node.node_id in state.prepared for node in state.alive)
    if not usable or inside or min(of(state, name).deaths for name in usable) < STARTS_MOST:
        return ""
    reasons = [
        f"pool {name}: {state.backoff[name].reason}" for name in usable if name in state.backoff
    ]
    return f"no node can be prepared: {'; '.join(reasons)}"


def without_backoff(state: State, pool: str) -> State:
    return replace(state, backoff={name: b for name, b in state.backoff.items() if name != pool})


def usd_per_gpu_h(
    state: State, pool: Pool, n_nodes: int = 1, *, pause_s: float = 0.0, wait_s: float = 0.0
) -> float:
    """What an hour of one of its GPUs costs when reclaims are paid too: each costs the start of
    another node, a pause of all `n_nodes` of the run, and the wait for a node that does not come.
    price x (1 + reclaims per node-hour x (start + nodes x pause + wait) / 3600 s); where reclaims
    at once count as one, they share a pause."""
    if state.spends_slack:
        lost_h = reclaims_per_node_h(state, pool.name) * (start_s(state, pool.name) + wait_s) / 3600
        paused_h = pause_s / 3600 / calm_h(state, {pool.name})
        return pool.usd_per_gpu_h * (1 + lost_h + paused_h)
    lost_h = (start_s(state, pool.name) + n_nodes * pause_s + wait_s) / 3600
    return pool.usd_per_gpu_h * (1 + reclaims_per_node_h(state, pool.name) * lost_h)
