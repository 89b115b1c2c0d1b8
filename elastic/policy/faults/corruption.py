"""Silent data corruption: which steps and copies it has corrupted, and which node is quarantined
for it.

What is wrong since some step after `good_step` of generation g is wrong in every later step of it
and of the generations before it, and in what came of these: copies of such steps are not taken any
more, neither from memory nor from storage, where they are removed.

A node is quarantined where it is named: it differs from a majority, or all that may be wrong stand
on it. The only node there is is not: the run goes back on it, a bounded number of times. Where two
of two may be wrong, nobody is: the run goes back, and remembers both. When it happens again, a node
that is suspected both times is quarantined; if the same ones are again, one of them (that whose
device says something, else the last one), so that the next time, if there is one, tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic.policy.faults.failures import explained, failed
from elastic.policy.faults.refused_layouts import until
from elastic.policy.state.state import Failure, State
from elastic.types import (
    Action,
    Copy,
    Decision,
    NumbersChecked,
    Plan,
    Quarantine,
    ReleaseNode,
    RemoveCopy,
    WorkerId,
    WrongNumbers,
)
from elastic.types.grid import replica_key
from elastic.types.replacing import replace


def corrupted(state: State, generation: int, step: int) -> bool:
    """Is that step of that generation known to be wrong?"""
    return step > state.astray.get(generation, step) or any(
        generation <= last and step > good for last, good in state.wrong
    )


def put_aside(state: State, now_s: float) -> Decision | None:
    """Nodes that are named, and checkpoints that are wrong."""
    named = [
        name
        for name in sorted(state.blamed)
        if (node := state.nodes.get(name)) and node.status not in GONE
    ]
    if not named and not state.spoilt:
        return None
    actions: list[Action] = []
    for name in named:
        actions += [Quarantine(name, state.blamed[name]), ReleaseNode(name)]
    actions += [RemoveCopy(uri) for uri in state.spoilt]
    texts = [f"node {name} is quarantined: {state.blamed[name]}" for name in named]
    texts += (
        [f"{len(state.spoilt)} checkpoints that were stored since are removed"]
        if state.spoilt
        else []
    )
    return Decision(tuple(actions), "; ".join(texts))


GONE = ("lost", "quarantined")


# --------------------------------------------------------------------------------------------- fold


def _wrong_numbers(state: State, event: WrongNumbers, at_s: float) -> State:
    if event.generation > state.generation or any(
        g >= event.generation and s <= event.good_step for g, s in state.wrong
    ):
        return state
    derived = _comes_of(state, event)
    last = state.generation if derived else event.generation
    state = replace(
        state,
        wrong=(*state.wrong, (last, event.good_step)),
        probes=until(state.probes, event.good_step),
    )
    losses = {
        step: loss for step, loss in state.losses.items() if not corrupted(state, loss[2], step)
    }
    state = replace(state, losses=losses)
    bad = [copy for copy in state.durable if corrupted(state, copy.generation, copy.step)]
    peer = (
        None
        if state.peer and corrupted(state, state.peer.generation, state.peer.step)
        else state.peer
    )
    state = without_copies(replace(state, peer=peer), bad)
    plan = state.plans.get(event.generation)
    blamed, suspects = (
        _blamed(state, plan, event.workers) if plan else (frozenset[str](), state.suspects)
    )
    text = (
        f"step {event.step}: silent data corruption, right until step {event.good_step}: "
        f"{event.reason}"
    )
    state = replace(
        state, suspects=suspects, blamed={**state.blamed, **dict.fromkeys(sorted(blamed), text)}
    )
    names = sorted({worker.node_id for worker in event.workers})
    told = f"{text}; {_whom(sorted(blamed), names)}"
    if not derived:
        return state
    state = state if blamed else replace(state, rollbacks=state.rollbacks + 1)
    failure = Failure("rollback", told, at_s)
    return explained(state, failure) if state.aborting else failed(state, failure)


def _whom(blamed: Sequence[str], names: Sequence[str]) -> str:
    if blamed:
        return f"{', '.join(blamed)} computed them"
    return (
        f"which of {', '.join(names)} computed them cannot be told yet"
        if names
        else "who computed them is not known"
    )


def without_copies(state: State, copies: Sequence[Copy]) -> State:
    """Nothing resumes from these checkpoints any more, and they will be removed."""
    uris = {copy.uri for copy in copies}
    durable = tuple(copy for copy in state.durable if copy.uri not in uris)
    return (
        replace(state, durable=durable, spoilt=tuple(dict.fromkeys((*state.spoilt, *sorted(uris)))))
        if uris
        else state
    )


def _comes_of(state: State, event: WrongNumbers) -> bool:
    """Does the newest generation resume from a step that is wrong?"""
    plan = state.plans.get(state.generation)
    while plan is not None and plan.generation > event.generation:
        resume = plan.resume
        if resume.source == "fresh" or (resume.source != "live" and resume.step <= event.good_step):
            return False
        plan = state.plans.get(resume.generation)
    return True


def _blamed(
    state: State, plan: Plan, workers: Sequence[WorkerId]
) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes that are quarantined, and those that stay suspected."""
    nodes = {worker.node_id for worker in workers}
    others = [
        n
        for n in state.nodes.values()
        if n.status in ("ready", "prepared") and n.node_id not in plan.workers_per_node
    ]
    if not nodes or (len(plan.nodes) < 2 and not others):
        return frozenset(), state.suspects
    if len(nodes) == 1 or not _ambiguous(plan, workers):
        return frozenset(nodes), state.suspects - nodes
    again = nodes & state.suspects
    if not again:
        return frozenset(), frozenset(nodes)
    if again == nodes:
        noted = {worker.node_id for worker in state.device_notes if worker.node_id in again}
        order = [name for name in plan.nodes if name in (noted if len(noted) == 1 else again)]
        again = {order[-1]}
    return frozenset(again), frozenset(nodes - again)


def _ambiguous(plan: Plan, workers: Sequence[WorkerId]) -> bool:
    """Is all of a group of ranks with equal boxes suspected, or half of all ranks?"""
    if 2 * len(set(workers)) >= len(plan.ranks):
        return True
    groups: dict[int, list[WorkerId]] = {}
    for rank, worker in enumerate(plan.ranks):
        groups.setdefault(replica_key(plan.layout, rank), []).append(worker)
    return any(len(group) > 1 and set(group) <= set(workers) for group in groups.values())


def _numbers_checked(state: State, event: NumbersChecked, at_s: float) -> State:
    return replace(state, checked_step=event.step) if state.is_current(event.generation) else state


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    WrongNumbers: _wrong_numbers,
    NumbersChecked: _numbers_checked,
}
