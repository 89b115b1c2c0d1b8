"""Nodes that reach the driver and not each other: which are known, and how long they are waited
for.

A generation meets only where each of its nodes reaches each other one. What does not meet is tried
again, since most cuts are short. Two nodes are apart when they have not met ATTEMPTS times in a
row, while the driver hears of both. left_out.py says which of them the others continue without.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.policy.state.state import Apart, State
from elastic.types import Node
from elastic.types.replacing import replace

ATTEMPTS = 2
# for nodes of which none can be left out: between two attempts, and in all
WAIT_S, WAIT_MOST_S = 60.0, 600.0

Pair = tuple[str, str]


def apart(state: State) -> tuple[Apart, ...]:
    """Nodes that have not met ATTEMPTS times since they met last."""
    return tuple(one for one in state.apart if len(one.generations) >= ATTEMPTS)


def waited_for(state: State) -> str:
    """Which nodes are apart, where none was left out for it; '' = none are."""
    pairs = ", ".join(" and ".join(one.nodes) for one in apart(state))
    return f"{pairs} do not reach each other, and the job cannot train without" if pairs else ""


def waited_until_s(state: State) -> float:
    return max((one.since_s + WAIT_MOST_S for one in apart(state)), default=0.0)


# --------------------------------------------------------------------------------------------- fold


def told(
    state: State, node_id: str, others: Collection[str], *, generation: int, at_s: float
) -> State:
    """A worker of that node has not reached these nodes when the generation met."""
    if not state.leaves_out or generation != state.generation:
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


def after_meeting(state: State, nodes: Collection[str]) -> tuple[Apart, ...]:
    """What is left when all of these nodes have reached each other."""
    if not state.apart:
        return state.apart
    return tuple(one for one in state.apart if not set(one.nodes) <= set(nodes))
