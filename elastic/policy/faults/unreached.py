"""Nodes that reach the driver and not each other: which are known, and how long they are waited
for.

A generation meets only where each of its nodes reaches each other one. What does not meet is tried
again, since most cuts are short. Two nodes are apart when they have not met ATTEMPTS times in a
row, while the driver hears of both. left_out.py says which of them the others continue without.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from elastic.policy.state.state import Apart, Failure, State
from elastic.types import Node
from elastic.types.replacing import replace

ATTEMPTS = 2
# for nodes of which none can be left out: between two attempts, and in all
WAIT_S, WAIT_MOST_S = 60.0, 600.0
OUT_S, OUT_MOST_S = 300.0, 3600.0

Pair = tuple[str, str]


def apart(state: State) -> tuple[Apart, ...]:
    """Nodes that have not met ATTEMPTS times since they met last."""
    return tuple(one for one in state.apart if len(one.generations) >= ATTEMPTS)


def kept_out_s(state: State, node_id: str) -> float:
    """For how long a node that is quarantined now is not prepared, should it come back under its
    name: longer each time."""
    n = state.kept_out.get(node_id, (0, 0.0))[0]
    return float(min(OUT_MOST_S, OUT_S * 2**n))


def waited_for(state: State) -> str:
    """Which nodes are apart, where none was left out for it; '' = none are."""
    pairs = ", ".join(" and ".join(one.nodes) for one in apart(state))
    return f"{pairs} do not reach each other, and the job cannot train without" if pairs else ""


def waited_until_s(state: State) -> float:
    return max((one.since_s + WAIT_MOST_S for one in apart(state)), default=-inf)


# --------------------------------------------------------------------------------------------- fold


def told(
    state: State, node_id: str, others: Collection[str], *, generation: int, at_s: float
) -> State:
    """A worker of that node has not reached these nodes when the generation met."""
    if not state.leaves_out or generation < state.generation:
        return state
    known = {one.nodes: one for one in state.apart}
    for other in others:
        if not (_stands(state.nodes.get(node_id)) and _stands(state.nodes.get(other))):
            continue
        pair = (min(node_id, other), max(node_id, other))
        found = known.get(pair, Apart(pair, at_s))
        if generation not in found.generations:
            known[pair] = replace(found, generations=(*found.generations, generation))
    return replace(state, apart=tuple(known[pair] for pair in sorted(known)))


def _stands(node: Node | None) -> bool:
    return node is not None and node.status not in ("lost", "quarantined")


def left_out(state: State, node_id: str, why: str, *, at_s: float) -> State:
    """That it was in the way explains why others have not met: without it they try anew."""
    aborting = state.aborting
    if not any(node_id in one.nodes for one in state.apart):
        return state
    if not state.keeps_out:  # else every node that is quarantined is (quarantine.py)
        n = state.kept_out.get(node_id, (0, 0.0))[0]
        out_until_s = at_s + kept_out_s(state, node_id)
        state = replace(state, kept_out={**state.kept_out, node_id: (n + 1, out_until_s)})
    if aborting is None or aborting.failure.cause != "infrastructure":
        return state
    failure = Failure("loss", f"node {node_id} is left out: {why}", at_s)
    return replace(
        state,
        retries=0,
        left_out_behind=(*state.left_out_behind, state.generation),
        aborting=replace(aborting, failure=failure),
    )


def after_meeting(state: State, nodes: Collection[str]) -> tuple[Apart, ...]:
    """What is left when all of these nodes have reached each other."""
    if not state.apart:
        return state.apart
    return tuple(one for one in state.apart if not set(one.nodes) <= set(nodes))
