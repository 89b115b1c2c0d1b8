"""Another arrangement of the nodes for their measured speeds, and leaving a node that is not worth
its place.

This costs a transition, so besides doubt (see share_rebalance.py; here both sides may be off, hence
twice BAND) its price counts:

- It must pay over the expected stay: what is gained until the next expected loss, or the end, is
  more than WORTH times the pause.
- It must have been worth while already: since the speeds are what they are, as much must have been
  lost as the pause costs. That is the buy-or-rent rule (Karlin et al. 1988): never more than twice
  what a prophet would have paid, and slowness that comes and goes moves nothing. Each such move of
  the last quarter of an hour makes the next one as much dearer.

A node is left where the plan without it is at least as fast, or where it is more than MUCH slower
than others of its pool, for REPLACE_AFTER_S in both cases, and another one can be had and pays: one
at a time, never below min_workers, and never when most nodes look slow, for then it is the job.
Nodes of one's own that were slow from the beginning are what there is; they stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.planner.hetero import unequal_shares
from elastic.policy import transition_cost
from elastic.policy.copies import recovery
from elastic.policy.plans import choice_of, enter
from elastic.policy.pools import drain, hard_limits, hazard
from elastic.policy.speed import share_rebalance, speeds
from elastic.policy.speed.share_rebalance import compute_s, load_of, slow_ones, stay_s
from elastic.policy.speed.speeds import BAND, Estimate
from elastic.policy.state.state import State
from elastic.types import Decision, DrainNode, Node, Plan, WorkerId
from elastic.types.replacing import replace

UNEVEN = 0.08  # of the busiest rank's work, lost to unequal speeds: worth a search
GAIN = 0.05  # of it, that a move must gain
MUCH, REPLACE_AFTER_S = 3.0, 60.0
MOVES_MOST = 3  # of a quarter of an hour
AS_FAST = 0.005
STALE_S = 60.0  # what is measured is reported each half minute; without that the run stands


def rearranged(state: State, now_s: float) -> Decision | None:
    """A new generation for the speeds that there are, where it pays; a wait until it would."""
    plan = state.plan
    if (
        plan is None
        or not share_rebalance.followed(state)
        or share_rebalance.ordered(state, now_s)
        or now_s > state.timed_at_s + STALE_S
    ):
        return None
    if len(speeds.recent(state.stages_moved, now_s)) >= MOVES_MOST or (
        now_s != state.timed_at_s and _alike(state, plan)
    ):
        return None
    units = speeds.estimates(state)
    if not all(worker in units for worker in plan.ranks):
        return None
    busy_s = load_of(plan, units).busy_s(plan.samples)
    lost = 1 - _even_s(state, plan, units) / busy_s
    slowest = _slowest(state, plan)
    if lost < UNEVEN and slowest is None:
        return None
    since_s = max(state.entered_at_s, *(units[worker].since_s for worker in plan.ranks))
    due_s = since_s + _price_s(state) / max(lost, GAIN) / _share(state, busy_s)
    if now_s < due_s and slowest is None:
        return Decision(wake_at_s=due_s)
    found = _best(state, plan, busy_s, slowest=slowest) if lost >= UNEVEN else None
    if found is not None:
        choice, left = found
        return _entered(state, choice, left, busy_s=busy_s, since_s=since_s, now_s=now_s)
    return _replaced(state, slowest, now_s) if slowest is not None else None


def _alike(state: State, plan: Plan) -> bool:
    """A first look: equal parts of the work, and about equally fast."""
    last = [windows[-1].unit_s for windows in state.speeds.values()]
    parts = (
        max(plan.samples) <= min(plan.samples) + plan.n_microbatches
        and max(plan.layers) <= min(plan.layers) + 1
    )
    return parts and max(last) <= (1 + 2 * BAND) * min(last)


def _even_s(state: State, plan: Plan, units: Mapping[WorkerId, Estimate]) -> float:
    """What the busiest rank would take if all ranks together were as fast as they are, and equally
    so."""
    mean = sum(1 / units[worker].unit_s for worker in plan.ranks) / len(plan.ranks)
    even = {worker: Estimate(1 / mean, 0.0, 1, 0.0) for worker in plan.ranks}
    load = load_of(plan, even)
    return load.busy_s(share_rebalance.assigned_shares(state, plan, load))


def _price_s(state: State) -> float:
    return drain.lead_of(state).pause_s * (
        1 + len(speeds.recent(state.stages_moved, state.timed_at_s))
    )


def _share(state: State, busy_s: float) -> float:
    """Of a step, that is computation."""
    step_s = hard_limits.step_s(state)
    return max(0.1, compute_s(state, busy_s) / step_s) if step_s else 1.0


# ------------------------------------------------------------------------------ another arrangement


def _best(
    state: State, plan: Plan, busy_s: float, *, slowest: Node | None
) -> tuple[Choice, float] | None:
    """The choice that leaves the busiest rank least to do, and what of its work; None = there is
    nothing but other shares."""
    nodes = state.available
    found = []
    for some in (nodes, [node for node in nodes if node != slowest]) if slowest else (nodes,):
        try:
            choice = choice_of(state, some)
        except InfeasiblePlan:
            continue
        same = (choice.layout, choice.layers) == (plan.layout, plan.layers) and set(
            choice.ranks
        ) == plan.workers
        if not same:
            found.append((choice, _busy_s(state, plan, choice)))
    return min(((choice, s / busy_s) for choice, s in found), key=lambda one: one[1], default=None)


def _busy_s(state: State, plan: Plan, choice: Choice) -> float:
    """Under the measured rates; where the layout is another one, with what else it costs beside the
    plan's, by the model."""
    known = speeds.estimates(state)
    nodes = [state.nodes[name] for name in dict.fromkeys(worker.node_id for worker in choice.ranks)]
    rest = speeds.rates(state, nodes) or {}
    rates = [
        1 / known[worker].unit_s if worker in known else rest[worker] for worker in choice.ranks
    ]
    busy = partial(
        unequal_shares.busy_s,
        choice.layout,
        choice.samples,
        choice.layers,
        n_microbatches=choice.n_microbatches,
    )
    busy_s = busy(rates=rates)
    if choice.layout == plan.layout or not (choice.model_step_s and plan.model_step_s):
        return busy_s
    ones = busy(rates=[1.0] * len(rates))
    before = unequal_shares.busy_s(
        plan.layout,
        plan.samples,
        plan.layers,
        n_microbatches=plan.n_microbatches,
        rates=[1.0] * len(plan.ranks),
    )
    return busy_s * max(1.0, choice.model_step_s / plan.model_step_s * before / ones)


def _entered(
    state: State, choice: Choice, left: float, *, busy_s: float, since_s: float, now_s: float
) -> Decision | None:
    """`left`: of the busiest rank's work; `busy_s`: what that takes now, and `since_s`: since
    when."""
    plan = state.plan
    assert plan is not None
    gain, share = 1 - left, _share(state, busy_s)
    units = speeds.estimates(state)
    error = max(units[worker].error for worker in plan.ranks)
    sure = 1 - left * (1 + 2 * BAND + error)
    if gain < GAIN or sure < share_rebalance.SURE:
        return None
    lost_s = (now_s - since_s) * gain * share
    price_s = _price_s(state)
    if now_s < (worth_s := since_s + price_s / (gain * share)):
        return Decision(wake_at_s=worth_s)
    resume = recovery.live(state)
    placed = transition_cost.placed(state, choice, resume)
    moved_s = transition_cost.predicted_s(state, placed, resume)
    pause_s = max(drain.lead_of(state).pause_s, moved_s)
    gained_s = gain * share * stay_s(state)
    if gained_s < drain.WORTH * pause_s:
        return None
    used = {worker.node_id for worker in choice.ranks}
    out = [name for name in plan.nodes if name not in used]
    if len(out) > 1:
        return None
    late_s = (
        max((units[worker].since_s for worker in plan.ranks if worker.node_id in out), default=0.0)
        + REPLACE_AFTER_S
    )
    if out and now_s < late_s:
        return Decision(wake_at_s=late_s)
    without = f" without node {out[0]}" if out else ""
    why = (
        f"{slow_ones(state, plan, now_s)}; the busiest rank has {gain:.0%} less to do on another "
        f"arrangement{without} ({sure:.0%} at least if what is measured is {2 * BAND:.0%} off), "
        f"which gains {gained_s:.0f} s in the {stay_s(state):.0f} s until the next expected loss "
        f"or the end, for a pause of {pause_s:.1f} s; {lost_s:.0f} s are lost already"
    )
    moved = enter(state, choice, resume, cause="rebalance", why=why)
    # else it idles, until something changes
    given_up = [name for name in out if _may_go(state, name)]
    return replace(moved, actions=(*map(DrainNode, given_up), *moved.actions))


def _may_go(state: State, node_id: str) -> bool:
    """A node of one's own that was slow from the beginning is what there is."""
    node = state.nodes.get(node_id)
    pool = state.pool(node.pool) if node else None
    on_it = [worker for worker in state.speeds if worker.node_id == node_id]
    return pool is not None and (
        pool.market_type != "owned" or any(_became_slow(state, worker) for worker in on_it)
    )


# ---------------------------------------------------------------------- a node that is not worth it


def _slowest(state: State, plan: Plan) -> Node | None:
    """The node of the plan that gets least done beside what its GPUs should, where most others are
    well."""
    slower = speeds.times_slower(state)
    times = speeds.of_nodes(slower, plan.nodes)
    slow = [name for name in times if times[name] >= speeds.SLOW]
    worst = max(times, key=lambda name: times[name])
    if not slow or 2 * len(slow) > len(plan.nodes) or len(plan.nodes) < 2:
        return None
    node = state.nodes.get(worst)
    return node if node is not None and node.status == "prepared" else None


def _replaced(state: State, node: Node | None, now_s: float) -> Decision | None:
    """Leave a node that gives next to nothing, for another one of its pool."""
    plan, pool = state.plan, state.pool(node.pool) if node else None
    if plan is None or node is None or pool is None or not _can_be_had(state, node, now_s):
        return None
    units = speeds.estimates(state)
    on_it = [worker for worker in plan.ranks if worker.node_id == node.node_id]
    mine = [units[worker] for worker in on_it]
    slower = speeds.times_slower(state)
    gives = sum(1 / one.unit_s for one in mine)
    could = sum(slower[worker] / units[worker].unit_s for worker in on_it)
    lasts_s = min(now_s - one.since_s for one in mine)
    try:
        choice = choice_of(state, [other for other in state.available if other != node])
    except InfeasiblePlan:
        return None
    busy_s = load_of(plan, units).busy_s(plan.samples)
    idle = _busy_s(state, plan, choice) <= busy_s * (1 + AS_FAST)
    if (
        lasts_s < REPLACE_AFTER_S
        or not _may_go(state, node.node_id)
        or not (idle or could > MUCH * gives)
    ):
        return None
    every = sum(1 / units[worker].unit_s for worker in plan.ranks)
    gained_s, lost_s = _weighed(state, node, (gives / every, could / every))
    if gained_s <= lost_s or lasts_s * max(0.0, could - gives) / every < _price_s(state):
        return None
    how = (
        "the plan is as fast without it"
        if idle
        else f"it gives {gives / every:.0%} of all that is computed"
    )
    why = (
        f"{speeds.speed_message(state, node.node_id, slower, now_s=now_s)}: {how}; it is left for "
        f"another node of pool {node.pool}, which is expected after "
        f"{hazard.start_s(state, node.pool):.0f} s and gains {gained_s:.0f} s, for {lost_s:.0f} s "
        "of pauses and of its work until then"
    )
    moved = enter(state, choice, recovery.live(state), cause="rebalance", why=why)
    return replace(moved, actions=(DrainNode(node.node_id), *moved.actions))


def _became_slow(state: State, worker: WorkerId) -> bool:
    windows = state.speeds[worker]
    return min(window.unit_s for window in windows) * speeds.SLOW < windows[-1].unit_s


def _weighed(state: State, node: Node, parts: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the run that another node gains, and that it costs. `parts`: of all that is
    computed, what the node gives and what it could. The other one lasts as long as nodes of the
    pool do, or to the end of the job."""
    gives, could = parts
    start_s, per_h = hazard.start_s(state, node.pool), hazard.reclaims_per_node_h(state, node.pool)
    rest_s = state.rest_work * hard_limits.step_s(state)
    stays_s = min(rest_s, 3600 / per_h) - start_s
    pauses_s = 2 * drain.WORTH * drain.lead_of(state).pause_s
    return max(0.0, stays_s) * (could - gives), start_s * gives + pauses_s


def _can_be_had(state: State, node: Node, now_s: float) -> bool:
    pool = state.pool(node.pool)
    if (
        pool is None
        or pool.ends_at_s is not None
        and now_s + hazard.start_s(state, pool.name) >= pool.ends_at_s
    ):
        return False
    if state.keeps_out and node.node_id in state.kept_out:
        return False  # it was left once and came back: its pool has no other
    bad = state.backoff.get(pool.name)
    return (
        not (bad and now_s < bad.until_s)
        and hard_limits.affordable(state, pool, -pool.usd_per_node_h, now_s=now_s) != 0
        and not (state.weighs_rest and hard_limits.too_late(state, pool, now_s=now_s))
    )


def left_for(state: State, nodes: Sequence[Node], now_s: float) -> dict[str, str]:
    """Of nodes that we have left, those that were slow -> why."""
    slower = speeds.times_slower(state)
    left = [node.node_id for node in nodes if node.node_id in state.given_up]
    worst = speeds.of_nodes(slower, left)
    return {
        name: speeds.speed_message(state, name, slower, now_s=now_s)
        for name in left
        if worst[name] >= speeds.SLOW
    }
