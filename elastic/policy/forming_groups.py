"""Make before break: the process groups of an announced generation are made while the one before
trains on, so that the pause does not hold their set-up. What is announced waits for them
FORM_MOST_S at most; a notice waits no longer than its move needs.

What changes the nodes meanwhile (a notice that is withdrawn, a node that is lost) drops what is
being made. On GPUs the new communicators need memory beside those of the generation that trains:
where that is not there, they are made in the pause.
"""

from __future__ import annotations

from elastic.policy.pools.gpu_memory import gpu_bytes, on_gpus
from elastic.policy.state.state import Forming, State, standing_of
from elastic.reshard.communicators import CONTEXT_BYTES, messages_bytes, running_bytes, set_up_bytes
from elastic.text import gib
from elastic.types import Decision, DropGroups, EnterPlan, FormGroups, Plan
from elastic.types.replacing import replace

# NCCL takes 0.3 to 1 s for each group in a node, 5 to 30 s for all at hundreds of ranks
FORM_MOST_S = 60.0


def waiting(state: State, now_s: float) -> Decision | None:
    """Groups are being made, and nothing has changed since that was ordered."""
    forming = state.forming
    if forming is None or forming.ended or _changed(state, forming) or now_s >= _bound_s(forming):
        return None
    return _wait(state, forming)


def missing(state: State) -> bool:
    """Are no groups there or being made for the nodes as they are?"""
    return state.forms_ahead and (state.forming is None or _changed(state, state.forming))


def first(state: State, now_s: float, found: Decision | None) -> Decision | None:
    """The decision for a generation that runs, with the groups of a next one made before that is
    entered."""
    forming, plan = state.forming, _planned(found)
    if not state.forms_ahead or found is None or plan is None:
        if forming is None or not (_changed(state, forming) or now_s >= _bound_s(forming)):
            return found
        found = found or Decision()
        dropped = f"the groups made ahead for generation {forming.plan.generation} are not needed"
        text = f"{found.reason}; {dropped}" if found.reason else dropped
        return replace(
            found, actions=(DropGroups(forming.plan.generation), *found.actions), reason=text
        )
    if any(isinstance(action, FormGroups) for action in found.actions):
        return found
    if forming is None and (why := too_large(state, plan)):
        return replace(found, reason=f"{found.reason}; {why}")
    urgent, late = (
        plan.cause in ("notice", "phase"),
        forming is not None and now_s >= _bound_s(forming),
    )
    if forming is not None and (urgent or late or forming.ended):
        return _entered(found, forming, plan, now_s=now_s)
    if urgent:
        return found
    if forming is not None and forming.plan.meeting == plan.meeting:
        return _wait(state, forming)
    text = (
        f"{found.reason}; its process groups are built first, while generation {state.generation} "
        "trains on"
    )
    return Decision((FormGroups(plan),), text, now_s + FORM_MOST_S)


def begun(state: State, found: Decision) -> tuple[FormGroups, ...]:
    """The order to make the groups of the plan that `found` would enter; none where memory does not
    do for them."""
    plan = _planned(found)
    return () if plan is None or too_large(state, plan) else (FormGroups(plan),)


def too_large(state: State, plan: Plan) -> str:
    """Why the groups of a coming plan are not made beside those that train, by the GPU of least
    memory; '' = they may be, or it is not known what the running generation takes. What moves have
    connected since it was entered stays connected."""
    running = state.plan
    if running is None or not running.memory_bytes or not on_gpus(state, running.nodes):
        return ""
    rooms = [gpu_bytes(state, pool) for pool in state.pools_of(running.nodes)]
    if not rooms or not all(rooms):
        return ""
    links = running.move.links if running.move is not None else ()
    in_node = max(running.workers_per_node.values()) - 1 if any(a == b for a, b, _ in links) else 0
    connected = messages_bytes(in_node, any(a != b for a, b, _ in links))
    coming = set_up_bytes(plan.layout, len(plan.workers | plan.senders))
    there = running_bytes(running.layout, len(running.workers | running.senders))
    needed = running.memory_bytes + CONTEXT_BYTES + there + connected + coming
    if needed <= min(rooms):
        return ""
    return (
        f"groups of generation {plan.generation} are made in the pause: beside generation "
        f"{running.generation} they would need "
        f"{gib(coming)}, {gib(needed)} in all, of a GPU's {gib(min(rooms))}"
    )


def _planned(found: Decision | None) -> Plan | None:
    plans = (
        [action.plan for action in found.actions if isinstance(action, EnterPlan | FormGroups)]
        if found
        else []
    )
    return plans[0] if plans else None


def _entered(found: Decision, forming: Forming, plan: Plan, *, now_s: float) -> Decision:
    """With the ranks that the groups were made for, where only their order has changed since."""
    made = forming.plan
    same = (made.phase, made.layout, set(made.ranks)) == (plan.phase, plan.layout, set(plan.ranks))
    if forming.there and same:
        plan = replace(
            plan, ranks=made.ranks, samples=made.samples, layers=made.layers,
            n_microbatches=made.n_microbatches, copies_to=made.copies_to, move=made.move,
        )  # fmt: skip
    actions = tuple(
        EnterPlan(plan) if isinstance(action, EnterPlan) else action for action in found.actions
    )
    return replace(found, actions=actions, reason=f"{found.reason}; {_told(forming, plan, now_s)}")


def _told(forming: Forming, plan: Plan, now_s: float) -> str:
    groups = f"groups of generation {plan.generation}"
    if forming.error:
        return f"{groups} are made in the pause: {forming.error}"
    if forming.seconds is None:
        return f"{groups} are made in the pause: not there after {now_s - forming.since_s:.1f} s"
    if forming.plan.meeting != plan.meeting:
        return (
            f"{groups} are made in the pause: those made ahead are for another layout or other "
            "workers"
        )
    return f"{groups} made ahead in {forming.seconds:.1f} s"


def _wait(state: State, forming: Forming) -> Decision:
    text = (
        f"the groups of generation {forming.plan.generation} are made while generation "
        f"{state.generation} trains on"
    )
    return Decision((), text, _bound_s(forming))


def _bound_s(forming: Forming) -> float:
    return forming.since_s + FORM_MOST_S


def _changed(state: State, forming: Forming) -> bool:
    return standing_of(state) != forming.nodes
