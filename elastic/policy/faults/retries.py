"""Errors are counted apart: of the program (never retried), of a node's processes, of the
infrastructure."""

from __future__ import annotations

from elastic.policy.copies.retention import tried_until_s
from elastic.policy.faults import unreached, unread_data
from elastic.policy.faults.recurring_breaks import stood
from elastic.policy.faults.refused_layouts import unusable_layouts
from elastic.policy.state.state import State

INFRASTRUCTURE_MOST = 5  # in a row without progress
OUTAGE_S = 300.0  # behind progress a failing network is borne for so long, however often tried
SCRIPTS_MOST = 3  # the same for the processes of a script that is restarted
PROCESS_MOST = 3  # replacements per node and hour
DEATHS_MOST = 8  # generations in a row without progress in which a process died, on several nodes
QUARANTINED_LEAST = 2  # times, where there is one node alone
SILENT_MOST = 2  # times that a node stalls, per hour
ROLLBACKS_MOST = 2
LEFT_OUT_MOST = 8  # times in a row that nodes are left out for others that they do not reach
LAYOUTS_MOST = 6  # that compute something else than the one before although they have no new axis


def wait_s(state: State) -> float:
    """How long to wait before the next attempt after an error of the infrastructure: 1, 2, 4, 8, 16
    s; longer for nodes that do not reach each other."""
    if unreached.apart(state):
        return unreached.WAIT_S
    return float(2 ** min(state.retries, 4))


def gave_up(state: State) -> str:
    """Why the run must end now; empty while another attempt is allowed."""
    nodes = tuple(dict.fromkeys(state.deaths))
    if len(state.deaths) >= DEATHS_MOST and (len(nodes) > 1 or _no_other(state, nodes[0])):
        return (
            f"processes died {len(state.deaths)} times in a row, on {', '.join(nodes)}, and no "
            f"step was done past {state.best_step}; the last one: {state.death}"
        )
    if len(state.left_out_behind) > LEFT_OUT_MOST:
        return (
            f"{LEFT_OUT_MOST} times in a row nodes were left out that others do not reach, and no "
            f"step was done past {state.best_step}"
        )
    failure = state.aborting.failure if state.aborting else None
    if failure is None:
        return ""
    most = SCRIPTS_MOST if state.job.restarted else INFRASTRUCTURE_MOST
    waits = failure.at_s < max(
        unreached.waited_until_s(state),
        unread_data.waited_until_s(state),
        tried_until_s(state) or 0.0,
    )
    waits = waits or (
        state.outlasts_breaks
        and not state.job.restarted
        and state.progress_at_s > max(0.0, failure.at_s - OUTAGE_S)
    )
    if failure.cause == "infrastructure" and state.retries >= most and not waits:
        tried = f"{state.retries} attempts in a row made no progress past step {state.best_step}"
        last = f"the last one: {failure.reason}"
        parts = (tried, unreached.waited_for(state), last, stood(state))
        return "; ".join(part for part in parts if part)
    # guards count for themselves
    if failure.cause == "rollback" and state.rollbacks - len(state.rolled_back) > ROLLBACKS_MOST:
        return f"{state.rollbacks} roll-backs; the last one: {failure.reason}"
    if failure.cause == "rollback" and len(unusable_layouts(state)) > LAYOUTS_MOST:
        return (
            f"{len(unusable_layouts(state))} layouts were left in turn; the last one: "
            f"{failure.reason}"
        )
    return ""


def _no_other(state: State, node_id: str) -> bool:
    """Was the node quarantined and had again, since the pools have all the nodes that they can
    have?"""
    full = all(state.alive_by_pool.get(one.name, 0) >= one.max_nodes for one in state.pools)
    times = state.kept_out.get(node_id, (0, 0.0))[0]
    return state.bounds_alone and full and times >= QUARANTINED_LEAST


def worn_out(state: State, node_id: str, now_s: float) -> str:
    """Why the node must not be prepared again; empty while it may."""
    silent = [why for t, why in state.silences.get(node_id, ()) if t > now_s - 3600]
    if len(silent) > SILENT_MOST:
        return (
            f"it stalled {len(silent)} times within an hour, {SILENT_MOST} are borne (the last "
            f"time: {silent[-1]})"
        )
    hour = [t for t in state.process_failures.get(node_id, ()) if t > now_s - 3600]
    if state.tries_again and hour and hour[-1] < state.kept_out.get(node_id, (0, 0.0))[1]:
        hour = []  # it was quarantined for these: the next one is its last
    if len(hour) > PROCESS_MOST:
        return f"{len(hour)} of its processes failed within an hour, {PROCESS_MOST} are replaced"
    short = len(state.short.get(node_id, ()))
    if state.counts_short and short > PROCESS_MOST:
        return f"it was short of memory {short} times in a row, {PROCESS_MOST} are borne"
    return ""
