"""Orders about nodes: requested, prepared, released, so that the pools come to what
pool_allocation.py wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import ceil, inf

from elastic.errors import InfeasiblePlan
from elastic.planner.layout_choice import most_workers
from elastic.policy.faults import faulty_devices, quarantine
from elastic.policy.faults.retries import worn_out
from elastic.policy.plans import choice_of, never
from elastic.policy.pools import drain, hard_limits, pool_allocation
from elastic.policy.pools.gpu_memory import gpu_bytes
from elastic.policy.pools.release import leaving, without_use
from elastic.policy.speed.relayout import left_for
from elastic.policy.state.state import Backoff, Request, State
from elastic.text import n_of
from elastic.types import (
    Action,
    Decision,
    InstancesSeen,
    Node,
    Pool,
    Prepare,
    Quarantine,
    ReleaseNode,
    RequestNodes,
)
from elastic.types.replacing import follows_from

PREPARE_MOST_S = 600.0  # since its preparation was asked for, or has made progress last
LEAVE_MOST_S = 5.0


def together(*decisions: Decision) -> Decision:
    """All actions, all reasons, the earliest time to look again."""
    said = [one for one in decisions if one.actions or one.reason or one.wake_at_s is not None]
    if len(said) == 1:
        return said[0]
    actions = tuple(action for decision in said for action in decision.actions)
    reason = "; ".join(decision.reason for decision in said if decision.reason)
    wakes = [decision.wake_at_s for decision in said if decision.wake_at_s is not None]
    return Decision(actions, reason, min(wakes, default=None))


def capacity(state: State, now_s: float, taken: Collection[str] = ()) -> Decision:
    """What to do about nodes, whatever the generations do. `taken`: nodes that a plan is about to
    use."""
    return together(
        _prepare(state, now_s),
        _release(state, now_s, taken if state.keeps_taken else ()),
        leaving(state, now_s, taken),
        _request(state, now_s),
    )


def wound_up(state: State, now_s: float, taken: Collection[str], *, mends: bool) -> Decision:
    """A run that is about to end waits for no nodes, and keeps none that hold nothing. `mends`:
    what breaks until then is mended, for which nodes that are or will soon be prepared stay; they
    do too while a generation has to be entered once more."""
    if not state.withdraws_at_end:
        return Decision()
    calm = state.phase in ("running", "entering") and state.failure is None
    asked = tuple(state.requests.values())
    spare = without_use(state, taken, kept=mends or not calm)
    texts = []
    if asked:
        n = sum(request.count for request in asked)
        texts.append(f"the run is about to end: {n_of(n, 'requested node')} not waited for")
    if spare:
        names = ", ".join(node.node_id for node in spare)
        texts.append(f"{names}: released, the run is about to end")
    withdrawn = [RequestNodes(one.pool, 0, one.request_id) for one in asked]
    orders = (*withdrawn, *(ReleaseNode(node.node_id) for node in spare))
    left = _release(state, now_s) if calm else Decision()
    return together(Decision(orders, "; ".join(texts)), left)


def _prepare(state: State, now_s: float) -> Decision:
    actions: list[Action] = []
    reasons: list[str] = []
    wakes: list[float] = []
    living = (
        {worker.node_id for worker in state.members if state.lives(worker)}
        if state.short
        else set()
    )
    for node in state.by_status.get("ready", ()):
        if node.node_id in state.refused:
            why = f"rejected: {state.refused[node.node_id]}"
            actions += [Quarantine(node.node_id, why), ReleaseNode(node.node_id)]
            reasons.append(f"node {node.node_id} of pool {node.pool} is released, {why}")
            continue
        if state.keeps_out and (why := quarantine.came_back(state, node.node_id, now_s)):
            actions += [Quarantine(node.node_id, why), ReleaseNode(node.node_id)]
            reasons.append(f"node {node.node_id} of pool {node.pool} is released: {why}")
            continue
        since_s = state.preparing.get(node.node_id)
        out = state.kept_out.get(node.node_id)  # others did not reach it
        if out is not None and now_s < out[1]:
            wakes.append(out[1])
            continue
        if node.node_id in state.short and node.node_id in living:
            continue  # others of its workers have a part in a generation: not now
        if since_s is not None and now_s < since_s + PREPARE_MOST_S:
            wakes.append(since_s + PREPARE_MOST_S)
            continue
        why = (
            worn_out(state, node.node_id, now_s)
            if since_s is None
            else f"its preparation has made no progress for {PREPARE_MOST_S:.0f} s"
        )
        if why:
            why += (
                f" (the last time: {state.short[node.node_id][-1]})"
                if node.node_id in state.short
                else ""
            )
            actions += [Quarantine(node.node_id, why), ReleaseNode(node.node_id)]
            reasons.append(f"node {node.node_id} is quarantined: {why}")
        else:
            actions.append(Prepare(node.node_id))
    ready = [action.node_id for action in actions if isinstance(action, Prepare)]
    if ready:
        reasons.append(f"{len(ready)} node{'s' * (len(ready) > 1)} to prepare: {', '.join(ready)}")
    return Decision(tuple(actions), "; ".join(reasons), min(wakes, default=None))


def _release(state: State, now_s: float, taken: Collection[str] = ()) -> Decision:
    """Drained nodes that nobody needs any more; their workers get a moment to say that they have
    sent everything. `taken`: nodes that a plan is about to use."""
    needed = {*state.member_nodes, *taken}
    leaving = _still_leaving(state) if now_s < state.entered_at_s + LEAVE_MOST_S else set()
    wake_at_s = state.entered_at_s + LEAVE_MOST_S if leaving else None
    needed |= leaving
    if state.phase == "waiting":
        needed |= {node.node_id for node in drain.kept(state, now_s)}
        needed |= {worker.node_id for worker in state.holdings}
        needed |= {worker.node_id for worker in state.aborting.owing} if state.aborting else set()
        needed -= faulty_devices.not_waited_for(state, now_s)
        wake_at_s = min(faulty_devices.wakes(state, now_s), default=None)
    needed |= state.releasing
    done = [node for node in state.draining if node.node_id not in needed]
    left = _quarantined_before(state)
    if not done:
        return together(left, Decision(wake_at_s=wake_at_s))
    bad = faulty_devices.reasons(state, done)
    well = [node for node in done if node.node_id not in bad]
    rest = (
        _released(state, well, now_s, wake_at_s=wake_at_s)
        if well
        else Decision(wake_at_s=wake_at_s)
    )
    return together(left, faulty_devices.quarantined(bad), rest)


def _quarantined_before(state: State) -> Decision:
    """Nodes that the driver before has quarantined, and has not come to release. What gives nodes
    is another now, and told as well."""
    if not state.ends_quarantined:
        return Decision()
    found = [
        node.node_id
        for node in state.by_status.get("quarantined", ())
        if node.node_id not in state.releasing
    ]
    why = "it was quarantined before the driver was started again"
    orders = [order for name in found for order in (Quarantine(name, why), ReleaseNode(name))]
    names = ", ".join(found)
    return Decision(tuple(orders), f"{names}: released, {why}" if found else "")


def _released(state: State, done: list[Node], now_s: float, *, wake_at_s: float | None) -> Decision:
    names = ", ".join(node.node_id for node in done)
    slow = left_for(state, done, now_s)
    actions: list[Action] = [Quarantine(name, f"too slow: {why}") for name, why in slow.items()]
    actions += [ReleaseNode(node.node_id) for node in done]
    put = "".join(f"; quarantined: {why}" for why in slow.values())
    return Decision(tuple(actions), f"no state is left on {names}: released{put}", wake_at_s)


def _still_leaving(state: State) -> set[str]:
    """Nodes of workers that only sent to the running generation and have not said that they left
    it."""
    plan = state.plan
    if plan is None:
        return set()
    return {
        w.node_id for w in plan.senders if state.lives(w) and (plan.generation, w) not in state.sent
    }


def _request(state: State, now_s: float) -> Decision:
    """Fill the pools as the mix wants it, up to the job's bounds, what its layout can use, and what
    the budget bears."""
    wanted, need = pool_allocation.pool_demands(state, now_s)
    book = _Book(state, now_s, beside=need.beside)
    for request in state.requests.values():
        book.withdraw(request)
    for want in wanted:
        book.ask(want)
    reasons = [*book.reasons, need.note] if need.note and not need.workers else book.reasons
    return Decision(
        tuple(book.actions), "; ".join(reasons), min((*book.wakes, *need.wakes), default=None)
    )


def _have_a_plan(state: State) -> bool:
    """The nodes that are or will be of use."""
    there = [
        node
        for status in ("pending", "ready", "prepared")
        for node in state.by_status.get(status, ())
    ]
    try:
        choice_of(state, there)
    except InfeasiblePlan:
        return False
    return True


def _too_small(state: State) -> set[str]:
    """Pools on whose GPUs a layout did not fit, while the nodes that there are have no other, where
    all that they could give would have none, and what other pools could give has one."""
    tried = max(state.infeasible_on.values(), default=0)
    if not tried or state.phase != "waiting" or _have_a_plan(state):
        return set()
    small = {pool.name for pool in state.pools if 0 < gpu_bytes(state, pool) <= tried}
    large = {pool.name for pool in state.pools} - small
    few = never(state, potential(state, but=large)), never(state, potential(state, but=small))
    return small if few[0] is not None and few[1] is None else set()


class _Book:
    """Counts what is there, coming and asked for now. `beside`: see OnDemandNeed."""

    def __init__(self, state: State, now_s: float, *, beside: int | None) -> None:
        self.state, self.now_s = state, now_s
        self.actions: list[RequestNodes] = []
        self.reasons: list[str] = []
        self.wakes: list[float] = []
        self.closed = _too_small(state)
        self.refused = False  # on demand
        pools = {pool.name: pool for pool in state.pools}
        self.have = {name: pool_allocation.asked(state, name, now_s) for name in pools}
        bound, most = state.job.max_nodes, most_workers(state.job)
        # all that is paid for counts, also what starts of a request that stands no more
        told = {name: state.instances.get(name, InstancesSeen(name)) for name in pools}
        paid = {name: max(n, told[name].starting) for name, n in self.have.items()}
        n_paid = sum(paid.values())
        if state.counts_leaving:
            n_paid += sum(seen.leaving for seen in told.values())
        self.nodes: float = inf if bound is None else bound - len(state.alive) - n_paid
        usable = {name: seen for name, seen in state.there.items() if name not in self.closed}
        self.gpus = sum(gpus for _, gpus in usable.values()) + sum(
            pools[name].gpus_per_node * n for name, n in self.have.items()
        )
        self.workers: float = inf if most is None else most - self.gpus
        coming = paid if state.counts_starting else self.have
        self.usd_per_h = sum(pools[name].usd_per_node_h * n for name, n in coming.items())
        for name, (n, _) in state.there.items():
            self.have[name] = self.have.get(name, 0) + n
        self.stand_in = pool_allocation.stand_in_workers(state, now_s)
        self.beside = beside

    def withdraw(self, request: Request) -> None:
        """A request that nobody answers is taken back: the pool counts as one that said no. What
        starts for one that has failed is counted no more then, and used where it joins."""
        at_s = pool_allocation.withdrawn_at_s(self.state, request)
        if self.now_s < at_s:
            self.wakes.append(at_s)
            return
        if request.failed:
            return
        self.actions.append(RequestNodes(request.pool, 0, request.request_id))
        self.closed.add(request.pool)
        self.reasons.append(
            f"pool {request.pool} has not answered for {self.now_s - request.at_s:.0f} s: not "
            "waited for any more"
        )

    def ask(self, want: pool_allocation.PoolDemand) -> None:
        pool, state = want.pool, self.state
        have, gpus = self.have[pool.name], max(1, pool.gpus_per_node)
        more = self.beside or 0 if pool.market_type == "on-demand" else self.stand_in
        workers = self.workers + more
        n = int(min(want.nodes - have, self.nodes, ceil(workers / gpus) if workers < inf else inf))
        backoff = state.backoff.get(pool.name)
        if n <= 0 or pool.name in self.closed or (want.instead and not self.refused):
            return
        if backoff and self.now_s < backoff.until_s:
            self.wakes.append(backoff.until_s)
            if backoff.deaths:
                self.reasons.append(_said_no(pool.name, backoff))
            return
        if backoff and backoff.deaths:
            n = min(n, 1 - self._starting(pool.name))
            if n <= 0:
                return
        fixed = pool.market_type == "on-demand"
        if self._too_late(pool, n):
            self.refused |= fixed
            self.reasons.append(hard_limits.no_use(pool))
            return
        most = hard_limits.affordable(state, pool, self.usd_per_h, now_s=self.now_s)
        if most is not None and most < n:
            self.refused |= fixed
            if not most:
                self.reasons.append(hard_limits.too_dear(pool))
                return
            n = most
        self._order(want, n, have)

    def _too_late(self, pool: Pool, n: int) -> bool:
        """Too few nodes to run at all are waited for whatever is left."""
        state = self.state
        joined = self.gpus + n * pool.gpus_per_node
        if not state.weighs_rest or not hard_limits.too_late(
            state, pool, now_s=self.now_s, joined=joined
        ):
            return False
        return _have_a_plan(state)

    def _starting(self, pool: str) -> int:
        """Nodes that are not prepared yet, or still to come. Of a pool whose nodes die at start one
        at a time is tried."""
        ready = sum(
            node.pool == pool and node.status in ("pending", "ready")
            for node in self.state.nodes.values()
        )
        return ready + pool_allocation.asked(self.state, pool, self.now_s)

    def _order(self, want: pool_allocation.PoolDemand, n: int, have: int) -> None:
        pool = want.pool
        request_id = (
            f"{pool.name}-{self.state.n_requests + sum(a.count > 0 for a in self.actions) + 1}"
        )
        self.actions.append(RequestNodes(pool.name, n, request_id))
        text = (
            f"{n} of {n_of(pool.max_nodes, 'node')} of pool {pool.name} ({pool.market_type}) "
            f"requested, {have} available or joining"
        )
        self.reasons.append(f"{text}: {want.why}" if want.why else text)
        self.have[pool.name] += n
        self.nodes -= n
        self.gpus += n * pool.gpus_per_node
        self.workers -= n * pool.gpus_per_node
        if self.beside is not None and pool.market_type != "on-demand":
            self.beside += n * pool.gpus_per_node
        self.usd_per_h += n * pool.usd_per_node_h


@follows_from("nodes", "pools", "job", "hardware", "spends_slack")
def potential(state: State, *, but: Collection[str] = ()) -> Mapping[tuple[str, int], int]:
    """Of each pool, `but` for these, and number of GPUs the nodes that there are and all that it
    could still give: if no plan fits them, none ever will."""
    gone = ("quarantined", "draining")
    nodes = [node for node in state.alive if node.status not in gone and node.pool not in but]
    found = Counter((node.pool, node.gpus) for node in nodes)
    there, bound = Counter(node.pool for node in nodes), state.job.max_nodes
    for pool in (one for one in pool_allocation.by_price(state) if one.name not in but):
        room = max(0, pool.max_nodes - there[pool.name])
        if bound is not None:
            room = max(0, min(room, bound - found.total()))
        found[pool.name, pool.gpus_per_node] += room
    return found


def missing_capacity(state: State) -> str:
    """Which pools said no, and until when they are left alone; for a reason."""
    return "; ".join(_said_no(name, backoff) for name, backoff in sorted(state.backoff.items()))


def _said_no(pool: str, backoff: Backoff) -> str:
    return f"pool {pool}: {backoff.reason}, retried after {backoff.wait_s:.0f} s"
