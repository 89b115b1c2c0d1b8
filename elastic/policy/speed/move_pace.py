"""How far moves of the state were from what was told beforehand."""

from __future__ import annotations

from elastic.policy.state.state import State
from elastic.reshard.chunks import LEAST_S
from elastic.types import Plan, PlanEntered

LARGE_BYTES = 8 << 20  # smaller moves say nothing of the pace
SLOWEST, FASTEST = 50.0, 0.1  # of the pace, against mishaps in a measurement


def paced(state: State, plan: Plan, event: PlanEntered) -> float:
    """Measured by predicted seconds of moves, a running mean."""
    move, measured_s = plan.move, event.phases_s.get("transfer", 0.0)
    if (
        move is None
        or not measured_s
        or move.n_bytes + move.own_bytes < LARGE_BYTES
        or move.seconds <= LEAST_S
    ):
        return state.move_pace
    found = state.move_pace * max(0.0, measured_s - LEAST_S) / (move.seconds - LEAST_S)
    found = min(SLOWEST, max(FASTEST, found))
    return found if state.move_pace == 1.0 else 0.5 * (state.move_pace + found)
