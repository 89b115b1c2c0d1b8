"""How each event changes the State.

Generation is the fencing token: a message counts only when it speaks of the running generation or of the one being entered.
Two facts count whatever their generation: what a worker still holds (Quiesced), and that a process or node is gone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic.policy.known import Backoff, Failure, State, StopWish
from elastic.types import (
    Abort,
    Copy,
    CopyStored,
    DigestChecked,
    DriverStarted,
    EnterPlan,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeStatus,
    Notice,
    NoticeWithdrawn,
    PlanEntered,
    PlanFailed,
    PriceSeen,
    Quiesce,
    Quiesced,
    RequestFailed,
    Silent,
    SpeedMeasured,
    StepDone,
    StopAsked,
    WorkerFailed,
    WorkerId,
)  # fmt: skip

REQUEST_BACKOFF_S, REQUEST_BACKOFF_MAX_S = 30.0, 600.0
KEPT_DIGESTS = 512
KEPT_COPIES = 10
KEPT_LOST_NODES = 32
ONE_INCIDENT_S = 3.0  # failures of a node's processes within this time are one


def billed(state: State, at_s: float) -> State:
    passed_s = at_s - state.billed_at_s
    if passed_s <= 0:
        return state
    usd = state.usd + state.usd_per_h * passed_s / 3600
    stop, budget = state.stop, state.job.get("budget_usd")
    if budget is not None and usd >= budget and stop is None:
        stop = StopWish(f"the budget of ${budget:.2f} is spent (${usd:.2f})", at_s)
    return replace(state, usd=usd, billed_at_s=at_s, node_s=state.node_s + passed_s * len(state.alive), stop=stop)


def _driver_started(state: State, event: DriverStarted, at_s: float) -> State:
    durable = _newest_first((*event.durable, *(state.durable if event.attached else ())))
    known: dict[str, Any] = {
        "run": event.run, "epoch": event.epoch, "job": event.job, "pools": event.pools, "model": event.model,
        "hardware": event.hardware, "durable": durable, "billed_at_s": at_s,
    }  # fmt: skip
    generation = max([state.generation, *(copy.generation for copy in durable)])
    if not event.attached:
        saved = durable[0].step if durable else 0
        digests = {step: text for step, text in state.digests.items() if step == saved}
        return State(**known, started_at_s=at_s, generation=generation, usd=state.usd, digests=digests)
    repeat: tuple[EnterPlan | Quiesce | Abort, ...] = ()
    if state.aborting and state.aborting.owing:
        repeat = (Abort(state.aborting.generation),)
        known["aborting"] = replace(state.aborting, at_s=at_s)
    elif state.target:
        repeat = (EnterPlan(state.target),)
    elif state.quiescing:
        repeat = (Quiesce(state.quiescing[0]),)
    unseen = frozenset(node.node_id for node in state.alive)
    return replace(
        state, **known, generation=generation, unseen=unseen, attached_at_s=at_s, repeat=repeat, requests={}, preparing={},
        releasing=frozenset(), ordered_at_s=at_s, stop=None,
    )  # fmt: skip


def _seen(state: State, *node_ids: str) -> State:
    return replace(state, unseen=state.unseen - set(node_ids)) if state.unseen else state


def _with_node(state: State, node: Node) -> State:
    return replace(state, nodes={**state.nodes, node.node_id: node})


def set_status(state: State, node_id: str, status: NodeStatus, deadline_s: float | None = None) -> State:
    node = state.nodes.get(node_id)
    if node is None or node.status == status == "lost":
        return state
    return _with_node(state, replace(node, status=status, deadline_s=deadline_s))


def _node_ready(state: State, event: NodeReady, at_s: float) -> State:
    node, state = event.node, _seen(state, event.node.node_id)
    known = state.nodes.get(node.node_id)
    if known is not None and known.status not in ("lost", "pending"):
        return state
    requests = dict(state.requests)
    asked = next((r for r in requests.values() if r.pool == node.pool), None)
    if asked and asked.count > 1:
        requests[asked.request_id] = replace(asked, count=asked.count - 1)
    elif asked:
        del requests[asked.request_id]
    backoff = {name: b for name, b in state.backoff.items() if name != node.pool}
    nodes = {name: n for name, n in state.nodes.items() if name != node.node_id}  # at the end: order of arrival
    nodes[node.node_id] = replace(node, status="ready", deadline_s=None)
    dead = frozenset(w for w in state.dead if w.node_id != node.node_id)
    return replace(
        state, nodes=nodes, requests=requests, backoff=backoff, dead=dead, releasing=state.releasing - {node.node_id}
    )


def _node_prepared(state: State, event: NodePrepared, at_s: float) -> State:
    state, node = _seen(state, event.node_id), state.nodes.get(event.node_id)
    if node is None or node.status in ("lost", "quarantined"):
        return state
    state = replace(
        state,
        prepared=state.prepared | {event.node_id},
        prepared_at_s=at_s,
        preparing={name: t for name, t in state.preparing.items() if name != event.node_id},
        dead=frozenset(w for w in state.dead if w.node_id != event.node_id),
    )
    return state if node.status == "draining" else set_status(state, event.node_id, "prepared")


def _notice(state: State, event: Notice, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.status in ("lost", "quarantined"):
        return state
    state = replace(state, n_notices=state.n_notices + (node.status != "draining"))
    return set_status(state, event.node_id, "draining", event.deadline_s)


def _notice_withdrawn(state: State, event: NoticeWithdrawn, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    if node is None or node.status != "draining" or event.node_id in state.releasing:
        return state
    return set_status(state, event.node_id, "prepared" if event.node_id in state.prepared else "ready")


def _node_lost(state: State, event: NodeLost, at_s: float) -> State:
    node, state = state.nodes.get(event.node_id), _seen(state, event.node_id)
    if node is None or node.status == "lost":
        return state
    gone = frozenset(WorkerId(node.node_id, k) for k in range(node.gpus))
    released = event.cause == "released" or node.node_id in state.releasing
    state = replace(
        set_status(state, node.node_id, "lost"),
        preparing={name: t for name, t in state.preparing.items() if name != node.node_id},
        releasing=state.releasing - {node.node_id},
        n_losses=state.n_losses + (not released),
    )
    why = f"node {node.node_id} is gone" + (f" ({event.cause})" if event.cause else "")
    state = without(state, gone, why, at_s)
    lost = [name for name, n in state.nodes.items() if n.status == "lost"]
    forgotten = set(lost[:-KEPT_LOST_NODES])
    nodes = {name: n for name, n in state.nodes.items() if name not in forgotten} if forgotten else state.nodes
    return replace(state, nodes=nodes, dead=state.dead - gone)


def without(state: State, gone: frozenset[WorkerId], why: str, at_s: float) -> State:
    """The processes `gone` no longer exist: what they held is lost, and so is the generation that they were in."""
    nodes = {worker.node_id for worker in gone}
    member = bool(gone & state.members)
    state = replace(
        state,
        prepared=state.prepared - nodes,
        dead=state.dead | gone,
        holdings={worker: held for worker, held in state.holdings.items() if worker not in gone},
    )
    if state.aborting:
        failure = state.aborting.failure
        if gone & state.aborting.owing and failure.cause == "infrastructure":
            failure = replace(failure, cause="loss", reason=why)
        return replace(state, aborting=replace(state.aborting, owing=state.aborting.owing - gone, failure=failure))
    return _failed(state, Failure("loss", why, at_s, gone)) if member else state


def _failed(state: State, failure: Failure) -> State:
    """The running or entering generation cannot go on. A loss explains an error of the infrastructure, not the reverse."""
    if state.phase not in ("running", "entering"):
        return state
    old = state.failure
    if old is None or (old.cause == "infrastructure" and failure.cause != "infrastructure"):
        return replace(state, failure=failure)
    merged = replace(old, workers=old.workers | failure.workers, kill=tuple(dict.fromkeys((*old.kill, *failure.kill))))
    if failure.cause == "loss" and old.cause == "loss" and failure.reason not in old.reason:
        merged = replace(merged, reason=f"{old.reason}; {failure.reason}")
    return replace(state, failure=merged)


def _request_failed(state: State, event: RequestFailed, at_s: float) -> State:
    old = state.backoff.get(event.pool)
    wait_s = min(REQUEST_BACKOFF_MAX_S, old.wait_s * 2) if old else REQUEST_BACKOFF_S
    requests = {name: r for name, r in state.requests.items() if name != event.request_id}
    backoff = {**state.backoff, event.pool: Backoff(at_s + wait_s, wait_s, event.reason)}
    return replace(state, requests=requests, backoff=backoff)


def _plan_entered(state: State, event: PlanEntered, at_s: float) -> State:
    target = state.target
    if target is None or event.generation != target.generation:
        return state
    failure = state.failure
    if failure and failure.cause == "loss" and not (failure.workers | set(failure.kill)) & set(target.ranks):
        failure = None  # only a sender went away, and its boxes had arrived
    digests = {step: text for step, text in state.digests.items() if step <= event.step}
    return _seen(
        replace(
            state, phase="running", plan=target, target=None, failure=failure, step=event.step, entered_step=event.step,
            entered_at_s=at_s, holdings={}, quiesced=frozenset(), digests=digests, peer=None, below_step=None, last_step=None,
        ),
        *target.nodes,
    )  # fmt: skip


def _plan_failed(state: State, event: PlanFailed, at_s: float) -> State:
    if not state.is_current(event.generation):
        return state
    if event.infeasible:
        return _infeasible(state, event.generation, event.reason, event.measured_bytes, at_s)
    return _failed(state, Failure("infrastructure", event.reason, at_s))


def _infeasible(state: State, generation: int, reason: str, measured_bytes: int, at_s: float) -> State:
    layout = state.plans[generation].layout
    measured = max(measured_bytes, state.infeasible.get(layout, 0))
    text = f"layout {layout} does not fit" + (f" ({measured / 2**30:.2f} GiB measured)" if measured else "") + f": {reason}"
    state = replace(state, infeasible={**state.infeasible, layout: measured})
    return _failed(state, Failure("infeasible", text, at_s))


def _step_done(state: State, event: StepDone, at_s: float) -> State:
    if state.target and event.generation == state.target.generation:
        state = _plan_entered(state, PlanEntered(event.generation, event.step - 1), at_s)
    plan = state.plan
    if plan is None or event.generation != plan.generation or event.step <= state.step:
        return state
    first = event.step == state.entered_step + 1
    ordinary_s = event.step_time_s - event.data_s - event.copy_s
    step_time_s = state.step_time_s
    if not first or not step_time_s:
        step_time_s = ordinary_s if not step_time_s or first else 0.8 * step_time_s + 0.2 * ordinary_s
    stall_s = state.copy_stall_s
    if event.copy_s > 0 and plan.peer_every:
        stall_s = event.copy_s if not stall_s else 0.8 * stall_s + 0.2 * event.copy_s
    progress = event.step > state.retry_step
    state = replace(
        state, step=event.step, best_step=max(state.best_step, event.step), last_step=event, last_step_at_s=at_s,
        step_time_s=step_time_s, copy_stall_s=stall_s, retries=0 if progress else state.retries,
        digests=_digested(state.digests, event), unseen=state.unseen - set(plan.nodes),
    )  # fmt: skip
    return state if math.isfinite(event.train_loss) else _not_a_number(state, event, at_s)


def _digested(digests: Mapping[int, str], event: StepDone) -> dict[int, str]:
    kept = dict(digests)
    if len(kept) >= KEPT_DIGESTS:
        for step in sorted(kept)[: KEPT_DIGESTS // 2]:
            del kept[step]
    before = kept.get(event.step - 1, "" if event.step == 1 else "?")
    kept[event.step] = hashlib.sha256(f"{before}:{event.step}:{event.digest}".encode()).hexdigest()[:16]
    return kept


def _not_a_number(state: State, event: StepDone, at_s: float) -> State:
    text = f"step {event.step}: train_loss is {event.train_loss} (sample digest {event.digest or 'not given'})"
    if state.rollbacks:
        return replace(state, fatal=f"{text}, again after {state.rollbacks} roll-back; look at the data and the learning rate")
    state = replace(state, rollbacks=state.rollbacks + 1, below_step=event.step)
    return _failed(state, Failure("rollback", text, at_s))


def _copy_stored(state: State, event: CopyStored, at_s: float) -> State:
    copy = event.copy
    if copy.generation in state.distrusted:
        return state
    if copy.kind == "durable":
        stall_s = event.stall_s if not state.durable_stall_s else 0.5 * (state.durable_stall_s + event.stall_s)
        return replace(state, durable=_newest_first((copy, *state.durable)), durable_stall_s=stall_s)
    if copy.kind != "peer" or state.plan is None or copy.generation != state.plan.generation:
        return state
    return state if state.peer and state.peer.step >= copy.step else replace(state, peer=copy)


def _newest_first(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    by_uri = {(copy.step, copy.uri): copy for copy in copies}
    return tuple(sorted(by_uri.values(), key=lambda copy: (-copy.step, -copy.generation))[:KEPT_COPIES])


def _worker_failed(state: State, event: WorkerFailed, at_s: float) -> State:
    worker, kind = event.worker, event.kind
    text = f"worker {worker}: {event.error}"
    current = state.is_current(event.generation)
    if kind == "process":
        plan = state.plan  # a process that took part in entering this generation did not die in an older one
        stale = plan is not None and worker in plan.ranks and 0 < event.generation < plan.generation
        return state if stale else process_failed(state, worker, text, at_s)
    if kind == "program":
        node = state.nodes.get(worker.node_id)
        known = node is not None and node.status not in ("lost", "quarantined")
        return replace(state, fatal=f"the program raised on {text}") if current or known else state
    if not current:
        return process_failed(state, worker, text, at_s) if worker.node_id in state.preparing else state
    if kind == "out_of_memory":
        return _infeasible(state, event.generation, text, event.measured_bytes, at_s)
    return _failed(state, Failure("infrastructure", text, at_s))


def process_failed(state: State, worker: WorkerId, why: str, at_s: float) -> State:
    """A process is gone while its node may live on: the node must be prepared again."""
    node = state.nodes.get(worker.node_id)
    if node is None or node.status in ("lost", "quarantined") or worker in state.dead:
        return state
    hour = tuple(t for t in state.process_failures.get(worker.node_id, ()) if t > at_s - 3600)
    again = bool(hour) and at_s < hour[-1] + ONE_INCIDENT_S
    worked = worker.node_id in state.prepared or worker.node_id in state.preparing
    hour = hour if again or not worked else (*hour, at_s)  # all workers of a node may go at once
    state = replace(
        state,
        process_failures={**state.process_failures, worker.node_id: hour},
        preparing={name: t for name, t in state.preparing.items() if name != worker.node_id},
    )
    if node.status == "prepared":
        state = set_status(state, worker.node_id, "ready")
    return without(state, frozenset({worker}), why, at_s)


def _silent(state: State, event: Silent, at_s: float) -> State:
    text = f"worker {event.worker} has been silent for {event.silent_s:.1f} s while {event.phase}"
    if state.is_current(event.generation) and event.worker in state.members and state.aborting is None:
        return _failed(state, Failure("loss", text, at_s, frozenset({event.worker}), (event.worker,)))
    return state if event.worker in state.members else process_failed(state, event.worker, text, at_s)


def _quiesced(state: State, event: Quiesced, at_s: float) -> State:
    node, worker = state.nodes.get(event.worker.node_id), event.worker
    if node is None or node.status in ("lost", "quarantined") or worker in state.dead:
        return state
    state = _seen(replace(state, holdings={**state.holdings, worker: event.holdings}), worker.node_id)
    if state.aborting:
        return replace(state, aborting=replace(state.aborting, owing=state.aborting.owing - {worker}))
    for current in (state.plan, state.target):
        if current and event.generation == current.generation and worker not in current.ranks:
            return replace(
                state, sent=frozenset(s for s in state.sent if s[0] == event.generation) | {(event.generation, worker)}
            )
    plan = state.plan
    if plan is None or event.generation != plan.generation or worker not in plan.ranks:
        return state
    state = replace(state, quiesced=state.quiesced | {worker})
    if state.quiescing or state.target or event.step >= state.steps:
        return state
    return _failed(state, Failure("infrastructure", f"worker {worker} left generation {plan.generation} unasked", at_s))


def _digest_checked(state: State, event: DigestChecked, at_s: float) -> State:
    plan = state.plan or state.target
    if event.ok or plan is None or event.generation > plan.generation:
        return state
    bad = frozenset(range(event.generation, plan.generation + 1))
    state = replace(state, distrusted=state.distrusted | bad, rollbacks=state.rollbacks + 1, peer=None)
    state = replace(state, durable=tuple(copy for copy in state.durable if copy.generation not in bad))
    text = f"the content of generation {event.generation} differs from what was sent ({event.n_bytes} bytes compared)"
    return _failed(state, Failure("rollback", text, at_s))


def _speed_measured(state: State, event: SpeedMeasured, at_s: float) -> State:
    node = state.nodes.get(event.node_id)
    return _with_node(state, replace(node, speed=event.speed)) if node else state


def _price_seen(state: State, event: PriceSeen, at_s: float) -> State:
    pools = tuple(replace(p, usd_per_node_h=event.usd_per_node_h) if p.name == event.pool else p for p in state.pools)
    return replace(state, pools=pools)


def _stop_asked(state: State, event: StopAsked, at_s: float) -> State:
    return replace(state, stop=state.stop or StopWish(event.reason, at_s))


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    DriverStarted: _driver_started, NodeReady: _node_ready, NodePrepared: _node_prepared, Notice: _notice,
    NoticeWithdrawn: _notice_withdrawn, NodeLost: _node_lost, RequestFailed: _request_failed, PlanEntered: _plan_entered,
    PlanFailed: _plan_failed, StepDone: _step_done, CopyStored: _copy_stored, WorkerFailed: _worker_failed, Silent: _silent,
    Quiesced: _quiesced, DigestChecked: _digest_checked, SpeedMeasured: _speed_measured, PriceSeen: _price_seen,
    StopAsked: _stop_asked,
}  # fmt: skip
