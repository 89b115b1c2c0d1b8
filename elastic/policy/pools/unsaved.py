"""Work that is not stored yet, against the slack of a deadline: what is lost with spot nodes is
done again in it."""

from __future__ import annotations

from elastic.policy.copies.cadence import DURABLE_LEAST_S, DURABLE_TIMES
from elastic.policy.pools import pool_allocation
from elastic.policy.speed import measured_steps
from elastic.policy.state.state import State
from elastic.text import n_of
from elastic.types import Decision, StoreCopy

SHARE = 0.1  # of the slack, that it may be worth
STALLED = 0.02  # of the steps between two, that these checkpoints may take themselves


def saved(state: State) -> Decision | None:
    """A checkpoint out of turn, before a loss would take too much of the slack: peer replicas may
    be lost with all the nodes that a market takes at once. It is looked at behind each step."""
    plan, step_s = state.plan, state.step_time_s
    if not state.saves_in_time or plan is None or not plan.durable_every or not step_s:
        return None
    if all(pool.market_type != "spot" for pool in state.pools_of(plan.nodes)):
        return None
    fixed = pool_allocation.on_demand(state)
    spare = pool_allocation.slack_of(state, fixed, max(state.last_step_at_s, state.entered_at_s))
    if spare is None or spare.spare_s < 0:
        return None  # none is left that a loss could take
    asked = state.copy_asked_step
    since = max(state.saved_step, asked if state.entered_step <= asked <= state.step else 0)
    stored_s = max(DURABLE_TIMES * state.durable_s, state.durable_stall_s / STALLED)
    apart_s = max(DURABLE_LEAST_S, stored_s)
    to_next = plan.durable_every - state.step % plan.durable_every
    if (state.step - since) * step_s < apart_s or to_next * step_s < apart_s:
        return None
    work = state.work_between(since, state.step)
    workers = pool_allocation.steady_workers(state, fixed)
    again_s = work * measured_steps.worker_s(state, workers) / workers
    if again_s < SHARE * spare.spare_s:
        return None
    text = (
        f"{n_of(state.step - since, 'step')} since the last checkpoint would take {again_s:.0f} s "
        f"of the {spare.spare_s:.0f} s the deadline leaves, if lost: one is taken now"
    )
    return Decision((StoreCopy(plan.generation),), text)
