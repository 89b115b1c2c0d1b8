"""Budget and deadline: hard limits, kept with enough in hand to save the state."""

from __future__ import annotations

from math import floor, inf

from elastic.policy.copies import recovery
from elastic.policy.pools import drain, hazard
from elastic.policy.state.state import State, StopWish
from elastic.types import Pool

STOP_MOST_S = 60.0  # at least, for saving after a wish to stop
SAVE_STEPS = 2  # the order may just miss the word of a step
SAVE_SAFETY = 1.5  # times the seconds that a checkpoint took
SAVE_PRIOR_S = 2.0  # for a checkpoint, before one was stored
START_LEAST_S = 10.0  # before a pool has given a node: requests are not refused by guesses
START_BORNE_S = 60.0  # a node that starts within it is asked for whatever is left of the run


def save_s(state: State) -> float:
    """Seconds until the running generation has stopped and its state is stored; 0 when nothing
    runs."""
    if state.phase not in ("running", "entering"):
        return 0.0
    if state.job.restarted:  # it saves when it is told to, not at the next step
        return SAVE_SAFETY * (state.durable_s or SAVE_PRIOR_S)
    return SAVE_STEPS * step_s(state) + SAVE_SAFETY * (stored_s(state) or SAVE_PRIOR_S)


def stored_s(state: State) -> float:
    """What a checkpoint takes where the ranks of the newest plan write it, by those that were
    stored; 0 = none was. Fewer ranks have more to write each; more of them may share one link, and
    are not counted on to be quicker."""
    plan = state.target or state.plan
    if plan is None or not state.scales_saves:
        return state.durable_s
    return state.durable_s * max(1.0, state.durable_ranks / len(plan.ranks))


def step_s(state: State) -> float:
    plan = state.plan or state.target
    return state.step_time_s or (plan.predicted_step_time_s if plan else 0.0)


def stop_most_s(state: State) -> float:
    """How long a wish to stop waits for the copy."""
    return max(STOP_MOST_S, 2 * save_s(state))


def awaits_save(state: State) -> bool:
    """A person has asked to stop, and memory alone holds the newest step."""
    waits = state.awaits_stop and state.stop is not None and not state.stop.limit
    if not waits or state.job.restarted or state.saved_step >= state.step:
        return False
    if state.target is not None:
        resume = state.target.resume
        return resume.source == "live" or resume.step > state.saved_step
    if state.plan is not None or (state.aborting is not None and state.aborting.owing):
        return True
    memory = recovery.from_memory(state)
    return memory is not None and memory.step > state.saved_step


def budget_usd(state: State) -> float | None:
    return state.job.budget_usd


def deadline_s(state: State) -> float | None:
    """When the run must have ended: `deadline_h` hours after its first start."""
    hours = state.job.deadline_h
    return (
        None
        if hours is None or state.first_started_at_s is None
        else state.first_started_at_s + 3600 * hours
    )


def wish(state: State, at_s: float) -> StopWish | None:
    """The wish to stop of a budget or a deadline that is all but used up."""
    return _by_budget(state, at_s) or _by_deadline(state, at_s)


def about_to_end(state: State, at_s: float) -> bool:
    """It is to stop, or its last step is done and is being stored."""
    stored = state.phase == "running" and state.rest_steps <= 0
    return stored or state.stop is not None or wish(state, at_s) is not None


def _by_budget(state: State, at_s: float) -> StopWish | None:
    budget = budget_usd(state)
    if budget is None:
        return None
    usd, kept_s = state.usd_at(at_s), save_s(state)
    over_usd = usd + state.usd_per_h * kept_s / 3600 - budget
    if usd >= budget:
        text = f"is spent (${usd:.2f})"
    elif over_usd >= 0:
        text = f"is almost spent (${usd:.2f}; the last {kept_s:.0f} s are kept for saving)"
    else:
        return None
    due_s = at_s
    if state.dates_budget:  # not the moment of each look: what waits for a copy would wait anew
        since_s = over_usd / state.usd_per_h * 3600 if state.usd_per_h else at_s
        due_s = max(min(at_s, state.billed_at_s), at_s - since_s)
    return StopWish(f"the budget of ${budget:.2f} {text}", due_s, limit=True)


def _by_deadline(state: State, at_s: float) -> StopWish | None:
    end_s = deadline_s(state)
    if end_s is None or at_s < end_s - save_s(state):
        return None
    all_done = state.steps and state.step >= state.steps
    late = at_s >= end_s and owes_last(state)
    if all_done and not late and not (state.ends_undone and _undone(state)):
        return None
    left = state.rest_work
    if state.phase == "running" and state.step_time_s and at_s + left * step_s(state) < end_s:
        return None  # it gets done
    # a script's steps are its own
    where = f" at step {state.step} of {state.steps}" if state.steps else ""
    # not the moment of each look: what waits for a copy would wait anew
    kept_s = 0.0 if owes_last(state) else save_s(state)
    due_s = end_s - kept_s if state.spends_slack else at_s
    return StopWish(f"the deadline of {state.job.deadline_h:g} h is over{where}", due_s, limit=True)


def owes_last(state: State) -> bool:
    """All steps are done, and the checkpoint of the last one is all that is missing."""
    return state.awaits_last and state.saved_step < state.steps <= state.step


def _undone(state: State) -> bool:
    """All steps were done, and nothing runs, and the last of them are neither stored nor held by
    anybody: they have to be done again."""
    owing = state.aborting is not None and state.aborting.owing
    if state.phase != "waiting" or owing or state.saved_step >= state.steps:
        return False
    memory = recovery.from_memory(state)
    return memory is None or memory.step < state.steps


def wakes(state: State, now_s: float) -> list[float]:
    """When a limit is reached if nothing changes."""
    found = []
    budget, end_s = budget_usd(state), deadline_s(state)
    if budget is not None and state.usd_per_h:
        left_s = (budget - state.usd_at(now_s)) / state.usd_per_h * 3600 - save_s(state)
        found.append(now_s + max(0.0, left_s) + 1e-3)
    if end_s is not None:
        found.append((end_s if now_s >= end_s - save_s(state) else end_s - save_s(state)) + 1e-3)
    return found


def spent_at_s(state: State, now_s: float) -> float:
    """When the bill reaches the budget."""
    budget = budget_usd(state)
    if budget is None or not state.usd_per_h:
        return float("inf")
    return now_s + (budget - state.usd_at(now_s)) / state.usd_per_h * 3600


def useful_s(state: State, pool: Pool) -> float:
    """For how long another node of the pool must be paid to be of use: its start, the pause that
    takes it in, and at least as much training as the start took, then saving."""
    pause_s = max(state.pauses_s, default=0.0)
    return 2 * hazard.start_s(state, pool.name, START_LEAST_S) + pause_s + save_s(state)


def affordable(state: State, pool: Pool, coming_usd_per_h: float, *, now_s: float) -> int | None:
    """How many more nodes of the pool the budget bears, with all that is there and coming, until
    they have been of use; None = any number."""
    budget = budget_usd(state)
    if budget is None or pool.usd_per_node_h <= 0:
        return None
    left = budget - state.usd_at(now_s)
    borne_usd_per_h = left * 3600 / useful_s(state, pool)
    # those that start are among what is coming
    there_usd_per_h = state.usd_per_h - state.starting_usd_per_h
    return max(
        0, floor((borne_usd_per_h - there_usd_per_h - coming_usd_per_h) / pool.usd_per_node_h)
    )


def rest_s(state: State, workers: int) -> float:
    """Until the last step is done by so many workers, at the measured pace; inf = nobody knows."""
    if not state.worker_step_s or state.rest_steps == inf or workers <= 0:
        return inf
    return state.rest_work * state.worker_step_s / workers


def gains_little(state: State, old: int, new: int, *, in_s: float = 0.0) -> bool:
    """Would the pause that takes others in, so many seconds from now, be longer than what `new`
    workers gain over `old` until the end?"""
    pause_s = drain.lead_of(state).pause_s
    left_s = rest_s(state, old) - in_s
    return pause_s > drain.PRIOR_PAUSE_S and (1 - old / new) * left_s <= pause_s


def too_late(state: State, pool: Pool, *, now_s: float, joined: int = 0) -> bool:
    """Will the run have ended before another node of the pool has been of use? Where the deadline
    is missed as it is, and on demand, for which the slack of a deadline is weighed elsewhere, it
    need only be there before the deadline. `joined`: workers with all that is asked for."""
    if 0 < state.steps <= state.step:
        return True
    known_s = max((seen.start_s for seen in state.history.values()), default=0.0)
    start_s = hazard.start_s(state, pool.name, known_s)
    if start_s <= START_BORNE_S or pool.market_type == "owned":
        return False
    more_s, end_s = max(state.pauses_s, default=0.0) + save_s(state), deadline_s(state)
    left_s = inf if end_s is None else end_s - now_s
    if left_s < start_s + more_s:
        return True
    workers = sum(gpus for _, gpus in state.there.values())
    if state.plan is not None:
        workers = min(workers, state.plan.layout.world_size)
    needed_s = rest_s(state, workers)
    if needed_s > left_s or (end_s is not None and pool.market_type == "on-demand"):
        return False
    if needed_s < 2 * start_s + more_s:
        return True
    runs = state.plan is not None and joined > workers
    return runs and gains_little(state, workers, joined, in_s=start_s)


def no_use(pool: Pool) -> str:
    """Why a pool is not asked so late; the same words as long as that holds."""
    return f"no more nodes of pool {pool.name}: the run would end before one had been of use"


def too_dear(pool: Pool) -> str:
    """Why a pool is not asked; the same words as long as that holds."""
    price = f"${pool.usd_per_node_h:.2f}/h"
    return (
        f"no more nodes of pool {pool.name} ({price}): the rest of the budget would be gone "
        "before one had been of use"
    )


def nothing_to_buy(state: State, now_s: float) -> str:
    """Why no node of any pool that has room can be paid any more; '' = one can."""
    room = [
        pool
        for pool in state.pools
        if sum(node.pool == pool.name for node in state.alive) < pool.max_nodes
    ]
    if not room or any(affordable(state, pool, 0.0, now_s=now_s) != 0 for pool in room):
        return ""
    left, cheapest = (
        (budget_usd(state) or 0.0) - state.usd_at(now_s),
        min(pool.usd_per_node_h for pool in room),
    )
    need_s = min(useful_s(state, pool) for pool in room)
    price = (
        f"${left:.2f} are left, the cheapest costs ${cheapest:.2f}/h and is of use after "
        f"{need_s:.0f} s at the earliest"
    )
    return f"the budget of ${budget_usd(state):.2f} buys no more nodes: {price}"
