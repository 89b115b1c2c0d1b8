"""A step that breaks each time it is done, while its nodes stay: the fault is the program's.

It breaks wherever it runs, so that no node is to be blamed. It shows in ranks that make
collectives which do not match, twice; or in the steps before it, which the same nodes redo each
time (a node that is bad breaks in any step). A break that the loss of a node, or an error of its
device, explains does not count.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic.policy.faults import unread_data
from elastic.policy.state.breaks import Break
from elastic.policy.state.state import Failure, State
from elastic.text import ranks_by_place

MISMATCH_MOST, REDONE_MOST = 2, 3  # times in a row
RULE = (
    "every rank must call the same modules and collectives in the same order, with tensors of "
    "the same shapes; look for a branch that depends on the rank or on its samples"
)


def recorded(state: State, failure: Failure) -> tuple[Break, ...]:
    """When the running generation is aborted for that."""
    plan = state.plan
    device = any(worker in state.faulty for worker in failure.workers)
    gone = any(
        (node := state.nodes.get(worker.node_id)) is None or node.status == "lost"
        for worker in failure.workers
    )
    moves = state.target is not None or state.quiescing is not None
    explained = gone or device or failure.cause not in ("loss", "infrastructure")
    if plan is None or moves or explained or unread_data.explains(state, plan.generation):
        return state.breaks
    step, redone = state.step + 1, state.step > state.entered_step
    new = Break(plan.generation, step, redone, frozenset(plan.nodes))
    return (*(one for one in state.breaks if one.step == step), new)[-REDONE_MOST:]


def verdict(state: State) -> str:
    """Why the run must end, once all have left the generation that broke last; '' = another attempt
    is allowed."""
    aborting, breaks = state.aborting, state.breaks
    if not breaks or aborting is None or aborting.owing:
        return ""
    last = breaks[-1]
    if last.generation != aborting.generation:
        return ""
    times = f"step {last.step} has failed {len(breaks)} times in a row"
    unlike = [one for one in breaks if one.generation in state.mismatches]
    if len(unlike) >= MISMATCH_MOST:
        why = state.mismatches[unlike[-1].generation]
        said = "; ".join(filter(None, (why, stood(state), RULE)))
        return f"{times}, the program's ranks do not match: {said}"
    if state.blames_program and len(breaks) >= REDONE_MOST and all(b.redone for b in breaks):
        redone = f"while the steps before it were done again on {', '.join(sorted(last.nodes))}"
        reason = f"the last time: {aborting.failure.reason}"
        fails = f"{times}, {redone} each time: it is the program that fails there"
        return "; ".join(filter(None, (fails, reason, stood(state))))
    return ""


def stood(state: State) -> str:
    """Where each rank was, as far as they said."""
    plan = state.plans.get(state.aborting.generation) if state.aborting else None
    places: Mapping[int, str] = (
        {rank: state.stood[w] for rank, w in enumerate(plan.ranks) if w in state.stood}
        if plan is not None
        else {}
    )
    return ranks_by_place(places) if places else ""
