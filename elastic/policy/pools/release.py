"""Nodes that the policy gives up by itself: what is too much, what spot replaces, and what a
reservation's end takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from elastic.errors import InfeasiblePlan
from elastic.planner.layout_choice import most_workers
from elastic.policy.copies import recovery
from elastic.policy.plans import choice_of, enter
from elastic.policy.pools import drain, hard_limits, hazard, pool_allocation, slack
from elastic.policy.state.state import State
from elastic.types import Decision, DrainNode, Node, Pool, ReleaseNode
from elastic.types.replacing import follows_from

SETTLE_S = 2.0  # for nodes that are being prepared, after the last one was


def leaving(state: State, now_s: float, taken: Collection[str] = ()) -> Decision:
    """Nodes that nobody works on, and those whose reservation ends. `taken`: nodes that a plan is
    about to use."""
    ending, (surplus, texts) = _ending(state, now_s), _surplus(state, now_s, taken)
    if ending:
        texts = [_told(state, ending, now_s), *texts]
    return Decision((*ending, *surplus), "; ".join(texts), min(_ends(state, now_s), default=None))


def _told(state: State, ending: list[DrainNode], now_s: float) -> str:
    pools = {node.pool for order in ending if (node := state.nodes.get(order.node_id))}
    left = {p.name: (p.ends_at_s or now_s) - now_s for p in state.pools if p.name in pools}
    ends = ", ".join(f"{name} in {s / 60:.0f} min" for name, s in sorted(left.items()))
    return f"{', '.join(order.node_id for order in ending)}: the reservation ends ({ends})"


def _ends(state: State, now_s: float) -> list[float]:
    times = [
        p.ends_at_s - pool_allocation.notice_of_end_s(state, p)
        for p in state.pools
        if p.ends_at_s is not None
    ]
    return [at_s for at_s in times if at_s > now_s]


def _ending(state: State, now_s: float) -> list[DrainNode]:
    """A reservation's end is a notice that has been known for days."""
    found: list[DrainNode] = []
    if all(pool.ends_at_s is None for pool in state.pools):
        return found
    for node in state.nodes.values():
        pool = state.pool(node.pool)
        if pool is None or pool.ends_at_s is None or node.status not in ("ready", "prepared"):
            continue
        if now_s >= pool.ends_at_s - pool_allocation.notice_of_end_s(state, pool):
            found.append(DrainNode(node.node_id))
    return found


def _surplus(
    state: State, now_s: float, taken: Collection[str]
) -> tuple[list[ReleaseNode], list[str]]:
    """Nodes above max_nodes, and on-demand nodes that are not needed any more; those that no plan
    uses."""
    if state.phase not in ("running", "entering"):
        return _above_bound(state, taken)
    above, texts = _above_bound(state, taken)
    gone = {order.node_id for order in above}
    late = [node for node in _too_late(state, now_s, taken) if node.node_id not in gone]
    if late:
        names = ", ".join(node.node_id for node in late)
        texts = [*texts, f"{names}: released, the run ends before another pause pays for itself"]
        above = [*above, *(ReleaseNode(node.node_id) for node in late)]
        gone |= {node.node_id for node in late}
    cheap = pool_allocation.cheapest(state)
    if not cheap and not state.releases_spare:
        return above, texts
    fixed = {name for name in _fixed(state) if cheap and name in state.alive_by_pool}
    idle = [node for node in _idle(state, taken) if node.pool in fixed] if fixed else []
    beyond = _beyond(state, idle, now_s) if idle else []
    spare = [node for node in beyond if node.node_id not in gone]
    if spare:
        usd = sum(pool.usd_per_node_h for node in spare if (pool := state.pool(node.pool)))
        names = ", ".join(node.node_id for node in spare)
        texts = [*texts, f"{names} on demand not needed any more: released, ${usd:.2f}/h less"]
    useless = [node for node in _useless(state, now_s, taken) if node.node_id not in gone]
    if useless:
        names = ", ".join(node.node_id for node in useless)
        texts = [*texts, f"{names}: the job can use no more nodes, and these can stand in for none"]
    return [*above, *(ReleaseNode(node.node_id) for node in (*spare, *useless))], texts


def _too_late(state: State, now_s: float, taken: Collection[str]) -> list[Node]:
    """Nodes that are prepared, and that are not taken in any more: until the end they would gain
    less than the pause takes, and no other node that would be asked for changes that."""
    plan, kinds = state.plan, {pool.name: pool for pool in state.pools}
    comes = state.requests or state.preparing or state.by_status.get("ready")
    calm = state.phase == "running" and state.failure is None and state.quiescing is None
    if not state.releases_late or plan is None or state.job.restarted or comes or not calm:
        return []
    if any(node.node_id in plan.workers_per_node for node in state.draining):
        return []  # they are waited for with that
    most = sum(pool.max_nodes * pool.gpus_per_node for pool in state.pools)
    late = [
        node
        for node in _idle(state, taken)
        if (pool := kinds.get(node.pool)) is not None
        and hard_limits.too_late(state, pool, now_s=now_s, joined=most)
    ]
    old = plan.layout.world_size
    new = sum(node.gpus for node in state.available if node.node_id not in plan.workers_per_node)
    if not late or not hard_limits.gains_little(state, old, old + new):
        return []
    return [] if pool_allocation.stand_in_workers(state, now_s) else late


def _useless(state: State, now_s: float, taken: Collection[str]) -> list[Node]:
    """Nodes that are prepared, and that no plan will use: the one that runs has all workers that it
    can use, and they are not to stand in for nodes on demand. Without them as many stay, of which
    none is about to leave, so that no others are asked for: the dearest go."""
    plan, most = state.plan, most_workers(state.job)
    if not state.spends_slack or plan is None or most is None or plan.layout.world_size < most:
        return []
    spare = _without_ranks(state)
    if not spare or pool_allocation.stand_in_workers(state, now_s):
        return []
    idle = [node for node in _idle(state, taken) if node in spare]
    if not state.releases_spare:
        return idle
    found, room = [], sum(gpus for _, gpus in state.there.values()) - most
    for node in sorted(idle, key=lambda node: -_price(state, node)):
        if node.gpus <= room:
            found.append(node)
            room -= node.gpus
    return found


def _price(state: State, node: Node) -> float:
    pool = state.pool(node.pool)
    return pool.usd_per_node_h if pool is not None else 0.0


@follows_from("nodes", "plan", "pools", "job")
def _without_ranks(state: State) -> Sequence[Node]:
    """Nodes that are prepared, are paid for and have no rank of the running plan; only spot ones
    where the run is to be cheap, which looks at those on demand by itself."""
    cheap = pool_allocation.cheapest(state)
    pools = {
        pool.name
        for pool in state.pools
        if (pool.market_type == "spot" if cheap else pool.paid and pool.market_type != "owned")
    }
    used = state.plan.workers_per_node if state.plan is not None else {}
    return [n for n in state.available if n.pool in pools and n.node_id not in used]


def _idle(state: State, taken: Collection[str]) -> list[Node]:
    """Nodes without a part in any plan, the newest first; nothing of the state is on them."""
    busy = state.member_nodes | {worker.node_id for worker in state.holdings} | set(taken)
    nodes = [
        n
        for n in state.nodes.values()
        if n.status in ("ready", "prepared") and n.node_id not in state.releasing
    ]
    return [node for node in reversed(nodes) if node.node_id not in busy]


def without_use(state: State, taken: Collection[str], *, kept: bool) -> list[Node]:
    """Nodes that are paid for, and of which a run that is about to end makes no use. `kept`: not
    those that are prepared, or will be."""
    owned = {pool.name for pool in state.pools if pool.market_type == "owned"}
    return [
        node
        for node in _idle(state, taken)
        if node.pool not in owned
        and not (kept and (node.status == "prepared" or node.node_id in state.preparing))
    ]


def _above_bound(state: State, taken: Collection[str]) -> tuple[list[ReleaseNode], list[str]]:
    bound = state.job.max_nodes
    n = 0 if bound is None else len(state.alive) - len(state.releasing) - bound
    if n <= 0:
        return [], []
    found = sorted(_idle(state, taken), key=lambda node: -_price(state, node))[:n]
    orders = [ReleaseNode(node.node_id) for node in found]
    names = ", ".join(node.node_id for node in found)
    return orders, [f"{names}: released, max_nodes is {bound}"] if found else []


@follows_from("hardware", "job", "pools", "spends_slack")
def _fixed(state: State) -> Mapping[str, Pool]:
    return {pool.name: pool for pool in pool_allocation.on_demand(state)}


def _beyond(state: State, nodes: list[Node], now_s: float) -> list[Node]:
    """Of these on-demand nodes, the dearest that can go while as many workers stay as are
    wanted."""
    fixed = _fixed(state)
    pools = pool_allocation.on_demand(state)
    if len(pools) == len(state.pools):
        return []
    wanted = (
        pool_allocation.floor_workers(state, pools)
        + pool_allocation.fall_back(state, now_s).workers
    )
    room = pool_allocation.on_demand_workers(state, pools) - wanted
    found = []
    for node in sorted(nodes, key=lambda node: -fixed[node.pool].usd_per_gpu_h):
        if node.gpus <= room:
            found.append(node)
            room -= node.gpus
    return found


# ------------------------------------------------------------------------------------- back to spot


def back_to_spot(state: State, now_s: float) -> Decision | None:
    """On-demand nodes of the plan are left when others do their work, and the move pays for itself:
    one transition that takes in the new nodes and leaves these; resharding from live memory."""
    plan = state.plan
    if plan is None or not pool_allocation.cheapest(state) or state.rest_steps <= 1:
        return None
    fixed = _fixed(state)
    if fixed.keys().isdisjoint(state.plan_by_pool):
        return None
    used = [
        node
        for name in plan.nodes
        if (node := state.nodes.get(name)) and node.pool in fixed and node.status == "prepared"
    ]
    if not used or (state.preparing and now_s < state.prepared_at_s + SETTLE_S):
        return None
    go = _beyond(state, used, now_s)
    spare = pool_allocation.slack_of(state, list(fixed.values()), now_s)
    if state.spends_slack and spare is not None and spare.last_call:
        return None
    gone = {node.node_id for node in go}
    stay = [node for node in state.available if node.node_id not in gone]
    if not go or sum(node.gpus for node in stay) < pool_allocation.least_workers(state):
        return None
    why = pays(state, go, stay)
    if not why:
        return None
    try:
        choice = choice_of(state, stay)
    except InfeasiblePlan:
        return None
    names = ", ".join(node.node_id for node in go)
    moved = enter(
        state,
        choice,
        recovery.live(state),
        cause="release",
        why=f"{names} on demand {'are' if len(go) > 1 else 'is'} left: {why}",
    )
    return Decision(
        (*(DrainNode(node.node_id) for node in go), *moved.actions), moved.reason, moved.wake_at_s
    )


def pays(state: State, go: list[Node], stay: list[Node]) -> str:
    """Why the move is worth it, in dollars and minutes; '' = it is not.

    Gain: (on-demand price - price of the others, reclaims included) x the time until one of these
    is taken (1 / their hazard) or until the end. Cost: the pause for all nodes, drain.WORTH times,
    and a pause with another start for the reclaim that may come in that time.
    """
    if state.spends_slack:
        return _stand_in_pays(state, go, stay)
    fixed = _fixed(state)
    gpus = sum(node.gpus for node in go)
    others = [node for node in stay if node.pool not in fixed]
    lead, n = drain.lead_of(state), len(stay)
    kinds = [(node, pool) for node in others if (pool := state.pool(node.pool))]
    if not kinds:
        return ""  # what they would have done is done later, at the same price
    paid = sum(
        node.gpus * hazard.usd_per_gpu_h(state, pool, n, pause_s=lead.pause_s)
        for node, pool in kinds
    )
    per_gpu = paid / max(1, sum(node.gpus for node, _ in kinds))
    less = sum(node.gpus * fixed[node.pool].usd_per_gpu_h for node in go) - gpus * per_gpu
    if less <= 0:
        return ""
    hazard_per_h = hazard.reclaims_per_h(state, others)
    rest_s = slack.SCRIPT_REST_S
    if state.rest_steps < inf:
        gpus_left = max(1, sum(node.gpus for node in stay))
        rest_s = state.rest_work * state.worker_step_s / gpus_left
    hours = min(1 / hazard_per_h if hazard_per_h else inf, rest_s / 3600)
    start_s = max(hazard.start_s(state, node.pool) for node in go)
    pause_usd = drain.WORTH * lead.pause_s / 3600 * state.usd_per_h
    risk_usd = min(1.0, hazard_per_h * hours) * (lead.pause_s + start_s) / 3600 * state.usd_per_h
    if less * hours <= pause_usd + risk_usd:
        return ""
    return (
        f"${less:.2f}/h less, for {60 * hours:.0f} min until the next reclaim or the end: "
        f"${less * hours:.2f} saved for "
        f"${pause_usd:.2f} of pause ({lead.pause_s:.1f} s) and ${risk_usd:.2f} of risk"
    )


def _stand_in_pays(state: State, go: list[Node], stay: list[Node]) -> str:
    """By the moments at which nodes of these pools were taken, however many at once."""
    fixed = _fixed(state)
    names = {node.pool for node in stay if node.pool not in fixed}
    pools = [pool for pool in state.pools if pool.name in names]
    if not pools:
        return ""
    worth = slack.stand_in(state, go, pools, workers=sum(node.gpus for node in stay))
    pause_s = drain.lead_of(state).pause_s
    pause_usd = drain.WORTH * pause_s / 3600 * state.usd_per_h
    if worth.usd <= pause_usd:
        return ""
    return f"{worth}, ${pause_usd:.2f} for a pause of {pause_s:.1f} s"
