"""decide(state, now_s) -> Decision: what to do now, and why. A function of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from elastic.errors import ElasticError, InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.policy import (
    forming_groups,
    phases,
    profiling,
    restarts,
    stopping,
    transition_cost,
)  # fmt: skip
from elastic.policy.copies import cadence, recovery
from elastic.policy.copies.retention import retention
from elastic.policy.faults import corruption, quarantine, retries, unreached
from elastic.policy.faults.left_out import left_out, newcomer
from elastic.policy.plans import choice_of, enter, from_where, never, with_rehearsals
from elastic.policy.pools import drain, hard_limits, hazard, unsaved
from elastic.policy.pools.node_orders import (
    capacity,
    missing_capacity,
    potential,
    together,
    wound_up,
)
from elastic.policy.pools.release import back_to_spot
from elastic.policy.speed import relayout, share_rebalance
from elastic.policy.state.state import ENDED, State
from elastic.text import n_of
from elastic.types import (
    Abort,
    Cause,
    Decision,
    DrainNode,
    EnterPlan,
    Node,
    Plan,
    Quarantine,
    Quiesce,
    ReleaseNode,
    Resume,
    Stop,
    StoreCopy,
)  # fmt: skip
from elastic.types.replacing import replace

# a survivor that has not answered an abort by then is treated as a dead process
QUIESCED_MOST_S = 5.0
# NCCL aborts up to seven communicators of a rank and takes them down, each bounded by 10 s
QUIESCED_ON_GPUS_MOST_S = 30.0
# the last resort: workers report what goes wrong long before, and once a minute that they load
ENTER_MOST_S = 600.0
ATTACH_MOST_S = 30.0
START_WAIT_S, GROWTH_WAIT_S = 10.0, 2.0  # for nodes that are being prepared, after the last one was
DEADLINE_MARGIN_S = 10.0
CAUSES: dict[str, Cause] = {
    "loss": "loss",
    "infrastructure": "loss",
    "infeasible": "infeasible",
    "rollback": "rollback",
}


def decide(state: State, now_s: float) -> Decision:
    """What to do now. Acting decisions say why, with numbers; others may say what is waited for."""
    return quarantine.with_times(state, _decided(state, now_s), now_s)


def _decided(state: State, now_s: float) -> Decision:
    """But for how long nodes are quarantined."""
    if state.phase in ENDED or not state.run:
        return Decision()
    if state.unseen:
        return _attaching(state, now_s)
    state = phases.as_resumed(state)
    # else they are of a generation that cannot be entered any more
    if state.repeat and state.failure is None:
        return Decision(
            tuple(state.repeat), "the driver has restarted: its last actions are repeated"
        )
    for rule in (
        stopping.ended,
        _breaking_off,
        corruption.put_aside,
        _waiting_for_survivors,
        left_out,
        _rolling_forward,
        stopping.save_and_stop,
        _entering,
        _starting,
        _running,
    ):
        found = rule(state, now_s)
        if found is not None:
            break
    else:
        found = Decision()
    if any(isinstance(action, Stop) for action in found.actions):
        return found
    wish = stopping.stop_wish(state, now_s)
    plans = [action.plan for action in found.actions if isinstance(action, EnterPlan)]
    taken = {name for plan in plans for name in plan.nodes}
    if wish:
        found = together(found, Decision(wake_at_s=stopping.look_again_s(state, wish, now_s)))
    elif state.stop:
        found = stopping.put_off(state, state.stop, found)
    elif state.awaits_last and state.rest_steps <= 0:
        times = [at_s for at_s in hard_limits.wakes(state, now_s) if at_s > now_s]
        found = together(found, Decision(wake_at_s=min(times, default=None)))
    if wish or state.stop or (state.phase == "running" and state.rest_steps <= 0):
        return together(found, wound_up(state, now_s, taken, mends=not wish and bool(state.stop)))
    found = found if state.away else together(found, retention(state))
    look = Decision(wake_at_s=min(hard_limits.wakes(state, now_s), default=None))
    orders = capacity(state, now_s, taken if state.keeps_left else ())
    return together(found, with_rehearsals(state, orders), look)


# ------------------------------------------------------------------------------------------- losses


def _attaching(state: State, now_s: float) -> Decision:
    """A driver that came back: nothing is done until the nodes that were there have been heard
    of."""
    bound_s = state.attached_at_s + ATTACH_MOST_S
    names = sorted(state.unseen)
    if now_s < bound_s:
        return Decision(
            (),
            f"the driver has restarted and waits for {n_of(len(names), 'node')} to report: "
            f"{', '.join(names)}",
            bound_s,
        )
    why = f"no report for {ATTACH_MOST_S:.0f} s since the driver has restarted"
    orders = tuple(order for name in names for order in (Quarantine(name, why), ReleaseNode(name)))
    return Decision(orders, f"{', '.join(names)}: {why}, counted as lost")


def _breaking_off(state: State, now_s: float) -> Decision | None:
    failure = state.failure
    if failure is None:
        return None
    if failure.cause == "program":
        return restarts.verdict(failure, now_s)
    survivors = [worker for worker in state.members - set(failure.kill) if state.lives(worker)]
    copy = f"newest peer replica: step {state.peer.step}" if state.peer else "no peer replica"
    text = (
        f"generation {state.generation} is aborted after step {state.step}: {failure.reason}; "
        f"{len(survivors)} of {len(state.members)} workers are still reachable"
    )
    if not state.job.restarted:
        text += f"; {copy}, checkpoint: step {state.saved_step}"
    return Decision((Abort(state.generation, failure.kill),), text, now_s + _quiesced_most_s(state))


def _quiesced_most_s(state: State) -> float:
    if state.job.restarted:
        return restarts.QUIESCED_MOST_S
    kinds = {pool.accelerator_type for pool in state.pools_of(state.member_nodes)}
    return QUIESCED_MOST_S if kinds <= {"CPU"} else QUIESCED_ON_GPUS_MOST_S


def _waiting_for_survivors(state: State, now_s: float) -> Decision | None:
    if state.aborting is None or not state.aborting.owing:
        return None
    most_s = _quiesced_most_s(state)
    bound_s = state.aborting.at_s + most_s
    n_owing = len(state.aborting.owing)
    if now_s < bound_s:
        return Decision(
            (),
            f"waiting for {n_of(n_owing, 'worker')} to leave generation "
            f"{state.aborting.generation}",
            bound_s,
        )
    owing = tuple(sorted(state.aborting.owing))
    names = ", ".join(str(worker) for worker in owing)
    text = (
        f"{names} did not leave generation {state.aborting.generation} within {most_s:.0f} s: "
        "ended and replaced"
    )
    return Decision((Abort(state.aborting.generation, kill=owing),), text)


def _rolling_forward(state: State, now_s: float) -> Decision | None:
    """Survivors that missed the commit of a step apply it, where that makes the step whole."""
    aborting = state.aborting
    if (
        aborting is None
        or aborting.forward
        or aborting.failure.cause == "rollback"
        or state.phase != "waiting"
    ):
        return None
    order = recovery.forward(state)
    if order is None:
        return None
    n_pending = sum(step == order.step for step in state.pending.values())
    text = (
        f"step {order.step} was committed, and {n_of(n_pending, 'worker')} did not see it: they "
        "apply it to the gradients "
        f"that they hold, so that every part of step {order.step} has a holder"
    )
    return Decision((order,), text, now_s + _quiesced_most_s(state))


# -------------------------------------------------------------------------------------- generations


def _entering(state: State, now_s: float) -> Decision | None:
    if state.phase != "entering":
        return None
    if state.job.restarted:
        return restarts.entering(state, now_s)
    loads = state.heeds_loading and state.loading_at_s > state.ordered_at_s
    bound_s = (state.loading_at_s if loads else state.ordered_at_s) + ENTER_MOST_S
    if now_s < bound_s:
        return Decision(wake_at_s=bound_s)
    since = " of its workers' last progress" if loads else ""
    return Decision(
        (Abort(state.generation),),
        f"generation {state.generation} was not entered within {ENTER_MOST_S:.0f} s{since}",
    )


def _starting(state: State, now_s: float) -> Decision | None:
    """Nothing runs: start, or start again from the newest state there is."""
    if state.phase != "waiting":
        return None
    failure = state.aborting.failure if state.aborting else None
    if failure and failure.cause == "infrastructure" and state.aborting:
        at_s = state.aborting.at_s + retries.wait_s(state)
        if now_s < at_s:
            waited_for = unreached.waited_for(state)
            return Decision(
                (),
                f"attempt {state.retries + 2} after {retries.wait_s(state):.0f} s: "
                f"{failure.reason}" + (f"; {waited_for}" if waited_for else ""),
                at_s,
            )
    try:
        choice = _startable(state, now_s)
    except InfeasiblePlan as error:
        return _not_yet(state, error, now_s)
    first = failure is None and state.generation == 0 and _others_coming(state)
    # another restart would take them in, and a step of few workers is long
    alone = state.job.restarted or state.spends_slack
    first = first or (alone and _others_starting(state))
    if first and now_s < state.prepared_at_s + START_WAIT_S:
        wait = (
            f"{n_of(choice.layout.world_size, 'worker')} prepared; more are joining: waiting "
            f"up to {START_WAIT_S:.0f} s"
        )
        return Decision((), wait, state.prepared_at_s + START_WAIT_S)
    try:
        newest = recovery.newest(state)
    except ElasticError as error:
        return stopping.stop("failed", f"{type(error).__name__}: {error}")
    if state.away and newest.source in ("durable", "fresh"):
        return Decision((), f"waits to begin from {from_where(newest)}: {stopping.away(state)}")
    resume = recovery.comparable(state, choice.layout, newest)
    choice = _told(state, choice, resume, now_s=now_s)
    cause = CAUSES[failure.cause] if failure else "start"
    if failure is None and state.asked is not None:
        cause = state.asked.cause or cause
    why = failure.reason if failure else n_of(len(state.available), "node") + " prepared"
    why = f"rolled back: {why}" if cause == "rollback" else why
    n_back = state.step - resume.step
    back = f", {n_of(n_back, 'step')} back" if n_back > 0 else ""
    if resume is not newest:
        back += (
            f" (not step {newest.step}: nothing is known there that would tell whether "
            f"{choice.layout} computes the same)"
        )
    if stopping.only_saves(state, now_s):
        back += ", to save it: in whatever layout these nodes can enter"
    begun = f": {from_where(resume)}{back}" if not state.job.restarted else ""
    return enter(state, choice, resume, cause=cause, why=f"{why}{begun}")


def _startable(state: State, now_s: float) -> Choice:
    """With the nodes that may be used; where these are too few, also with those that were to be
    left for others; and where nothing but a save is to come, in a layout that the job does not
    name."""
    nodes, given_up = drain.usable(state, now_s), drain.given_up(state)
    tries = [(state, nodes), *([(state, (*nodes, *given_up))] if given_up else [])]
    if stopping.only_saves(state, now_s):
        tries.append((stopping.in_any_layout(state), tries[-1][1]))
    for asked, there in tries[:-1]:
        with suppress(InfeasiblePlan):
            return choice_of(asked, there)
    return choice_of(*tries[-1])


def _told(state: State, choice: Choice, resume: Resume, *, now_s: float) -> Choice:
    """Without axes of which nothing would tell whether they compute the same: those that cut the
    model or its sequences, where there is any other layout; dp, which cuts the samples alone, where
    one on as many workers would be told."""
    unknown = recovery.unknown_axes(state, choice.layout, resume)
    cuts = {axis: why for axis, why in unknown.items() if axis != "dp"}
    found = choice = (_without(state, cuts, now_s) if cuts else None) or choice
    axes: dict[str, str] = {}
    while unknown := recovery.unknown_axes(state, found.layout, resume):
        axes |= unknown
        other = _without(state, axes, now_s)
        if other is None or other.layout.world_size < choice.layout.world_size:
            return choice
        found = other
    return found


def _without(state: State, axes: Mapping[str, str], now_s: float) -> Choice | None:
    """A choice that does without these axes; None where there is none on as many nodes."""
    try:
        return _startable(replace(state, unusable={**axes, **state.unusable}), now_s)
    except InfeasiblePlan:
        return None


def _others_coming(state: State) -> bool:
    return bool(state.requests) or _others_starting(state)


def _others_starting(state: State) -> bool:
    return bool(state.preparing or state.by_status.get("ready"))


def _not_yet(state: State, error: InfeasiblePlan, now_s: float) -> Decision:
    """Too few nodes: wait, unless no number of nodes would do, or the budget buys none."""
    if (none := never(state, potential(state))) is not None:
        return stopping.stop("failed", f"InfeasiblePlan: {none}")
    if why := hazard.in_vain(state):
        return stopping.stop(
            "failed",
            f"{why}; step {state.step} reached, last checkpoint at step {state.saved_step}",
        )
    why = "" if _others_coming(state) else hard_limits.nothing_to_buy(state, now_s)
    if why:
        return stopping.stop(
            "stopped",
            f"{why}; {error}; step {state.step} reached, last checkpoint at step "
            f"{state.saved_step}",
        )
    parts = (f"waiting for workers: {error}", missing_capacity(state))
    return Decision((), "; ".join(part for part in parts if part))


def _running(state: State, now_s: float) -> Decision | None:
    plan = state.plan
    if plan is None:
        return None
    if state.rest_steps <= 0:
        return stopping.finishing(state, now_s)
    if state.job.restarted:
        return (
            restarts.running(state, now_s) or back_to_spot(state, now_s) or _growing(state, now_s)
        )
    going = {node.node_id: node for node in state.draining}
    leaving = [going[name] for name in plan.nodes if name in going] if going else []
    if not leaving and (wait := forming_groups.waiting(state, now_s)):
        return wait
    found = newcomer(state, now_s) or phases.next_phase(state, now_s, bool(leaving))
    if found is None and leaving:
        found = _with_notice(state, now_s, leaving)
    return forming_groups.first(state, now_s, found or _changing(state, now_s, plan))


def _changing(state: State, now_s: float, plan: Plan) -> Decision | None:
    """Nothing has to change, and what may is looked at."""
    if state.quiescing:
        done = state.quiesced >= plan.workers
        return (
            Decision((Abort(state.generation),), "the notice was withdrawn: continues")
            if done
            else Decision()
        )
    more = back_to_spot(state, now_s) or _growing(state, now_s)
    refused = more is not None and not more.actions and more.wake_at_s is None
    if more is None or (refused and state.weighs_rest):
        moved = share_rebalance.shares(state, now_s) or relayout.rearranged(state, now_s)
        more = together(more, moved) if more and moved else more or moved
    return (
        more
        if more is not None and more.actions
        else together(
            more or Decision(),
            profiling.begun(state)
            or cadence.first(state)
            or unsaved.saved(state)
            or cadence.adjust(state, now_s)
            or Decision(),
        )
    )


def _with_notice(state: State, now_s: float, leaving: Sequence[Node]) -> Decision:
    """Nodes of the plan will be preempted. They train on until a transition must begin; that one
    leaves them, and takes in whoever has been prepared by then. Nodes with a later deadline stay
    where that is worth one more transition."""
    assert state.plan is not None
    names = ", ".join(node.node_id for node in leaving)
    deadline_s = min(node.deadline_s or now_s for node in leaving)
    left = f"{names} will be preempted in {max(0.0, deadline_s - now_s):.0f} s"
    if state.quiescing:
        text = f"{left}; generation {state.plan.generation} is saved"
        # it may never be taken: nobody waits for that
        if state.quiesced >= state.plan.workers and _enough(state):
            return Decision(
                (Abort(state.generation),),
                f"{text}, and other nodes are there: continues with these",
            )
        return Decision((), f"{text} and waits for other nodes")
    act_s = drain.act_at_s(state, leaving, now_s)
    stay = drain.kept(state, max(now_s, act_s))
    try:
        choice = choice_of(state, (*state.available, *stay))
    except InfeasiblePlan as error:
        if state.spends_slack and all(_left_by_us(state, node) for node in leaving):
            return Decision((), f"{names} trains on, and is left when others are there; {error}")
        return _save_before(state, now_s, deadline_s, why=f"{left}; {error}")
    lead = drain.lead_of(state)
    near_s = deadline_s - drain.NEAR * lead.seconds
    if near_s <= now_s < act_s:
        live = recovery.live(state)
        placed = transition_cost.placed(state, choice, live)
        lead = drain.lead_of(state, transition_cost.predicted_s(state, placed, live))
        act_s = deadline_s - lead.seconds
    if now_s < act_s:
        text = f"{names} will be preempted: trains on until {lead.seconds:.1f} s before ({lead})"
        form_s = act_s - forming_groups.FORM_MOST_S
        wait = Decision((), text, near_s if now_s < near_s else act_s)
        if now_s >= form_s and forming_groups.missing(state):
            moved = enter(state, choice, recovery.live(state), cause="notice", why=text)
            if formed := forming_groups.begun(state, moved):
                wait = Decision(
                    formed,
                    f"{text}; the groups of generation {state.generation + 1} are made now",
                    wait.wake_at_s,
                )
        elif now_s < form_s and state.forms_ahead:
            wait = replace(wait, wake_at_s=min(form_s, wait.wake_at_s or form_s))
        return _growing(state, now_s, act_s) or wait
    more = f", but {', '.join(node.node_id for node in stay)} stays for a while" if stay else ""
    moved = enter(
        state,
        choice,
        recovery.live(state),
        cause="notice",
        why=f"{left}: resharding from live memory at the next step{more}",
    )
    used = {
        name
        for action in moved.actions
        if isinstance(action, EnterPlan)
        for name in action.plan.nodes
    }
    # in Ray too: there is no way back now
    gone = tuple(DrainNode(node.node_id) for node in leaving if node.node_id not in used)
    return replace(moved, actions=(*gone, *moved.actions))


def _left_by_us(state: State, node: Node) -> bool:
    """Nobody takes it: it was to be left for others, and these were taken before they stood in."""
    return node.deadline_s is None and node.node_id in state.given_up


def _enough(state: State) -> bool:
    """Is there a plan for the nodes without a notice?"""
    try:
        choice_of(state, state.available)
    except InfeasiblePlan:
        return False
    return True


def _save_before(state: State, now_s: float, deadline_s: float, *, why: str) -> Decision:
    """The nodes that stay are too few: store a copy now, and stop with another one just before the
    deadline."""
    assert state.plan is not None
    generation, margin_s = state.plan.generation, max(DEADLINE_MARGIN_S, hard_limits.save_s(state))
    last_s = deadline_s - margin_s
    if now_s >= last_s:
        return Decision((Quiesce(generation, save=True),), f"{why}; saved at the next step")
    if state.stored_generation != generation:
        return Decision((StoreCopy(generation),), f"{why}; a checkpoint is taken now", last_s)
    return Decision((), f"{why}; continues until {margin_s:.0f} s before", last_s)


def _growing(state: State, now_s: float, act_s: float | None = None) -> Decision | None:
    """Nodes were prepared while the plan runs: one transition for all that are there. `act_s`: when
    nodes with notice are going to be left; the new ones wait for that, unless it costs more than
    one more pause."""
    plan = state.plan
    assert plan is not None
    if state.available_names == state.considered or state.rest_steps <= 1:
        return None
    nodes = drain.usable(state, now_s)
    new = [node.node_id for node in nodes if node.node_id not in plan.workers_per_node]
    if not new or sum(node.gpus for node in nodes) <= plan.layout.world_size:
        return None
    if state.preparing and now_s < state.prepared_at_s + GROWTH_WAIT_S:
        bound_s = state.prepared_at_s + GROWTH_WAIT_S
        return Decision(wake_at_s=bound_s if act_s is None else min(act_s, bound_s))
    try:
        choice = choice_of(state, nodes)
    except InfeasiblePlan:
        return None
    gpus, old = choice.layout.world_size, plan.layout.world_size
    if gpus <= old:
        return None
    if state.job.restarted and (wait := restarts.too_soon(state, now_s)):
        return wait
    why = f"{', '.join(new)} can join {n_of(len(plan.ranks), 'worker')}"
    if act_s is None and state.weighs_rest and hard_limits.gains_little(state, old, gpus):
        text = f"{why} too late: the pause would be longer than what is gained until the end"
        return Decision((), text)
    if act_s is not None:
        gain, price = ((gpus - old) * (act_s - now_s), drain.price_gpu_s(state, gpus))
        if gain <= price:
            text = (
                f"{why} when the nodes with notice are left: sooner would gain {gain:.0f} "
                f"GPU-seconds and cost {price:.0f}"
            )
            return Decision((), text, act_s)
        why = (
            f"{why} now: {gain:.0f} GPU-seconds gained until the nodes with notice are left, for "
            f"{price:.0f}"
        )
    return enter(state, choice, recovery.live(state), cause="growth", why=why)
