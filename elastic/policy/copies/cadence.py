"""When to copy to peers and when to durable storage; and when a running plan should change that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, sqrt

from elastic.policy.copies.replica_placement import Copies
from elastic.policy.pools.hazard import losses_by_pool_per_h
from elastic.policy.state.state import State
from elastic.text import n_of
from elastic.types import Decision, Node, SetCadence, StoreCopy

PEER_SHARE = 0.01  # of the step time
PEER_UNMEASURED = 5
BURST_BYTES = 8 << 20  # go unpaced (elastic/worker/state/replica_stream.py)
DURABLE_LEAST, DURABLE_UNMEASURED, DURABLE_ALONE, DURABLE_COPIES = 20, 20, 10, 4
# where steps are long: at least so far apart, and times what storing one takes
DURABLE_LEAST_S, DURABLE_TIMES = 60.0, 2.0
STALL_UNMEASURED_S = 0.5
FIRST_COPY_S = 240.0  # of steps without any checkpoint, after which one is taken
CHANGE_FACTOR = 1.5  # another cadence is ordered when the best one differs by more
# measured, and passed, since the plan was entered or changed last
CHANGE_COPIES, CHANGE_WAIT_S = 3, 10.0


def peer_every(state: State, nodes: Sequence[Node], copies: Copies) -> int:
    """Steps between peer replicas of a new plan; 0 when nobody keeps them."""
    if not copies.to:
        return 0
    wanted = state.job.peer_every
    if wanted != "auto":
        return wanted
    flight_s = (
        max(0, copies.n_bytes - BURST_BYTES) / copies.bytes_per_s if copies.bytes_per_s else 0.0
    )
    n_nodes = Counter(node.pool for node in nodes)
    return best_every(state, n_nodes, copy_cost_s(state), flight_s=flight_s)


def copy_cost_s(state: State) -> float:
    """What a peer replica costs the run, as measured: steps that waited for it, and steps that ran
    slower; 0 = not measured."""
    return state.copy_stall_s + state.copy_slowed_s


def best_every(state: State, n_nodes: Mapping[str, int], cost_s: float, *, flight_s: float) -> int:
    """The smallest number of steps that keeps copies under 1 % of the step time, but no more than
    the losses to be expected of so many nodes of each pool make worth while: sqrt(2 x cost x mean
    time between losses) (Young 1974); and not before a copy has crossed the wire."""
    step_s = state.step_time_s
    if not step_s:
        return PEER_UNMEASURED
    wire = ceil(flight_s / step_s)
    if not cost_s:
        return max(PEER_UNMEASURED, wire)
    share = ceil(cost_s / (PEER_SHARE * step_s) - 1e-9)
    losses_per_h = max(1e-9, losses_by_pool_per_h(state, n_nodes))
    worth = round(sqrt(2 * cost_s * 3600 / losses_per_h) / step_s)
    return max(1, wire, min(share, worth))


def durable_every(state: State, nodes: Sequence[Node], alone: bool = False) -> int:
    """Steps between checkpoints: sqrt(2 x stall x mean time between losses) (Young 1974, Daly
    2006), at least 20 steps and at most a quarter of the job; at most 10 when no other node holds a
    copy (`alone`, or there is one node only)."""
    wanted = state.job.durable_every
    if wanted != "auto":
        return wanted
    every = DURABLE_UNMEASURED
    if state.step_time_s:
        stall_s = state.durable_stall_s or STALL_UNMEASURED_S
        losses_per_h = losses_by_pool_per_h(state, Counter(node.pool for node in nodes))
        interval_s = sqrt(2 * stall_s * 3600 / max(1e-9, losses_per_h))
        every = max(
            _durable_least(state),
            min(round(interval_s / state.step_time_s), state.steps // DURABLE_COPIES),
        )
    return (
        min(every, DURABLE_ALONE) if alone or len({node.node_id for node in nodes}) < 2 else every
    )


def _durable_least(state: State) -> int:
    """The market takes many nodes at once, and their replicas with them: what is done again then is
    what lies between two checkpoints, and 20 long steps are much."""
    if not state.spends_slack:
        return DURABLE_LEAST
    apart_s = max(DURABLE_LEAST_S, DURABLE_TIMES * state.durable_s)
    return max(1, min(DURABLE_LEAST, ceil(apart_s / state.step_time_s)))


# -------------------------------------------------------------------------------- while a plan runs


def first(state: State) -> Decision | None:
    """The first checkpoint of a run is taken while what has been done would still be done again
    from the start (recovery.REDO_S), however long its steps and its cadence are."""
    plan, step_s = state.plan, state.step_time_s
    if plan is None or state.durable or not plan.durable_every or not step_s:
        return None
    asked = state.copy_asked_step
    since = state.step - (asked if asked <= state.step else 0)  # it may have gone back since
    to_next = plan.durable_every - state.step % plan.durable_every
    if since * step_s < FIRST_COPY_S or to_next * step_s < FIRST_COPY_S:
        return None
    text = (
        f"no checkpoint is stored after {state.step * step_s:.0f} s of steps, the next one would "
        f"come in {to_next * step_s:.0f} s: one is taken now"
    )
    return Decision((StoreCopy(plan.generation),), text)


def adjust(state: State, now_s: float) -> Decision | None:
    """Another number of steps between peer replicas for the running plan, when the measured cost
    says so clearly."""
    plan = state.plan
    if plan is None or not plan.copies_to or not plan.peer_every or state.job.peer_every != "auto":
        return None
    if state.n_copies_timed < CHANGE_COPIES or not state.step_time_s or not copy_cost_s(state):
        return None
    since_s = max(state.entered_at_s, state.cadence_at_s)
    if now_s < since_s + CHANGE_WAIT_S:
        return None
    new = _clearly_better(state, plan.peer_every)
    if new is None or state.steps - state.step <= max(new, plan.peer_every):
        return None
    cost_s = copy_cost_s(state)
    share = cost_s / (plan.peer_every * state.step_time_s)
    why = (
        f"peer replicas every {n_of(new, 'step')} instead of {plan.peer_every}: a copy costs "
        f"{cost_s * 1000:.3g} ms and takes {state.copy_flight_s:.3g} s to cross, a step "
        f"{state.step_time_s:.3g} s ({share:.1%} spent on copies)"
    )
    return Decision((SetCadence(plan.generation, new, plan.durable_every),), why)


def _clearly_better(state: State, every: int) -> int | None:
    """A cadence that differs by more than the factor; for more copies also if each cost half as
    much again."""
    nodes, cost_s, flight_s = state.plan_by_pool, copy_cost_s(state), state.copy_flight_s
    fewer = best_every(state, nodes, cost_s, flight_s=flight_s)
    if fewer > CHANGE_FACTOR * every:
        return fewer
    more = best_every(state, nodes, CHANGE_FACTOR * cost_s, flight_s=CHANGE_FACTOR * flight_s)
    return more if CHANGE_FACTOR * more < every else None
