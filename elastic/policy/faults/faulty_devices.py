"""Nodes of which a device has failed: when they are quarantined.

The processes on such a node still hold peer replicas in host memory, and those of its other devices
live state. It is left like a node with notice: no plan uses it, the next generation may take state
from it, and then it goes.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.policy.copies import recovery
from elastic.policy.state.state import State
from elastic.types import Action, Decision, Node, Quarantine, ReleaseNode
from elastic.types.replacing import replace

# after a generation was aborted: by then the next one has been ordered, if there are nodes for it
SETTLE_S = 10.0
KEEP_MOST_S = 600.0  # while nothing runs, for state that no other node holds


def reasons(state: State, nodes: Iterable[Node]) -> dict[str, str]:
    """Node -> how its device has failed, of those nodes on which one has."""
    names = {node.node_id for node in nodes}
    return {
        worker.node_id: why
        for worker, why in sorted(state.faulty.items(), reverse=True)
        if worker.node_id in names
    }


def quarantined(bad: dict[str, str]) -> Decision:
    actions: list[Action] = []
    for name, why in sorted(bad.items()):
        actions += [Quarantine(name, why), ReleaseNode(name)]
    return Decision(
        tuple(actions),
        "; ".join(f"node {name} is quarantined: {why}" for name, why in sorted(bad.items())),
    )


def not_waited_for(state: State, now_s: float) -> set[str]:
    """Such nodes, while nothing runs, whose state others have as well, or that have been waited for
    long enough: their places may be what the run waits for."""
    names = state.faulty_nodes
    if state.aborting is None:
        return names
    if not names or state.aborting.owing or now_s < state.aborting.at_s + SETTLE_S:
        return set()
    if now_s >= state.aborting.at_s + KEEP_MOST_S:
        return names
    newest = recovery.from_memory(state)
    found: set[str] = set()
    for name in sorted(names):
        without = found | {name}
        held = {
            worker: there
            for worker, there in state.holdings.items()
            if worker.node_id not in without
        }
        left = recovery.from_memory(replace(state, holdings=held))
        if newest is None or (left is not None and left.step >= newest.step):
            found = without
    return found


def wakes(state: State, now_s: float) -> list[float]:
    """When to look again at those that are kept while nothing runs."""
    if not state.faulty or state.aborting is None:
        return []
    times = (state.aborting.at_s + SETTLE_S, state.aborting.at_s + KEEP_MOST_S)
    return [at_s for at_s in times if at_s > now_s]
