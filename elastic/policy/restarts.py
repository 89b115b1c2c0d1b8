"""A script that is restarted: how one group of its processes follows the other.

It has no profile and no copies, and no key says how many steps it has. Its only layout is
dp_replicate, one process per worker. A change ends the group that runs (Quiesce: SIGTERM, and time
to save); when all of it has ended the next one begins, and resumes from what the script has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.policy.pools import drain, hazard
from elastic.policy.state.state import Failure, State
from elastic.text import n_of
from elastic.types import (
    Abort,
    Cause,
    Decision,
    EnterPlan,
    GroupRan,
    Layout,
    Node,
    Plan,
    Quiesce,
    Quiesced,
    Resume,
    ScriptEnded,
    Stop,
    WorkerId,
)
from elastic.types.replacing import replace

GRACE_S = 30.0  # from SIGTERM to SIGKILL
LEAVE_MOST_S = 10.0  # beyond it, until all have said that they are gone
START_S = 300.0  # default of the time in which a group has to meet
FIRST_STEP_MOST_S = 120.0  # since it has met, until rank 0 says where it continues
VERDICT_S = 4.0  # after a rank's error: is a node gone, or is it the script's own?
SETTLED_S = 60.0  # a group that has run so long was not ended by what ended the one before
QUIESCED_MOST_S = 10.0  # for the end of a group that is broken: SIGTERM, 3 s, SIGKILL
KEPT_PAUSES = 9


# --------------------------------------------------------------------------------------- the layout


def in_order(state: State, nodes: Sequence[Node]) -> list[Node]:
    """Those of the newest plan first, so that ranks stay where they are."""
    newest = state.plans.get(state.generation)
    others = {node.node_id: node for node in nodes}
    stay = [others.pop(name) for name in newest.nodes if name in others] if newest else []
    return [*stay, *others.values()]


def choice(state: State, nodes: Sequence[Node]) -> Choice:
    """All workers of these nodes, up to max_workers. Raises InfeasiblePlan."""
    least, most = state.job.min_workers, state.job.max_workers
    workers = [
        WorkerId(node.node_id, k) for node in in_order(state, nodes) for k in range(node.gpus)
    ]
    if len(workers) < least:
        raise InfeasiblePlan(f"{len(workers)} of {least} required (min_workers)")
    ranks = tuple(workers[:most])
    return Choice(Layout(dp_replicate=len(ranks)), ranks, (), (), 1, memory_bytes=0)


def entered(state: State, chosen: Choice, resume: Resume, *, cause: Cause, why: str) -> Decision:
    """The next group; where one runs, that is ended first."""
    n = n_of(len(chosen.ranks), "worker")
    if state.plan is not None:
        if cause == "growth" and (dear := _too_dear(state, chosen)):
            return Decision((), f"{why}: {dear}")
        text = (
            f"{why}: every rank gets SIGTERM, and at most {GRACE_S:.0f} s later SIGKILL; then the "
            f"script starts on {n}"
        )
        return Decision((Quiesce(state.plan.generation, grace_s=GRACE_S, cause=cause),), text)
    used = {worker.node_id for worker in chosen.ranks}
    prices = {pool.name: pool.usd_per_node_h for pool in state.pools}
    usd_per_h = sum(
        prices.get(node.pool, 0.0) for node in state.nodes.values() if node.node_id in used
    )
    plan = Plan(
        state.generation + 1, chosen.layout, chosen.ranks, (), (),
        resume=resume, cause=cause, usd_per_h=usd_per_h,
    )  # fmt: skip
    again = "" if resume.source == "fresh" else " anew; it resumes from its own checkpoint"
    price = f", ${usd_per_h:.2f}/h" if usd_per_h else ""
    where = f"{n} of {n_of(len(used), 'node')}{price}"
    text = f"{why}; generation {plan.generation}: the script starts on {where}{again}"
    return Decision((EnterPlan(plan),), text)


def _too_dear(state: State, chosen: Choice) -> str:
    """Why more workers are not worth the restart that takes them in; '' = they are: what they do
    until a node is expected to be taken is more than what all lose by it."""
    assert state.plan is not None
    world = chosen.layout.world_size
    used = {worker.node_id for worker in chosen.ranks}
    per_h = hazard.reclaims_per_h(state, [n for n in state.nodes.values() if n.node_id in used])
    gain = (world - state.plan.layout.world_size) * 3600 / per_h if per_h else float("inf")
    price = drain.price_gpu_s(state, world)
    if gain > price:
        return ""
    return (
        f"a restart costs {price:.0f} GPU-seconds, and {gain:.0f} would be gained until the next "
        "reclaim"
    )


def too_soon(state: State, now_s: float) -> Decision | None:
    """A group runs at least as long as the restart took that it began with."""
    at_s = state.entered_at_s + drain.lead_of(state).pause_s
    return Decision(wake_at_s=at_s) if now_s < at_s else None


# ---------------------------------------------------------------------------------------- decisions


def entering(state: State, now_s: float) -> Decision | None:
    """A group that does not meet in time is wrong input: no other start of it would."""
    target = state.target
    assert target is not None
    if state.quiescing:
        return leaving(state, now_s)
    if noticed := _noticed(state, target, now_s):
        return noticed
    met = state.busy_at_s >= state.ordered_at_s
    bound_s = (
        state.busy_at_s + FIRST_STEP_MOST_S if met else state.ordered_at_s + start_most_s(state)
    )
    if now_s < bound_s:
        return Decision(wake_at_s=bound_s)
    if met:
        text = f"generation {target.generation} was not entered within {FIRST_STEP_MOST_S:.0f} s"
        return Decision((Abort(target.generation),), text)
    text = (
        f"the script did not start its process group on {len(target.ranks)} ranks within "
        f"{start_most_s(state):.0f} s: it must call torch.distributed.init_process_group() "
        "with the environment that torchrun sets (RANK, MASTER_ADDR ...); a slow start needs "
        f"a larger max_silence_s {state.job.keys_in}"
    )
    return Decision((Stop("failed", text),), text)


def start_most_s(state: State) -> float:
    return state.job.max_silence_s or START_S


def never_met(state: State) -> bool:
    """Has the run failed since a group did not meet?"""
    return state.phase == "failed" and state.target is not None and state.failure is None


def running(state: State, now_s: float) -> Decision | None:
    """A notice, or the end of the group, which is waited for; None = nothing has to change."""
    plan = state.plan
    assert plan is not None
    return _noticed(state, plan, now_s) or (leaving(state, now_s) if state.quiescing else None)


def leaving(state: State, now_s: float) -> Decision | None:
    """The group has been asked to end. One that was noticed may run on, where it does not listen
    for SIGTERM: as long as the node is there, or for good where the notice was withdrawn."""
    asked, quiescing = state.asked, state.quiescing
    if asked is None or quiescing is None:
        return None
    bound_s = quiescing[1] + asked.grace_s + LEAVE_MOST_S
    if now_s < bound_s:
        return Decision(wake_at_s=bound_s)
    if asked.leaving and not state.quiesced:
        return None
    text = f"generation {asked.generation} has not ended {now_s - quiescing[1]:.0f} s after SIGTERM"
    return Decision((Abort(asked.generation),), text)


def _noticed(state: State, plan: Plan, now_s: float) -> Decision | None:
    """Nodes of the group will be preempted: told once for each."""
    nodes = [
        node for name in plan.nodes if (node := state.nodes.get(name)) and node.status == "draining"
    ]
    asked, gone = state.asked, tuple(node.node_id for node in nodes)
    if not nodes or (asked and (not asked.leaving or set(gone) <= set(asked.leaving))):
        return None
    names = ", ".join(gone)
    deadline_s = min(node.deadline_s or now_s for node in nodes)
    act_s = drain.act_at_s(state, nodes, now_s)
    if now_s < act_s:
        text = f"{names} will be preempted: trains on until {drain.SCRIPT_NOTICE_S:.0f} s before"
        return Decision((), text, act_s)
    text = (
        f"{names} will be preempted in {max(0.0, deadline_s - now_s):.0f} s: every rank that has a "
        "handler for SIGTERM gets it, then the script starts on the nodes that stay; one without "
        "a handler runs until the node goes"
    )
    grace_s = max(1.0, deadline_s - now_s - 1.0)
    order = Quiesce(plan.generation, grace_s=grace_s, cause="notice", leaving=gone)
    return Decision((order,), text)


def verdict(failure: Failure, now_s: float) -> Decision:
    """A rank has ended with an error. A lost node would explain it, and is seen soon."""
    at_s = failure.at_s + VERDICT_S
    if now_s < at_s:
        return Decision((), f"{failure.reason}: waits {VERDICT_S:.0f} s for a lost node", at_s)
    text = f"the script itself failed on {failure.reason}; no node was lost"
    return Decision((Stop("failed", text),), text)


# --------------------------------------------------------------------------------------------- fold


def started(state: State, at_s: float) -> State:
    """A group has met: what a restart costs is known better."""
    pause_s = at_s - state.ordered_at_s + state.durable_s
    return replace(state, pauses_s=(*state.pauses_s, pause_s)[-KEPT_PAUSES:])


def left(state: State, event: Quiesced, at_s: float) -> State:
    """Of a group that was asked to end; when all have left it, the next one may begin."""
    group, since = state.target or state.plan, state.quiescing
    if group is None or since is None or event.generation != group.generation:
        return state
    state = replace(state, quiesced=state.quiesced | {event.worker})
    if not state.quiesced >= group.workers or state.failure is not None:
        return state
    took_s = at_s - since[1]
    return replace(
        state, phase="waiting", plan=None, target=None, quiescing=None, quiesced=frozenset(),
        durable_s=took_s if not state.durable_s else 0.5 * (state.durable_s + took_s),
    )  # fmt: skip


def _script_ended(state: State, event: ScriptEnded, at_s: float) -> State:
    if not state.is_current(event.generation):
        return state
    return replace(state, script_ended=state.script_ended | {event.worker})


def _group_ran(state: State, event: GroupRan, at_s: float) -> State:
    settled = state.is_current(event.generation) and at_s - state.entered_at_s > SETTLED_S
    again = settled and (state.retries or state.deaths)
    return replace(state, retries=0, deaths=()) if again else state


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    ScriptEnded: _script_ended,
    GroupRan: _group_ran,
}
