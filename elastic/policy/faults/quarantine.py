"""For how long a quarantined node is not used again, should it come back under its name.

A cluster that Ray does not scale has the nodes that it has: what is released stays there, and is
given again when a node is asked for. What was wrong may have passed by then (a slow network, memory
that others held), so it is tried again after a time that grows with each quarantine; where the
hardware is to blame, not for a day. A node that has died before it was ever prepared is left to the
patience with its pool (hazard.py).
"""

from __future__ import annotations

from elastic.policy.faults.failures import HARDWARE
from elastic.policy.faults.unreached import kept_out_s
from elastic.policy.state.layered import less
from elastic.policy.state.state import State
from elastic.text import duration
from elastic.types import Decision, Quarantine
from elastic.types.replacing import replace

DAY_S = 86400.0


def rest_s(state: State, node_id: str, now_s: float) -> float:
    """How much longer the node is kept out; 0 = it may be used."""
    return max(0.0, state.kept_out.get(node_id, (0, 0.0))[1] - now_s)


def out_s(state: State, node_id: str, now_s: float) -> float:
    """For how long a node that is quarantined now is kept out."""
    if rest := rest_s(state, node_id, now_s):
        return rest
    if node_id in state.unseen or (node_id in state.born and node_id not in state.kept_out):
        return 0.0  # only not heard of, since this driver came; or never prepared
    hardware = any(
        worker.node_id == node_id and any(word in why for word in HARDWARE)
        for worker, why in state.faulty.items()
    )
    return DAY_S if hardware or node_id in state.blamed else kept_out_s(state, node_id)


def with_times(state: State, decision: Decision, now_s: float) -> Decision:
    """What gives nodes has to know, too."""
    if not state.keeps_out or not any(isinstance(one, Quarantine) for one in decision.actions):
        return decision
    actions = tuple(
        replace(one, out_s=out_s(state, one.node_id, now_s)) if isinstance(one, Quarantine) else one
        for one in decision.actions
    )
    return replace(decision, actions=actions)


def came_back(state: State, node_id: str, now_s: float) -> str:
    """Why a node that is there again is released at once; '' = it may be used."""
    rest = rest_s(state, node_id, now_s)
    return f"it was quarantined, and is not used for another {duration(rest)}" if rest else ""


def ordered(state: State, order: Quarantine, at_s: float) -> State:
    """What a node is kept out for does not count against its pool. One that is quarantined again
    because it came back too early has no longer to wait."""
    if not order.out_s:
        return state
    state = replace(state, born=less(state.born, order.node_id))
    n = state.kept_out.get(order.node_id, (0, 0.0))[0] + (not rest_s(state, order.node_id, at_s))
    kept = {name: out for name, out in state.kept_out.items() if out[1] > at_s - DAY_S}
    return replace(state, kept_out={**kept, order.node_id: (n, at_s + order.out_s)})
