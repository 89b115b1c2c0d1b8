"""How each order that was given changes the State (the fold of Decided)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.policy import profiling
from elastic.policy.copies.retention import last_copy_late, ordered_removal
from elastic.policy.faults import quarantine, unreached
from elastic.policy.faults.failures import process_failed, set_status, without, without_faults
from elastic.policy.faults.recurring_breaks import recorded
from elastic.policy.pools import drain, hard_limits, hazard
from elastic.policy.speed.speeds import remembered
from elastic.policy.state import formed_groups, in_phase
from elastic.policy.state.layered import less
from elastic.policy.state.state import Aborting, Failure, Request, State
from elastic.types import (
    Abort,
    DrainNode,
    DropGroups,
    EnterPlan,
    FormGroups,
    Plan,
    Prepare,
    Quarantine,
    Quiesce,
    ReleaseNode,
    RemoveCopy,
    RequestFailed,
    RequestNodes,
    RollForward,
    SetCadence,
    SetShares,
    StartProfile,
    Stop,
    StoreCopy,
    WorkerId,
)  # fmt: skip
from elastic.types.replacing import replace

KEPT_LAYOUTS = 200  # as many as there are probes
KEPT_PLANS = 16  # generations whose layout is remembered: holdings of older ones do not exist


def _ordered_nodes(state: State, action: RequestNodes, at_s: float) -> State:
    if action.count == 0:
        asked = state.requests.get(action.request_id)
        if state.withdraws_at_end and hard_limits.about_to_end(state, at_s):  # it has not said no
            return replace(state, requests=less(state.requests, action.request_id))
        waited_s = at_s - asked.at_s if asked else 0.0
        why = f"no answer for {waited_s:.0f} s"
        failed = RequestFailed(action.pool, action.request_id, why)
        return hazard.refused(hazard.unanswered(state, action.pool), failed, at_s=at_s)
    request = Request(action.request_id, action.pool, action.count, at_s)
    return replace(
        state,
        requests={**state.requests, action.request_id: request},
        n_requests=state.n_requests + 1,
    )


def _ordered_release(state: State, action: ReleaseNode, at_s: float) -> State:
    state = replace(state, releasing=state.releasing | {action.node_id})
    node = state.nodes.get(action.node_id)
    if node is None or node.status == "quarantined":
        return state
    return set_status(state, action.node_id, "draining", deadline_s=node.deadline_s)


def _ordered_drain(state: State, action: DrainNode, at_s: float) -> State:
    """The node is going to be left: at the end of its reservation, or at once."""
    node = state.nodes.get(action.node_id)
    if node is None or node.status not in ("pending", "ready", "prepared"):
        return state
    pool = state.pool(node.pool)
    ends_at_s = pool.ends_at_s if pool else None
    if ends_at_s is None:
        alive = frozenset(node.node_id for node in state.alive)
        state = replace(state, given_up=(state.given_up & alive) | {action.node_id})
    return set_status(state, action.node_id, "draining", deadline_s=ends_at_s)


def _ordered_quarantine(state: State, action: Quarantine, at_s: float) -> State:
    node = state.nodes.get(action.node_id)
    if node is None:
        return state
    state = unreached.left_out(state, node.node_id, action.reason, at_s=at_s)
    state = quarantine.ordered(state, action, at_s)
    state = hazard.died(state, node, action.reason, at_s=at_s)
    state = replace(
        set_status(state, action.node_id, "quarantined"), unseen=state.unseen - {action.node_id}
    )
    preparing = {name: t for name, t in state.preparing.items() if name != action.node_id}
    refused = {name: why for name, why in state.refused.items() if name != action.node_id}
    blamed = {name: why for name, why in state.blamed.items() if name != action.node_id}
    faults = without_faults(state, action.node_id)
    state = replace(state, preparing=preparing, refused=refused, blamed=blamed, **faults)
    gone = frozenset(WorkerId(node.node_id, k) for k in range(node.gpus))
    return without(state, gone, f"node {node.node_id} is quarantined: {action.reason}", at_s=at_s)


def _ordered_prepare(state: State, action: Prepare, at_s: float) -> State:
    return replace(state, preparing={**state.preparing, action.node_id: at_s})


def ordered_plan(state: State, action: EnterPlan, at_s: float) -> State:
    plan, failure = action.plan, state.aborting.failure if state.aborting else None
    state = in_phase.entering(_kept_after_all(state, plan), plan)
    follows = f"generation {plan.generation} follows before all ranks had reported"
    state = profiling.ended(state, follows, begun_only=True)
    plans = {**state.plans, plan.generation: plan}
    for generation in sorted(plans)[:-KEPT_PLANS]:
        del plans[generation]
    layouts = {**state.layouts, plan.generation: plan.layout}
    for generation in sorted(layouts)[:-KEPT_LAYOUTS]:
        del layouts[generation]
    retried = failure is not None and failure.cause == "infrastructure"
    if state.job.restarted:
        state = replace(state, asked=None, quiesced=frozenset(), script_ended=frozenset())
    return replace(
        state, phase="entering", target=plan,
        plan=state.plan if plan.resume.source == "live" else None, plans=plans,
        layouts=layouts,
        generation=plan.generation, ordered_at_s=at_s, aborting=None, failure=None, quiescing=None,
        repeat=(), forming=None, considered=tuple(node.node_id for node in state.available),
        retries=state.retries + retried, retry_step=max(state.retry_step,
        state.best_step) if retried else state.retry_step, shares_ordered=None,
        stages_moved=remembered(state.stages_moved, state,
        at_s) if plan.cause == "rebalance" else state.stages_moved,
    )  # fmt: skip


def _kept_after_all(state: State, plan: Plan) -> State:
    """Nodes that were to be left for others, and that a later plan uses again since these are
    gone: there like any other."""
    if not state.keeps_left:
        return state
    for node in drain.given_up(state):
        if node.deadline_s is None and node.node_id in plan.workers_per_node:
            state = set_status(state, node.node_id, "prepared")
            state = replace(state, given_up=state.given_up - {node.node_id})
    return state


def _ordered_abort(state: State, action: Abort, at_s: float) -> State:
    if state.repeat and state.failure is None:
        return replace(state, repeat=())
    killed = frozenset(action.kill)
    if state.aborting:
        for worker in sorted(killed):
            state = process_failed(
                state, worker, f"worker {worker} did not answer the abort", at_s=at_s
            )
        return state
    failure = state.failure or Failure(
        "infrastructure", f"generation {action.generation} was aborted", at_s
    )
    done = state.phase == "running" and 0 < state.steps <= state.step
    if state.awaits_last and done and state.failure is None:
        # only to store its last step anew: what counts is how often that was tried
        state = last_copy_late(state, action.generation, at_s=at_s)
        failure = replace(failure, cause="loss")
    owing = frozenset(worker for worker in state.members - killed if state.lives(worker))
    breaks = recorded(state, failure) if state.failure else state.breaks
    aborted = f"generation {action.generation} is aborted: {failure.reason}"
    state = profiling.ended(state, aborted, begun_only=True)
    state = replace(
        state, phase="waiting", plan=None, target=None, failure=None, quiescing=None, repeat=(),
        forming=None, aborting=Aborting(action.generation, at_s, owing, failure),
        breaks=breaks, stood={},
    )  # fmt: skip
    for worker in sorted(killed):
        state = process_failed(state, worker, failure.reason, at_s=at_s)
    return state


def _ordered_forward(state: State, action: RollForward, at_s: float) -> State:
    if state.aborting is None:
        return state
    owing = frozenset(
        worker
        for worker, step in state.pending.items()
        if step == action.step and state.lives(worker)
    )
    return replace(state, aborting=replace(state.aborting, forward=action, owing=owing, at_s=at_s))


def _ordered_quiesce(state: State, action: Quiesce, at_s: float) -> State:
    asked = action if state.job.restarted else None
    return replace(state, quiescing=(action.generation, at_s), repeat=(), asked=asked)


def _ordered_copy(state: State, action: StoreCopy, at_s: float) -> State:
    """Of a generation whose nodes leave one such checkpoint is enough."""
    state = replace(state, copy_asked_step=state.step)
    leaves = any(
        (node := state.nodes.get(name)) and node.status == "draining" for name in state.member_nodes
    )
    return replace(state, stored_generation=action.generation) if leaves else state


def _ordered_cadence(state: State, action: SetCadence, at_s: float) -> State:
    plan = state.plan
    if plan is None or plan.generation != action.generation:
        return state
    plan = replace(plan, peer_every=action.peer_every, durable_every=action.durable_every)
    return replace(
        state,
        plan=plan,
        plans={**state.plans, plan.generation: plan},
        cadence_at_s=at_s,
        n_copies_timed=0,
    )


def _ordered_shares(state: State, action: SetShares, at_s: float) -> State:
    return replace(
        state,
        shares_ordered=(action, at_s),
        shares_moved=remembered(state.shares_moved, state, at_s),
    )


def _ordered_stop(state: State, action: Stop, at_s: float) -> State:
    state = profiling.ended(state, f"the run has ended: {action.reason}")
    return replace(state, phase=action.outcome, outcome_reason=action.reason)


ORDERS: dict[type, Callable[[State, Any, float], State]] = {
    RequestNodes: _ordered_nodes, ReleaseNode: _ordered_release, Quarantine: _ordered_quarantine,
    Prepare: _ordered_prepare, EnterPlan: ordered_plan, Abort: _ordered_abort,
    Quiesce: _ordered_quiesce, StoreCopy: _ordered_copy, Stop: _ordered_stop,
    SetCadence: _ordered_cadence, DrainNode: _ordered_drain, RemoveCopy: ordered_removal,
    RollForward: _ordered_forward, SetShares: _ordered_shares, FormGroups: formed_groups.ordered,
        DropGroups: formed_groups.dropped, StartProfile: profiling.ordered,
}  # fmt: skip
