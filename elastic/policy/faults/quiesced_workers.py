"""Workers that have left their generation. What one of them reports counts whatever the generation:
it is all that a recovery can start from.

All workers of a generation leave it at about the same moment. What they report with one poll is
folded at once: each alone would make a new State, thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.policy import restarts
from elastic.policy.faults.failures import failed, seen
from elastic.policy.state.layered import (
    GONE,
    with_entries,
    with_member,
    with_members,
    without_members,
)  # fmt: skip
from elastic.policy.state.state import Failure, State
from elastic.types import Quiesced, WorkerId
from elastic.types.replacing import replace


def quiesced(state: State, event: Quiesced, at_s: float) -> State:
    return all_quiesced(state, (event,), at_s)


def all_quiesced(state: State, events: Sequence[Quiesced], at_s: float) -> State:
    """As if they were folded one after the other."""
    heard = [event for event in events if _counts(state, event.worker)]
    if not heard:
        return state
    state = seen(state, *(event.worker.node_id for event in heard))
    if not state.job.restarted:
        state = replace(state, **_told(state, heard))
    if state.aborting:
        forward = state.aborting.forward
        gone = [  # the others said it before they had the order to apply that step
            event.worker for event in heard if forward is None or event.pending_step != forward.step
        ]
        owing = without_members(state.aborting.owing, gone)
        return replace(state, aborting=replace(state.aborting, owing=owing))
    for event in heard if state.job.restarted else ():
        state = restarts.left(state, event, at_s)
    return state if state.job.restarted else _left(state, heard, at_s)


def _counts(state: State, worker: WorkerId) -> bool:
    node = state.nodes.get(worker.node_id)
    known = node is not None and node.status not in ("lost", "quarantined")
    return known and (not state.dead or worker not in state.dead)


def _told(state: State, events: Sequence[Quiesced]) -> dict[str, Any]:
    """What the workers hold, what the last commit gave them, and which step's gradients they
    keep."""
    return {
        "holdings": with_entries(state.holdings, {e.worker: e.holdings for e in events}),
        "commits": with_entries(state.commits, {e.worker: e.commit or GONE for e in events}),
        "pending": with_entries(
            state.pending,
            {e.worker: e.pending_step if e.pending_step >= 0 else GONE for e in events},
        ),
        "stood": with_entries(state.stood, {e.worker: e.at for e in events if e.at}),
    }


def _left(state: State, events: Sequence[Quiesced], at_s: float) -> State:
    """They were ranks of the running generation, or only sent to it or to the coming one."""
    plan, ours = state.plan, list[Quiesced]()
    current = {p.generation: p for p in (state.target, plan) if p}
    for event in events:
        of = current.get(event.generation)
        if of is not None and event.worker not in of.workers:
            same = next(iter(state.sent), (0,))[0] == event.generation  # as all of them, then
            sent = with_member(state.sent if same else frozenset(), (of.generation, event.worker))
            state = replace(state, sent=sent)
        elif of is plan:
            ours.append(event)
    if not ours or plan is None:
        return state
    state = replace(state, quiesced=with_members(state.quiesced, [e.worker for e in ours]))
    asked = state.quiescing or state.target
    for event in ours if not asked else ():
        if event.step < state.phase_ends_at:
            why = f"worker {event.worker} left generation {plan.generation} unasked"
            state = failed(state, Failure("infrastructure", why, at_s))
    return state
