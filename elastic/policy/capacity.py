"""The mix of pools: request, prepare, release, quarantine."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

from elastic.planner.search import most_workers
from elastic.policy import drain
from elastic.policy.known import State
from elastic.policy.retries import worn_out
from elastic.types import Action, Decision, Node, Pool, Prepare, Quarantine, ReleaseNode, RequestNodes

REQUEST_LASTS_S = 900.0  # a request without an answer is forgotten then
PREPARE_MOST_S = 600.0  # since its preparation was asked for, or has got on last
LEAVE_MOST_S = 5.0
ORDER = {"owned": 0, "reserved": 1, "spot": 2, "on-demand": 3}


def together(*decisions: Decision) -> Decision:
    """All actions, all reasons, the earliest time to look again."""
    actions = tuple(action for decision in decisions for action in decision.actions)
    reason = "; ".join(decision.reason for decision in decisions if decision.reason)
    wakes = [decision.wake_at_s for decision in decisions if decision.wake_at_s is not None]
    return Decision(actions, reason, min(wakes, default=None))


def capacity(state: State, now_s: float) -> Decision:
    """What to do about nodes, whatever the generations do."""
    return together(_prepare(state, now_s), _release(state, now_s), _request(state, now_s))


def _prepare(state: State, now_s: float) -> Decision:
    actions: list[Action] = []
    reasons: list[str] = []
    wakes: list[float] = []
    for node in state.nodes.values():
        if node.status != "ready":
            continue
        since_s = state.preparing.get(node.node_id)
        if since_s is not None and now_s < since_s + PREPARE_MOST_S:
            wakes.append(since_s + PREPARE_MOST_S)
            continue
        why = (
            worn_out(state, node.node_id, now_s)
            if since_s is None
            else f"its preparation has not got on for {PREPARE_MOST_S:.0f} s"
        )
        if why:
            actions += [Quarantine(node.node_id, why), ReleaseNode(node.node_id)]
            reasons.append(f"node {node.node_id} is put aside: {why}")
        else:
            actions.append(Prepare(node.node_id))
    ready = [action.node_id for action in actions if isinstance(action, Prepare)]
    if ready:
        reasons.append(f"{len(ready)} node{'s' * (len(ready) > 1)} to prepare: {', '.join(ready)}")
    return Decision(tuple(actions), "; ".join(reasons), min(wakes, default=None))


def _release(state: State, now_s: float) -> Decision:
    """Drained nodes that nobody needs any more; their workers get a moment to say that they have sent everything."""
    needed = {worker.node_id for worker in state.members}
    leaving = _still_leaving(state) if now_s < state.entered_at_s + LEAVE_MOST_S else set()
    wake_at_s = state.entered_at_s + LEAVE_MOST_S if leaving else None
    needed |= leaving
    if state.phase == "waiting":
        needed |= {node.node_id for node in drain.kept(state, now_s)}
        needed |= {worker.node_id for worker in state.holdings}
        needed |= {worker.node_id for worker in state.aborting.owing} if state.aborting else set()
    done = [n for n in state.nodes.values() if n.status == "draining" and n.node_id not in needed | state.releasing]
    if not done:
        return Decision(wake_at_s=wake_at_s)
    names = ", ".join(node.node_id for node in done)
    return Decision(tuple(ReleaseNode(node.node_id) for node in done), f"nothing is left on {names}: given back", wake_at_s)


def _still_leaving(state: State) -> set[str]:
    """Nodes of workers that only sent to the running generation and have not said that they left it."""
    plan = state.plan
    if plan is None:
        return set()
    senders = {h.worker for h in plan.resume.holdings} - set(plan.ranks)
    return {w.node_id for w in senders if state.lives(w) and (plan.generation, w) not in state.sent}


def _request(state: State, now_s: float) -> Decision:
    """Fill the pools, cheapest way of buying first, up to their own bounds, the job's and what its layout can use."""
    asked = {
        name: sum(r.count for r in state.requests.values() if r.pool == name and now_s < r.at_s + REQUEST_LASTS_S)
        for name in (pool.name for pool in state.pools)
    }
    counted = [node for node in state.nodes.values() if node.status in ("pending", "ready", "prepared")]
    sizes = {pool.name: pool.gpus_per_node for pool in state.pools}
    most = most_workers(state.job)
    workers = (most if most is not None else inf) - sum(n.gpus for n in counted) - sum(sizes[p] * n for p, n in asked.items())
    bound = state.job.get("max_nodes")
    nodes = (int(bound) if bound is not None else inf) - len(counted) - sum(asked.values())
    actions: list[Action] = []
    reasons: list[str] = []
    wakes = [r.at_s + REQUEST_LASTS_S for r in state.requests.values() if r.at_s + REQUEST_LASTS_S > now_s]
    for pool in _by_price(state):
        have = sum(node.pool == pool.name for node in counted) + asked[pool.name]
        want = int(min(pool.max_nodes - have, nodes, ceil(workers / max(1, pool.gpus_per_node)) if workers < inf else inf))
        if want <= 0:
            continue
        backoff = state.backoff.get(pool.name)
        if backoff and now_s < backoff.until_s:
            wakes.append(backoff.until_s)
            continue
        actions.append(RequestNodes(pool.name, want, f"{pool.name}-{state.n_requests + len(actions) + 1}"))
        reasons.append(
            f"{want} of {pool.max_nodes} nodes of pool {pool.name} ({pool.market_type}) asked for, {have} there or coming"
        )
        nodes, workers = nodes - want, workers - want * pool.gpus_per_node
    return Decision(tuple(actions), "; ".join(reasons), min(wakes, default=None))


def _by_price(state: State) -> Iterator[Pool]:
    yield from sorted(state.pools, key=lambda pool: (ORDER[pool.market_type], pool.usd_per_gpu_h, pool.name))


def potential(state: State) -> tuple[Node, ...]:
    """The nodes there are and all that the pools could still give: if no plan fits them, none ever will."""
    nodes = [node for node in state.alive if node.status not in ("quarantined", "draining")]
    bound = state.job.get("max_nodes")
    for pool in _by_price(state):
        missing = pool.max_nodes - sum(node.pool == pool.name for node in nodes)
        room = missing if bound is None else min(missing, int(bound) - len(nodes))
        nodes += [Node(f"{pool.name}?{k}", pool.name, pool.gpus_per_node) for k in range(max(0, room))]
    return tuple(nodes)


def missing_capacity(state: State) -> str:
    """Which pools said no, and until when they are left alone; for a reason."""
    return "; ".join(
        f"pool {name}: {b.reason}, asked again after {b.wait_s:.0f} s" for name, b in sorted(state.backoff.items())
    )
