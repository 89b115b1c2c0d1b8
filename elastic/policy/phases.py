"""Phases of the job (`phases:` in job.yaml): the State as it is in one, and the change to the next.

A plan is of one phase. Its generation makes the steps of that phase, ends by itself behind the last
one, and leaves the state in memory; the order to enter a plan of a later phase does not end it
before. A run that goes back behind the beginning of a phase makes the steps before it once more, as
they were.
"""

from __future__ import annotations

from typing import Any

from elastic.errors import ElasticError, InfeasiblePlan
from elastic.policy import forming_groups
from elastic.policy.copies import recovery
from elastic.policy.plans import choice_of, enter
from elastic.policy.pools import drain
from elastic.policy.state.in_phase import in_phase_of
from elastic.policy.state.state import State
from elastic.types import Abort, Decision, DrainNode, EnterPlan, Node, Quiesce
from elastic.types.replacing import replace

FORM_S = 30.0  # before a phase ends, by the measured steps, the groups of the next are made


def as_resumed(state: State) -> State:
    """While nothing runs: in the phase of the step that the run would continue from."""
    if state.phase != "waiting" or not state.job.phases:
        return state
    try:
        return in_phase_of(state, recovery.newest(state).step)
    except ElasticError:  # nothing is left to continue from, as the rules will find
        return state


def next_phase(state: State, now_s: float, notice: bool) -> Decision | None:
    """The running plan's phase is over, or its last step is being made: the plan of the next one.
    None: it is not that far. `notice`: some of its nodes will be preempted."""
    plan = state.plan
    if plan is None or state.phase_ends_at >= state.steps:
        return None
    if state.quiescing and not state.phase_over:
        return None
    rest = state.phase_ends_at - state.step
    soon = not notice and 0 < rest * state.step_time_s <= FORM_S
    if rest > 1 and not (soon and forming_groups.missing(state)):
        return None
    number = plan.phase + 1
    ahead = in_phase_of(state, state.phase_ends_at)
    text = f"step {state.phase_ends_at} ends phase {number} of {len(state.job.phases)}"
    try:
        moved = _planned(ahead, now_s, text)
    except InfeasiblePlan as error:
        return _without(state, f"{text}, and there is no plan for the next: {error}", rest)
    if rest <= 1:
        return moved
    formed = forming_groups.begun(state, moved)
    if not formed:
        return None
    why = f"{text}: the groups of generation {state.generation + 1} are made now"
    return Decision(formed, why)


def _planned(ahead: State, now_s: float, text: str) -> Decision:
    """Nodes with notice are left at this boundary, where later would not be worth a pause of its
    own and the others do. Raises InfeasiblePlan."""
    leaving = [node for node in ahead.draining if ahead.takes_part_on(node.node_id)]
    usable = drain.usable(ahead, now_s)
    nodes: tuple[Node, ...] = usable
    try:
        choice = choice_of(ahead, usable)
    except InfeasiblePlan:
        nodes = (*usable, *(node for node in leaving if node not in usable))
        choice = choice_of(ahead, nodes)
    moved = enter(
        ahead, choice, recovery.live(ahead), cause="phase",
        why=f"{text}, {_changes(ahead)}: resharding from live memory there",
    )  # fmt: skip
    entered = [action.plan for action in moved.actions if isinstance(action, EnterPlan)]
    used = {name for plan in entered for name in plan.nodes}
    gone = tuple(DrainNode(node.node_id) for node in leaving if node.node_id not in used)
    return replace(moved, actions=(*gone, *moved.actions))


def _changes(ahead: State) -> str:
    """What the phase says of itself, in words."""
    number = ahead.job.phase
    keys = [key for key in ahead.job.phases[number].keys if key not in ("layout", "data")]
    said = [f"{key} {ahead.job.phases[number].keys[key]}" for key in keys]
    source: dict[str, Any] = ahead.job.phases[number].keys.get("data", {}).get("train", {})
    said += ["other data" if "seq" not in source else f"seq {source['seq']}"] if source else []
    named = ", ".join(said)
    return f"then comes phase {number + 1}" + (f" ({named})" if named else "")


def _without(state: State, text: str, rest: int) -> Decision | None:
    """The nodes are too few for the next phase: its state is stored at the boundary, and the run
    waits there for others as it does after a loss."""
    plan = state.plan
    if plan is None or rest > 1:
        return None
    if state.quiesced >= plan.workers:
        return Decision((Abort(state.generation),), text)
    if state.quiescing is None and not state.phase_over:
        return Decision((Quiesce(state.generation, save=True),), f"{text}; it is saved there")
    return Decision((), text)
