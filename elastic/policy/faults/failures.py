"""How a generation breaks: processes and nodes that are gone, errors, content that is wrong; and
what is left after it.

A loss explains an error of the infrastructure, not the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.policy.faults import refused_layouts, unreached, unread_data
from elastic.policy.pools.gpu_memory import gpu_bytes
from elastic.policy.state.layered import less
from elastic.policy.state.state import Failure, State
from elastic.text import gib
from elastic.types import (
    DigestChecked,
    GuardTripped,
    Layout,
    Node,
    NodeRefused,
    NodeStatus,
    Probed,
    Silent,
    WorkerFailed,
    WorkerId,
)
from elastic.types.replacing import replace

ONE_SILENCE_S = 10.0  # as below, of workers that do not answer
HARDWARE = ("ECC", "NVLink", "Xid", "hardware", "contained")  # in errors that no program can cause
KEPT_ERRORS = 32
ONE_INCIDENT_S = 3.0  # failures of a node's processes within this time are one


def seen(state: State, *node_ids: str) -> State:
    return replace(state, unseen=state.unseen - set(node_ids)) if state.unseen else state


def with_node(state: State, node: Node) -> State:
    return replace(state, nodes={**state.nodes, node.node_id: node})


def set_status(
    state: State, node_id: str, status: NodeStatus, *, deadline_s: float | None = None
) -> State:
    node = state.nodes.get(node_id)
    if node is None or node.status == status == "lost":
        return state
    return with_node(state, replace(node, status=status, deadline_s=deadline_s))


def without(state: State, gone: frozenset[WorkerId], why: str, *, at_s: float) -> State:
    """The processes `gone` no longer exist: what they held is lost, and so is the generation that
    they were in."""
    nodes = {worker.node_id for worker in gone}
    member = any(state.takes_part(worker) for worker in gone)
    state = replace(
        state,
        prepared=state.prepared - nodes,
        dead=state.dead | gone,
        holdings={worker: held for worker, held in state.holdings.items() if worker not in gone},
        commits={worker: commit for worker, commit in state.commits.items() if worker not in gone},
        pending={worker: step for worker, step in state.pending.items() if worker not in gone},
    )
    if state.aborting:
        failure = state.aborting.failure
        if gone & state.aborting.owing and failure.cause == "infrastructure":
            failure = replace(failure, cause="loss", reason=why)
        return replace(
            state,
            aborting=replace(state.aborting, owing=state.aborting.owing - gone, failure=failure),
        )
    return failed(state, Failure("loss", why, at_s, gone)) if member else state


def failed(state: State, failure: Failure) -> State:
    """The running or entering generation cannot continue. A loss explains an error of the
    infrastructure, not the reverse."""
    if state.phase not in ("running", "entering"):
        return state
    old = state.failure
    if old is None or _explains(failure, old):
        return replace(state, failure=failure)
    merged = replace(
        old,
        workers=old.workers | failure.workers,
        kill=tuple(dict.fromkeys((*old.kill, *failure.kill))),
    )
    if failure.cause == "loss" and old.cause == "loss" and failure.reason not in old.reason:
        merged = replace(merged, reason=f"{old.reason}; {failure.reason}")
    return replace(state, failure=merged)


def explained(state: State, failure: Failure) -> State:
    """Of the generation that is being aborted: what the errors come of that its ranks heard of
    each other."""
    aborting = state.aborting
    if aborting is None or aborting.failure.cause != "infrastructure":
        return state
    return replace(state, aborting=replace(aborting, failure=failure))


def _explains(failure: Failure, old: Failure) -> bool:
    """The processes of a script end with an error when one of them was killed."""
    if old.cause == "program":
        return failure.cause != "program"
    return old.cause == "infrastructure" and failure.cause not in ("infrastructure", "program")


def infeasible(
    state: State, generation: int, reason: str, *, measured_bytes: int, at_s: float
) -> State:
    """The layout does not fit; where its shares follow measured speeds, it is these that do not."""
    plan, broken = state.plans[generation], explained if state.aborting else failed
    uneven = max(plan.samples, default=0) - min(plan.samples, default=0) > plan.n_microbatches
    if generation in state.reshared or (uneven and state.speeds and not state.uneven_failed):
        samples = ", ".join(map(str, plan.samples))
        text = f"shares of {samples} samples do not fit: {reason}; they stay equal from now on"
        # another rank of it may lack memory too: that says no more of the layout
        reshared = state.reshared | ({generation} if state.heeds_memory else set())
        state = replace(state, uneven_failed=text, reshared=reshared)
        return broken(state, Failure("infeasible", text, at_s))
    layout = plan.layout
    measured = max(measured_bytes, state.infeasible.get(layout, 0))
    text = (
        f"layout {layout} does not fit"
        + (f" ({gib(measured)} measured)" if measured else "")
        + f": {reason}"
    )
    state = replace(state, infeasible={**state.infeasible, layout: measured})
    if state.tries_larger:
        nodes = [state.nodes.get(name) for name in plan.nodes]
        rooms = [gpu_bytes(state, state.pool(node.pool)) if node else 0 for node in nodes]
        room = max(min(rooms, default=0), state.infeasible_on.get(layout, 0))
        state = replace(state, infeasible_on={**state.infeasible_on, layout: room})
    return broken(state, Failure("infeasible", text, at_s))


def tripped(state: State, guard: str, text: str, *, step: int, at_s: float) -> State:
    """A guard wants to go back to a copy from before `step`. It may as often as the job says; then
    the run ends.

    All ranks say the same; one that hears its peers leave may be heard first, and was an error of
    the infrastructure till now.
    """
    known = state.aborting.failure if state.aborting else state.failure
    if known and known.cause != "infrastructure":
        return state
    before = [s for name, s in state.rolled_back if name == guard]
    if step in before or len(before) >= state.job.guards.of(guard).rollbacks:
        times = "one roll-back" if len(before) == 1 else f"{len(before)} roll-backs"
        return replace(
            state,
            fatal=f"{text}; again, after {times}: look at these samples and at the learning rate",
        )
    rolled_back = (*state.rolled_back, (guard, step))
    state = replace(
        state, rollbacks=state.rollbacks + 1, rolled_back=rolled_back, below_step=max(0, step - 1)
    )
    failure = Failure("rollback", text, at_s)
    if state.aborting:
        return replace(state, aborting=replace(state.aborting, failure=failure))
    return failed(state, failure)


def _guard_tripped(state: State, event: GuardTripped, at_s: float) -> State:
    aborted = state.aborting is not None and event.generation == state.generation
    skipped = event.do == "skip" and (state.is_current(event.generation) or aborted)
    return replace(state, n_skipped=state.n_skipped + 1) if skipped else state


def _worker_failed(state: State, event: WorkerFailed, at_s: float) -> State:
    worker, kind = event.worker, event.kind
    text = f"worker {worker}: {event.error}"
    current = state.is_current(event.generation)
    broke = current or (state.aborting is not None and event.generation == state.generation)
    if event.unreached:
        state = unreached.told(
            state, worker.node_id, event.unreached, generation=event.generation, at_s=at_s
        )
    if kind == "process":
        # a process that took part in entering this generation did not die in an older one
        plan = state.plan
        stale = (
            plan is not None and worker in plan.workers and 0 < event.generation < plan.generation
        )
        return state if stale else process_failed(state, worker, text, at_s=at_s)
    if kind == "mismatch":
        return _mismatched(state, event, text, at_s=at_s)
    if kind == "device":
        return _device_failed(state, event, text, at_s=at_s)
    if kind == "program" and event.do == "retry":
        return _asserted(state, event, text, at_s=at_s)
    if kind == "program" and state.job.restarted:
        return failed(state, Failure("program", event.error, at_s)) if current else state
    if kind == "program":
        node = state.nodes.get(worker.node_id)
        known = node is not None and node.status not in ("lost", "quarantined")
        why = f"the program raised on {text}"
        if known and _opened_elsewhere(state, event):
            why += "; other nodes have opened it"
            return _node_refused(state, NodeRefused(worker.node_id, why), at_s)
        return replace(state, fatal=why) if current or known else state
    if kind in ("not_finite", "guard") and broke:
        if event.do == "stop":
            return replace(state, fatal=event.error)
        return tripped(state, event.guard or kind, event.error, step=event.step, at_s=at_s)
    if kind in unread_data.KINDS and broke and state.awaits_data:
        return _not_read(state, event, text, at_s=at_s)
    if kind == "layout" and broke:
        return computes_else(state, event.generation, event.step, said=event.error, at_s=at_s)
    aborted = state.aborting is not None and event.generation == state.aborting.generation
    if kind == "out_of_memory" and (current or (aborted and state.heeds_memory)):
        return infeasible(
            state, event.generation, text, measured_bytes=event.measured_bytes, at_s=at_s
        )
    if not current:
        return (
            process_failed(state, worker, text, at_s=at_s)
            if worker.node_id in state.preparing
            else state
        )
    return failed(state, Failure("infrastructure", text, at_s))


def _not_read(state: State, event: WorkerFailed, text: str, *, at_s: float) -> State:
    """Explains what its peers heard of that. A node that is to blame is left as one is of which a
    device has failed: what it holds in memory is served on."""
    worker, state = event.worker, unread_data.told(state, event, at_s)
    if unread_data.to_blame(state, worker.node_id):
        state = replace(state, faulty={**state.faulty, worker: text})
        state = set_status(state, worker.node_id, "draining")
    failure, known = Failure("infrastructure", text, at_s), state.failure
    if state.aborting:
        return explained(state, failure)
    if known is not None and known.cause == "infrastructure":
        return replace(state, failure=failure)
    return failed(state, failure)


def _opened_elsewhere(state: State, event: WorkerFailed) -> bool:
    """Is it the node that does not do for the program? It was being prepared, others are."""
    begins = event.generation == 0 and event.worker.node_id not in state.prepared
    return state.spares_the_rest and begins and bool(state.prepared)


def _node_refused(state: State, event: NodeRefused, at_s: float) -> State:
    """It is quarantined by the next decision, and counts for its pool as a start that failed. Not
    where a node that was in use lacks memory that may become free: it is looked at again."""
    state, node = seen(state, event.node_id), state.nodes.get(event.node_id)
    if node is None or node.status in ("lost", "quarantined") or event.node_id in state.releasing:
        return state
    if event.may_pass and event.node_id not in state.born:
        return short_of_memory(state, node, event.reason, at_s=at_s)
    preparing = less(state.preparing, event.node_id)
    return replace(
        state, preparing=preparing, refused={**state.refused, event.node_id: event.reason}
    )


def _mismatched(state: State, event: WorkerFailed, text: str, *, at_s: float) -> State:
    """The ranks of that generation make collectives that do not match. It is retried once: what was
    sent may have been damaged on its way (see recurring_breaks.py)."""
    aborted = state.aborting is not None and event.generation == state.aborting.generation
    if not (state.is_current(event.generation) or aborted):
        return state
    broken = {one.generation for one in state.breaks}
    kept = {number: why for number, why in state.mismatches.items() if number in broken}
    state = replace(state, mismatches={event.generation: text, **kept})
    failure = Failure("infrastructure", text, at_s)
    return explained(state, failure) if aborted else failed(state, failure)


def _device_failed(state: State, event: WorkerFailed, text: str, *, at_s: float) -> State:
    """The worker is a loss, whatever generation it speaks of, and its node is left: it is
    quarantined as soon as nobody needs what its processes hold in host memory. A worker that says
    so again cannot serve that either. One that was taken for gone, such as one that was silent and
    is heard again, is lost already; what it says of its device is true of the next process there.

    A kernel of the program may be at fault too. It does the same wherever the step is done: where a
    second node has such an error in the same step, the run ends, unless the error is one that only
    hardware can cause."""
    worker, node = event.worker, state.nodes.get(event.worker.node_id)
    known = worker in state.dead and (worker in state.faulty or not state.heeds_dead)
    if node is None or node.status in ("lost", "quarantined") or known:
        return state
    others = sorted(
        {name for step, name in state.device_errors if step == event.step} - {node.node_id}
    )
    if event.step and others and not any(word in event.error for word in HARDWARE):
        also = f"node {others[0]} failed in step {event.step} as well"
        return replace(
            state,
            fatal=f"the program's kernels failed on {text}; {also}, so the device is not at fault",
        )
    again = worker in state.faulty
    state = replace(
        state,
        faulty={**state.faulty, worker: state.faulty.get(worker, text)},
        holdings={
            w: tuple(h for h in held if w != worker or h.kind != "live")
            for w, held in state.holdings.items()
        },
        commits={w: commit for w, commit in state.commits.items() if w != worker},
        pending={w: step for w, step in state.pending.items() if w != worker},
        device_errors=(*state.device_errors, (event.step, node.node_id))[-KEPT_ERRORS:],
        preparing={name: t for name, t in state.preparing.items() if name != node.node_id},
    )
    if node.status != "draining":
        state = set_status(state, node.node_id, "draining")
    if again:
        return without(state, frozenset({worker}), text, at_s=at_s)
    failure = Failure("loss", text, at_s, frozenset({worker}))
    if state.aborting:
        return explained(state, failure) if worker in state.aborting.owing else state
    missed = state.takes_part(worker) and worker not in state.dead
    return failed(state, failure) if missed else state


def _asserted(state: State, event: WorkerFailed, text: str, *, at_s: float) -> State:
    """An index out of range in a kernel: the program's fault, or that of a device which made the
    index. The first report of a step is retried, with another process; a second one of the same
    step, from another rank or when it is done again, ends the run: a step has the same samples each
    time."""
    node = state.nodes.get(event.worker.node_id)
    if node is None or node.status in ("lost", "quarantined") or event.worker in state.dead:
        return state
    if event.step in state.asserts:
        return replace(
            state, fatal=f"the program raised on {text}; for the second time in step {event.step}"
        )
    state = replace(state, asserts=(*state.asserts, event.step)[-KEPT_ERRORS:])
    return process_failed(state, event.worker, text, at_s=at_s)


def short_of_memory(state: State, node: Node, reason: str, *, at_s: float) -> State:
    """A process that is gone still holds memory of its GPU, and the node has others: it is looked
    at again, not released. It counts as a failure of one of its processes."""
    name = node.node_id
    before = state.process_failures.get(name, ())
    state, known = _with_failure(state, name, at_s), state.short.get(name, ())
    if known and state.process_failures[name][-1:] == before[-1:]:
        known = known[:-1]  # another of its workers, at the same time
    return replace(state, short={**state.short, name: (*known, reason)})


def _with_failure(state: State, name: str, at_s: float, *, counts: bool = True) -> State:
    """A process of the node has failed, which is then no longer being prepared. All workers of a
    node may go at once."""
    known = state.process_failures
    lately = {other: times for other, times in known.items() if times[-1:] > (at_s - 3600,)}
    hour = tuple(t for t in known.get(name, ()) if t > at_s - 3600)
    again = bool(hour) and at_s < hour[-1] + ONE_INCIDENT_S
    return replace(
        state,
        process_failures={**lately, name: hour if again or not counts else (*hour, at_s)},
        preparing={other: t for other, t in state.preparing.items() if other != name},
    )


def without_faults(state: State, node_id: str) -> dict[str, Any]:
    """Fields of the state in which nothing is known against this node's devices and links: it is
    gone, or another one."""
    return {
        "faulty": {
            worker: why for worker, why in state.faulty.items() if worker.node_id != node_id
        },
        "short": {name: why for name, why in state.short.items() if name != node_id},
        "apart": tuple(one for one in state.apart if node_id not in one.nodes),
        "breaks": tuple(one for one in state.breaks if node_id not in one.nodes),
    }


def process_failed(state: State, worker: WorkerId, why: str, *, at_s: float) -> State:
    """A process is gone while its node may live on: the node must be prepared again."""
    node = state.nodes.get(worker.node_id)
    if node is None or node.status in ("lost", "quarantined") or worker in state.dead:
        return state
    worked = worker.node_id in state.prepared or worker.node_id in state.preparing
    state = _with_failure(state, worker.node_id, at_s, counts=worked)
    noticed = state.spares_noticed and node.status == "draining" and node.deadline_s is not None
    if state.bounds_deaths and state.generation > state.death_generation and not noticed:
        state = replace(
            state,
            deaths=(*state.deaths, worker.node_id),
            death=why,
            death_step=state.best_step,
            death_generation=state.generation,
        )
    if node.status == "prepared":
        state = set_status(state, worker.node_id, "ready")
    return without(state, frozenset({worker}), why, at_s=at_s)


def _silent(state: State, event: Silent, at_s: float) -> State:
    text = f"worker {event.worker} has been silent for {event.silent_s:.1f} s while {event.phase}"
    text += f" ({event.why})" if event.why else ""
    member = state.takes_part(event.worker)
    # its last answer may be older than this generation
    awaited = state.target is not None and member
    if (awaited or state.is_current(event.generation)) and member and state.aborting is None:
        state = replace(state, silences=_silent_again(state, event, text, at_s=at_s))
        return failed(
            state, Failure("loss", text, at_s, frozenset({event.worker}), (event.worker,))
        )
    return state if member else process_failed(state, event.worker, text, at_s=at_s)


def _silent_again(
    state: State, event: Silent, text: str, *, at_s: float
) -> dict[str, tuple[tuple[float, str], ...]]:
    """With this one, in the last hour; a node's workers may fall silent together, and are told of
    more than once."""
    node_id, known = event.worker.node_id, state.silences
    lately = {other: times for other, times in known.items() if times[-1][0] > at_s - 3600}
    hour = tuple((t, why) for t, why in known.get(node_id, ()) if t > at_s - 3600)
    again = hour and at_s < hour[-1][0] + ONE_SILENCE_S
    return {**lately, node_id: hour if again else (*hour, (at_s, text))}


def _digest_checked(state: State, event: DigestChecked, at_s: float) -> State:
    """Content that is wrong is wrong in every generation that came of it, and in every copy that
    these have taken. What was computed before it is right, and the next layout is compared with
    that."""
    if event.ok or event.generation > state.generation or event.generation in state.distrusted:
        return state
    state, bad = _distrusted(state, event.generation, removed=state.removes_distrusted)
    began = min(
        (state.plans[number].resume.step for number in bad if number in state.plans), default=0
    )
    losses = {step: loss for step, loss in state.losses.items() if loss[2] not in bad}
    state = replace(state, losses=losses, probes=refused_layouts.until(state.probes, began - 1))
    text = (
        f"the content of generation {event.generation} differs from what was sent "
        f"({event.n_bytes} bytes compared)"
    )
    if len(bad) > 1:
        text += f"; distrusted with it: {', '.join(str(number) for number in sorted(bad)[1:])}"
    newest = state.target or state.plan
    if newest is None or newest.generation not in bad:
        return state
    return failed(replace(state, rollbacks=state.rollbacks + 1), Failure("rollback", text, at_s))


def _distrusted(state: State, generation: int, *, removed: bool) -> tuple[State, set[int]]:
    """Nothing resumes any more from that generation and from what came of it: these, in numbers.
    `removed`: their checkpoints will be."""
    bad = {generation}
    for number, plan in sorted(state.plans.items()):
        if plan.resume.source != "fresh" and plan.resume.generation in bad:
            bad.add(number)
    durable = tuple(copy for copy in state.durable if copy.generation not in bad)
    gone = [copy.uri for copy in state.durable if copy.generation in bad and removed]
    return replace(
        state,
        distrusted=state.distrusted | bad,
        durable=durable,
        spoilt=tuple(dict.fromkeys((*state.spoilt, *gone))),
        peer=None if state.peer and state.peer.generation in bad else state.peer,
    ), bad


def computes_else(
    state: State, generation: int, step: int, *, said: str, at_s: float, than: Layout | None = None
) -> State:
    """The layout of that generation computes another function than `than`, the one before it: back
    to the state that it began from, which is right, and never again into such a layout. All ranks
    say the same."""
    plan = state.plans.get(generation)
    if plan is None or generation in state.distrusted:
        return state
    old = than or refused_layouts.before(state, plan)
    names = refused_layouts.closed_by(plan.layout, old)
    entered = state.plan is not None and state.plan.generation == generation
    began = (
        state.entered_step
        if entered
        else plan.resume.step
        if plan.resume.source != "live"
        else state.step
    )
    what = f"generation {generation}, {plan.layout}, computes something else than {old or 'before'}"
    why = f"{what} at step {step or began}: {said}"
    state, bad = _distrusted(state, generation, removed=True)
    state = replace(
        state,
        unusable={**dict.fromkeys(names, why), **state.unusable},
        astray={**state.astray, **(dict.fromkeys(bad, began) if entered else {})},
        probes=refused_layouts.until(state.probes, began - 1 if entered else began),
        rollbacks=state.rollbacks + (not names),
    )
    failure = Failure("rollback", f"{why}; {refused_layouts.in_words(names)}", at_s)
    return explained(state, failure) if state.aborting else failed(state, failure)


def _probed(state: State, event: Probed, at_s: float) -> State:
    """Of a run that begins anew the workers cannot know what it was."""
    if event.expected is not None or not (was := refused_layouts.begun_otherwise(state, event)):
        return refused_layouts.probed(state, event)
    said = f"the probe sample's loss is {event.loss:.4f}, it was {was[0]:.4f}"
    return computes_else(state, event.generation, event.step, said=said, at_s=at_s, than=was[1])


FAILURES: dict[type, Callable[[State, Any, float], State]] = {
    GuardTripped: _guard_tripped, WorkerFailed: _worker_failed, Silent: _silent,
    DigestChecked: _digest_checked, Probed: _probed, NodeRefused: _node_refused,
}  # fmt: skip
