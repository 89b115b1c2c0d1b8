"""How each event changes the State.

Generation is the fencing token: a message counts only when it speaks of the running generation or
of the one being entered. Two facts count whatever their generation: what a worker still holds
(Quiesced), and that a process or node is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastic.config.fingerprint import KEY
from elastic.policy import profiling, restarts, stopping
from elastic.policy.copies.counted_copies import HANDLERS as STORED
from elastic.policy.copies.counted_copies import at_start
from elastic.policy.copies.retention import HANDLERS as COPIES
from elastic.policy.copies.retention import stop_refused
from elastic.policy.faults import refused_layouts, unreached
from elastic.policy.faults.corruption import HANDLERS as SUSPECTS
from elastic.policy.faults.failures import (
    FAILURES,
    computes_else,
    failed,
    infeasible,
    seen,
    set_status,
    tripped,
    without,
    without_faults,
)
from elastic.policy.faults.quiesced_workers import quiesced
from elastic.policy.pools import hard_limits, hazard
from elastic.policy.speed.measured_steps import still_known, with_step
from elastic.policy.speed.move_pace import paced
from elastic.policy.speed.speeds import HANDLERS as SPEEDS
from elastic.policy.speed.speeds import forget
from elastic.policy.state import in_phase
from elastic.policy.state.action_effects import ordered_plan
from elastic.policy.state.formed_groups import HANDLERS as AHEAD
from elastic.policy.state.layered import less
from elastic.policy.state.newest_steps import digested, with_loss
from elastic.policy.state.state import ENDED, Failure, State, StopWish
from elastic.types import (
    Abort,
    DriverStarted,
    DropGroups,
    EnterPlan,
    InstancesSeen,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeWarned,
    Notice,
    NoticeWithdrawn,
    PinningFailed,
    Plan,
    PlanEntered,
    PlanFailed,
    PlansFound,
    PriceSeen,
    Progress,
    Quiesce,
    Quiesced,
    RequestFailed,
    StepDone,
    StopAsked,
    StorageSeen,
    WorkerId,
    redone_as_before,
)  # fmt: skip
from elastic.types.gates import gates_of
from elastic.types.replacing import replace

KEPT_LOST_NODES = 32
KEPT_PAUSES = 9


def billed(state: State, at_s: float) -> State:
    return replace(state, **bill) if (bill := _bill(state, at_s)) else state


def _bill(state: State, at_s: float) -> dict[str, Any]:
    """What changes with time alone, until `at_s`."""
    passed_s = at_s - state.billed_at_s
    if passed_s <= 0:
        return {}
    put_off = state.stop is not None and not state.stop.limit
    put_off = put_off and (
        state.away is not None or stop_refused(state) or hard_limits.awaits_save(state)
    )
    stop = (
        hard_limits.wish(state, at_s)
        if (state.stop is None or put_off) and state.phase not in ENDED
        else None
    )
    return {
        "usd": state.usd + state.usd_per_h * passed_s / 3600, "billed_at_s": at_s,
        "node_s": state.node_s + passed_s * len(state.alive),
        "history": hazard.lived(state, passed_s), "stop": stop or state.stop,
    }  # fmt: skip


def _driver_started(state: State, event: DriverStarted, at_s: float) -> State:
    copies = at_start(state, event)
    durable = copies["durable"]
    model, saved = event.model, durable[0].step if durable else 0
    # its workers have told, and will not do so again
    if event.attached and state.model is not None:
        model = replace(model, sample=model.sample or state.model.sample)
    known: dict[str, Any] = {
        "run": event.run, "epoch": event.epoch, "job": in_phase.job_of(state, event, saved),
        "pools": event.pools, "model": model, "hardware": event.hardware,
        "pool_hardware": event.pool_hardware, **copies, "billed_at_s": at_s,
        "stop": stopping.stop_kept(state, event, at_s), **gates_of(event),
    }  # fmt: skip
    generation = max([state.generation, *(copy.generation for copy in (*durable, *event.durable))])
    if not event.attached:
        first_s = at_s if state.first_started_at_s is None else state.first_started_at_s
        text = state.digests.get(saved) or (durable[0].samples if durable else "")
        return State(
            validation=state.validation,
            lengths=state.lengths,
            measured=still_known(state, event),
            **known,
            started_at_s=at_s,
            generation=generation,
            usd=state.usd,
            digests={saved: text} if text else {},
            distrusted=state.distrusted,
            verified=state.verified,
            wrong=state.wrong,
            first_started_at_s=first_s,
            history={
                name: replace(seen, dry_since_s=None, deaths=0, reclaimed_starts=0)
                for name, seen in state.history.items()
            },
            unusable=state.unusable,
            unrepeatable=state.unrepeatable,
            profiles=profiling.forgotten(state),
            # a script's own checkpoint may be of these steps; nothing else tells of them
            step=state.step if known["job"].restarted else 0,
            best_step=state.best_step if known["job"].restarted else 0,
            **_losses_before(state, event),
        )
    repeat: tuple[EnterPlan | Quiesce | Abort | DropGroups, ...] = ()
    if state.aborting and state.aborting.owing:
        repeat = (Abort(state.aborting.generation),)
        known["aborting"] = replace(state.aborting, at_s=at_s, forward=None)
    elif state.target:
        repeat = (EnterPlan(state.target),)
    elif known["stop"] and not state.job.restarted:
        known["quiescing"] = None  # ordered anew, and saved
    elif state.quiescing:
        repeat = (state.asked or Quiesce(state.quiescing[0]),)
    if state.forming:  # its store was the last driver's
        repeat = (*repeat, DropGroups(state.forming.plan.generation))
    unseen = frozenset(node.node_id for node in state.alive)
    return replace(
        state, **known, generation=generation, unseen=unseen, attached_at_s=at_s, repeat=repeat,
        requests={}, instances={}, preparing={}, releasing=frozenset(), ordered_at_s=at_s,
        forming=None, away=None, being_read="", profiling=profiling.again(state).profiling,
    )  # fmt: skip


def _losses_before(state: State, event: DriverStarted) -> dict[str, Any]:
    """What is known of losses; nothing where the program or the mathematics of the job were changed
    since."""
    if state.job.fingerprint != event.job.get(KEY):
        return {}
    names = ("probes", "probed_in", "compared", "losses", "layouts")
    return {name: getattr(state, name) for name in names}


def _node_ready(state: State, event: NodeReady, at_s: float) -> State:
    node, state = event.node, seen(state, event.node.node_id)
    known = state.nodes.get(node.node_id)
    if known is not None and known.status not in ("lost", "pending"):
        over = known.deadline_s is not None and known.deadline_s < at_s
        if over and state.outlives_notice:  # it was to be taken while no driver listened
            return _notice_withdrawn(state, NoticeWithdrawn(node.node_id), at_s)
        return state
    state = forget(state, node.node_id)
    requests = dict(state.requests)
    asked = next((r for r in requests.values() if r.pool == node.pool), None)
    state = hazard.gave(state, node, asked.at_s if asked else at_s, at_s=at_s)
    if asked and asked.count > 1:
        requests[asked.request_id] = replace(asked, count=asked.count - 1)
    elif asked:
        del requests[asked.request_id]
    backoff = {name: b for name, b in state.backoff.items() if name != node.pool or b.deaths}
    nodes = dict(less(state.nodes, node.node_id))  # at the end: order of arrival
    nodes[node.node_id] = replace(node, status="ready", deadline_s=None)
    dead = frozenset(w for w in state.dead if w.node_id != node.node_id)
    refused = less(state.refused, node.node_id)
    instances = dict(state.instances)
    if (machines := instances.get(node.pool)) and machines.starting:
        instances[node.pool] = replace(machines, starting=machines.starting - 1)
    return replace(
        state, nodes=nodes, instances=instances, requests=requests, backoff=backoff, dead=dead,
        releasing=state.releasing - {node.node_id}, refused=refused, **without_faults(state,
        node.node_id),
    )  # fmt: skip


def _node_prepared(state: State, event: NodePrepared, at_s: float) -> State:
    state, node = seen(state, event.node_id), state.nodes.get(event.node_id)
    if node is None or node.status in ("lost", "quarantined"):
        return state
    state = hazard.started(state, node, at_s)
    state = replace(
        state,
        **in_phase.prepared(state, event),
        lengths=event.lengths or state.lengths,
        prepared=state.prepared | {event.node_id},
        prepared_at_s=at_s,
        preparing=less(state.preparing, event.node_id),
        dead=frozenset(w for w in state.dead if w.node_id != event.node_id),
        short=less(state.short, event.node_id),
        pinned_rounded=state.pinned_rounded - {event.node_id}
        | ({event.node_id} if event.pinned_rounded else set()),
    )
    return state if node.status == "draining" else set_status(state, event.node_id, "prepared")


def _notice(state: State, event: Notice, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.status in ("lost", "quarantined"):
        return state
    pool = state.pool(node.pool)
    if pool is not None and pool.ends_at_s is not None and event.deadline_s >= pool.ends_at_s:
        # it was known, and is no hazard
        state = replace(state, n_notices=state.n_notices + (node.status != "draining"))
    elif not hazard.announced(state, node):
        state = hazard.taken(
            replace(state, n_notices=state.n_notices + 1), node, lost=False, known=False, at_s=at_s
        )
        if state.bounds_reclaims:
            died = hazard.died(state, node, "it had a notice", at_s=at_s, reclaimed=True)
            state = replace(died, born=state.born)  # the notice may be withdrawn
    return set_status(state, event.node_id, "draining", deadline_s=event.deadline_s)


def _notice_withdrawn(state: State, event: NoticeWithdrawn, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.status != "draining" or event.node_id in state.releasing:
        return state
    if event.node_id in state.faulty_nodes:
        return set_status(state, event.node_id, "draining")
    there = event.node_id in state.prepared
    state = set_status(state, event.node_id, "prepared" if there else "ready")
    return hazard.started(state, state.nodes[event.node_id], at_s) if there else state


def _node_warned(state: State, event: NodeWarned, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    known = node is None or node.status in ("lost", "quarantined", "draining")
    return state if node is None or known or not event.risk else hazard.warned(state, node)


def _node_lost(state: State, event: NodeLost, at_s: float) -> State:
    node, state = state.nodes.get(event.node_id), seen(state, event.node_id)
    if node is None or node.status == "lost":
        return state
    gone = frozenset(WorkerId(node.node_id, k) for k in range(node.gpus))
    released, known = hazard.gone(state, node, event.cause)
    state = replace(
        set_status(state, node.node_id, "lost"),
        preparing=less(state.preparing, node.node_id),
        refused=less(state.refused, node.node_id),
        releasing=state.releasing - {node.node_id},
        n_losses=state.n_losses + (not released),
        **without_faults(state, node.node_id),
    )
    why = f"node {node.node_id} is gone" + (f" ({event.cause})" if event.cause else "")
    if not released:
        state = replace(state, deaths=tuple(n for n in state.deaths if n != node.node_id))
        state = hazard.taken(state, node, lost=True, known=known, at_s=at_s)
        if not (state.bounds_reclaims and hazard.announced(state, node)):
            state = hazard.died(state, node, event.cause or "gone", at_s=at_s, reclaimed=True)
    state = replace(state, born=less(state.born, node.node_id))
    state = without(state, gone, why, at_s=at_s)
    lost = [name for name, n in state.nodes.items() if n.status == "lost"]
    forgotten = set(lost[:-KEPT_LOST_NODES])
    nodes = (
        {name: n for name, n in state.nodes.items() if name not in forgotten}
        if forgotten
        else state.nodes
    )
    return forget(replace(state, nodes=nodes, dead=state.dead - gone), node.node_id)


def _instances_seen(state: State, event: InstancesSeen, at_s: float) -> State:
    return replace(state, instances={**state.instances, event.pool: event})


def _progress(state: State, event: Progress, at_s: float) -> State:
    state, node_id = seen(state, event.worker.node_id), event.worker.node_id
    if event.phase == "preparing" and node_id in state.preparing:
        return replace(state, preparing={**state.preparing, node_id: at_s})
    counts = event.phase == "saving" or state.is_current(event.generation)  # a part outlives it
    heard: dict[str, Any] = {"loading_at_s" if event.phase == "loading" else "busy_at_s": at_s}
    return replace(state, **heard) if counts else state


def _request_failed(state: State, event: RequestFailed, at_s: float) -> State:
    return hazard.refused(state, event, at_s=at_s)


def _plan_entered(state: State, event: PlanEntered, at_s: float) -> State:
    target = state.target
    if target is None or event.generation != target.generation:
        return state
    failure = state.failure
    if (
        failure
        and failure.cause == "loss"
        and not (failure.workers | set(failure.kill)) & set(target.ranks)
    ):
        failure = None  # only a sender went away, and its boxes had arrived
    digests = {step: text for step, text in state.digests.items() if step <= event.step}
    if state.job.restarted:
        state = restarts.started(state, at_s)
    return seen(
        replace(
            state, phase="running", plan=target, target=None, failure=failure, step=event.step,
            entered_step=event.step, entered_at_s=at_s, holdings={}, commits={}, pending={},
            quiesced=state.quiesced if state.job.restarted else frozenset(), digests=digests,
            probes=refused_layouts.until(state.probes, event.step), peer=None, below_step=None,
            last_step=None, shares_ordered=None, n_copies_timed=0,
            move_pace=paced(state, target, event),
            apart=unreached.after_meeting(state, target.nodes_taking_part),
        ),
        *target.nodes,
    )  # fmt: skip


def _plan_failed(state: State, event: PlanFailed, at_s: float) -> State:
    if not state.is_current(event.generation):
        return state
    if event.infeasible:
        return infeasible(
            state, event.generation, event.reason, measured_bytes=event.measured_bytes, at_s=at_s
        )
    return failed(state, Failure("infrastructure", event.reason, at_s))


def step_done(state: State, event: StepDone, at_s: float) -> State:
    """Of all events the most frequent: an ordinary step makes one State, which is billed too."""
    plan = state.plan
    entering = state.target is not None and event.generation == state.target.generation
    late = state.aborting is not None and event.generation in state.plans
    if entering or late or plan is None:
        return _odd_step(billed(state, at_s), event, at_s)
    if event.generation != plan.generation or event.step <= state.step:
        return billed(state, at_s)
    return _stepped(state, plan, event, at_s=at_s)


def _odd_step(state: State, event: StepDone, at_s: float) -> State:
    """Around a change of plans; `state` is billed."""
    if state.target and event.generation == state.target.generation:
        state = _plan_entered(state, PlanEntered(event.generation, event.step - 1), at_s)
    plan = state.plan
    # said late
    if state.aborting and event.generation in state.plans and event.step == state.step + 1:
        best = max(state.best_step, event.step)
        state = replace(
            state, step=event.step, best_step=best, digests=digested(state.digests, event)
        )
        return (
            state
            if event.generation in state.distrusted
            else replace(state, losses=with_loss(state.losses, event))
        )
    if plan is None or event.generation != plan.generation or event.step <= state.step:
        return state
    return _stepped(state, plan, event, at_s=at_s)


def _stepped(state: State, plan: Plan, event: StepDone, *, at_s: float) -> State:
    """The next step of the running plan."""
    known = event.skipped or math.isfinite(event.train_loss)
    same = _as_before(state, plan, event) if known else None
    progress = event.step > state.retry_step
    state = replace(
        state, **_bill(state, at_s), **_timed(state, plan, event, at_s=at_s), step=event.step,
        best_step=max(state.best_step, event.step), last_step=event, last_step_at_s=at_s,
        progress_at_s=at_s if event.step > state.best_step else state.progress_at_s,
        retries=0 if progress else state.retries,
        left_out_behind=() if progress else state.left_out_behind,
        unread={} if progress else state.unread,
        deaths=() if event.step > state.death_step else state.deaths,
        breaks=() if state.breaks and event.step >= state.breaks[-1].step else state.breaks,
        digests=digested(state.digests, event),
        losses=with_loss(state.losses, event) if same else state.losses,
        unseen=state.unseen.difference(plan.nodes) if state.unseen else state.unseen,
    )  # fmt: skip
    state = profiling.judged(state)
    if same is False:
        return _unlike(state, plan, event, at_s=at_s)
    if known:
        return state
    text = (
        f"step {event.step}: train_loss is {event.train_loss} (sample digest "
        f"{event.digest or 'not given'})"
    )
    return tripped(state, "not_finite", text, step=event.step, at_s=at_s)


def _as_before(state: State, plan: Plan, event: StepDone) -> bool | None:
    """False: the step was done before, and had another loss. None: its loss is not kept."""
    if plan.generation in state.distrusted or not refused_layouts.repeatable(state):
        return None
    n_redone = event.step - state.entered_step
    return redone_as_before(state.losses, event, n_redone, job=state.job) is not False


def _unlike(state: State, plan: Plan, event: StepDone, *, at_s: float) -> State:
    """The layout computes something else, or steps of this model do not repeat (see
    refused_layouts.py)."""
    before, _, generation = state.losses[event.step]
    old = state.layouts.get(generation) or refused_layouts.before(state, plan)
    if not refused_layouts.new_axes(plan.layout, old):
        return refused_layouts.without_repeats(state, event)
    said = (
        f"its train_loss is {event.train_loss:.6g} now that it is {refused_layouts.REDONE}, it "
        f"was {before:.6g}"
    )
    return computes_else(state, plan.generation, event.step, said=said, at_s=at_s, than=old)


def _timed(state: State, plan: Plan, event: StepDone, *, at_s: float) -> dict[str, Any]:
    """Running means of the step time and of the wait for copies; how long a live transition stopped
    the run."""
    if event.step_time_s <= 0 or not profiling.counts(state, event.step):
        return {}  # nobody measured it, or it was traced
    first = event.step == state.entered_step + 1
    ordinary_s = event.step_time_s - event.data_s - event.copy_s
    step_time_s = state.step_time_s
    if not first or not step_time_s:
        step_time_s = (
            ordinary_s if not step_time_s or first else 0.8 * step_time_s + 0.2 * ordinary_s
        )
    pauses_s, worker_step_s = state.pauses_s, event.step_time_s * plan.layout.world_size
    if state.worker_step_s:
        worker_step_s = (
            state.worker_step_s if first else 0.9 * state.worker_step_s + 0.1 * worker_step_s
        )
    if first and plan.resume.source == "live" and state.last_step_at_s:
        pause_s = at_s - state.last_step_at_s - plan.predicted_step_time_s
        pauses_s = (*pauses_s, max(0.0, pause_s))[-KEPT_PAUSES:]
    return {
        "step_time_s": step_time_s, "pauses_s": pauses_s, "worker_step_s": worker_step_s,
        "measured": with_step(state, plan, event),
    }  # fmt: skip


def _price_seen(state: State, event: PriceSeen, at_s: float) -> State:
    pools = tuple(
        replace(p, usd_per_node_h=event.usd_per_node_h) if p.name == event.pool else p
        for p in state.pools
    )
    return replace(
        state,
        pools=pools,
        scores={**state.scores, event.pool: event.score} if event.score else state.scores,
    )


def _pinning_failed(state: State, event: PinningFailed, at_s: float) -> State:
    return replace(state, unpinned={**state.unpinned, event.worker.node_id: event.reason})


def _storage_seen(state: State, event: StorageSeen, at_s: float) -> State:
    if not event.answers:
        return replace(state, away=event)
    stop, bad = state.stop, state.copy_failed
    if stop is not None and not stop.limit:
        stop = replace(stop, at_s=at_s)  # it has waited for this, and has all its time to save
    state = replace(state, away=None, stop=stop, busy_at_s=at_s)  # so has the last step's copy
    if stop and state.quiescing and bad and bad.step == state.step > state.saved_step:
        text = f"the copy of step {state.step} could not be stored while storage was away"
        return failed(replace(state, copy_failed=None), Failure("infrastructure", text, at_s))
    return state


def _plans_found(state: State, event: PlansFound, at_s: float) -> State:
    """As if this driver had given the orders: what the workers say of these generations counts from
    here on."""
    for plan in event.plans:
        if plan.generation > state.generation:
            state = ordered_plan(state, EnterPlan(plan), at_s)
    return state


def _stop_asked(state: State, event: StopAsked, at_s: float) -> State:
    return replace(state, stop=state.stop or StopWish(event.reason, at_s, done=event.done))


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    DriverStarted: _driver_started, NodeReady: _node_ready, NodePrepared: _node_prepared,
    Notice: _notice, NodeWarned: _node_warned,
    InstancesSeen: _instances_seen, NoticeWithdrawn: _notice_withdrawn, NodeLost: _node_lost,
    RequestFailed: _request_failed, PlanEntered: _plan_entered, PlanFailed: _plan_failed,
    PriceSeen: _price_seen, Progress: _progress,
    PinningFailed: _pinning_failed, StopAsked: _stop_asked, StorageSeen: _storage_seen,
    PlansFound: _plans_found, Quiesced: quiesced, **profiling.HANDLERS, **FAILURES, **COPIES,
    **STORED, **SPEEDS, **SUSPECTS, **AHEAD, **restarts.HANDLERS,
}  # fmt: skip
