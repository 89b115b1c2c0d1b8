"""Time against money: is waiting for spot worth it, and what does the deadline need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from elastic.policy.pools import drain, hard_limits, hazard
from elastic.policy.state.state import State
from elastic.types import Pool

LOOK_LEAST_S = 1.0  # until the moment at which time alone changes something
DEADLINE_KEPT = 0.03  # of the time left, against steps that get slower
BUSY_LEAST = 0.5  # of the time, that reclaims leave


@dataclass(frozen=True)
class WaitDecision:
    """`look_s`: when waiting will have become too dear, if nothing comes; None = it will not."""

    falls_back: bool
    why: str
    look_s: float | None = None


@dataclass(frozen=True)
class DeadlineProgress:
    """What the deadline asks for. `workers`: that get it done; `last_call`: spot cannot be counted
    on any more; `wakes`: when one of these will be otherwise if nothing happens."""

    workers: int
    behind: bool
    ahead: bool
    last_call: bool = False
    why: str = ""
    wakes: tuple[float, ...] = ()


def waiting(state: State, fixed: Pool, missing: int, *, now_s: float) -> WaitDecision:
    """Falls back when what waiting on is expected to cost is more than what on-demand nodes cost
    instead.

    Waiting costs per hour w = what idle nodes cost + waiting_usd_per_h. On-demand nodes cost per
    hour f = their price less that of spot for the same workers, reclaims included
    (hazard.usd_per_gpu_h); work done on them need not be done again. They cost once B = their start
    and the two pauses of coming and going. With r = expected hours until spot is back
    (hazard.dry_for_h): on demand when (w - f) r >= B. That is the buy-or-rent rule (Karlin et al.
    1988, Competitive snoopy caching) with an expectation in place of the unknown length: r grows
    while nothing comes.
    """
    spot = [pool for pool in state.pools if pool.market_type == "spot"]
    idle = state.usd_per_h - state.head_usd_per_h if state.phase == "waiting" else 0.0
    price = fixed.usd_per_gpu_h * missing
    hour = state.job.waiting_usd_per_h
    if hour == "auto":
        hour = 0.0 if state.job.deadline_h is not None else price
    n, pause_s = max(1, len(state.alive)), drain.lead_of(state).pause_s
    spot_usd = (
        min((hazard.usd_per_gpu_h(state, pool, n, pause_s=pause_s) for pool in spot), default=0.0)
        * missing
    )
    droughts = (
        (hazard.dry_for_h(state, pool.name, now_s), 1 + hazard.of(state, pool.name).droughts)
        for pool in spot
    )
    dry_h, ends = min(droughts, default=(inf, 1))
    once = price * (hazard.start_s(state, fixed.name) + 2 * pause_s) / 3600
    less = idle + hour - (price - spot_usd)
    waits = f"waiting costs ${idle + hour:.2f}/h (${idle:.2f} of it idle nodes)"
    costs = f"{waits}, on demand ${price - spot_usd:.2f}/h more than spot"
    if less <= 0:
        return WaitDecision(False, f"{costs}: waiting for spot")
    if less * dry_h < once:
        until = (
            f"until it is expected to stay away for {60 * once / less:.0f} min (a start on demand "
            f"costs ${once:.2f})"
        )
        return WaitDecision(
            False,
            f"{costs}: waiting for spot {until}",
            now_s + max(LOOK_LEAST_S, 3600 * (once / less - dry_h) * ends),
        )
    awaited = (
        f"spot is expected in {60 * dry_h:.0f} min" if dry_h < inf else "there is no spot pool"
    )
    saves = f"falling back saves ${less * min(dry_h, 1e6):.2f} for ${once:.2f} once"
    return WaitDecision(True, f"too few nodes to run: {costs}, and {awaited}: {saves}")


def needed(
    state: State, fixed: Pool, steady_workers: int, *, now_s: float
) -> DeadlineProgress | None:
    """The 'uniform progress' rule of Can't Be Late (Wu et al., NSDI 2024, section 4), for many
    workers; None = no deadline.

    Progress is expected to grow evenly from the first start (and one changeover d) to the deadline:
    c_e(t). Behind it, on-demand nodes make up for what spot lacks (uniform progress); spot is taken
    whenever it is there, also when behind (taking risks); on-demand nodes stay until progress is
    that expected at t + 2 d (hysteresis); and when the time left is no more than what the rest
    takes on the steady nodes alone + 2 d, spot does not count any more (safety net). Workers that
    are needed: rest of the work in worker-seconds / time left, and reclaims on top.
    """
    end_s, steps = hard_limits.deadline_s(state), state.steps
    if end_s is None or state.first_started_at_s is None or not steps:
        return None
    change_s = hazard.start_s(state, fixed.name) + drain.lead_of(state).pause_s
    whole_s = max(1.0, end_s - state.first_started_at_s - change_s)
    since_s = now_s - state.first_started_at_s - change_s
    step = safe_step(state)
    whole, done = state.work_between(0, steps), state.work_between(0, step)
    lag_s = since_s - whole_s * done / whole
    left_s = end_s - now_s
    behind, ahead = lag_s > 0, lag_s < -2 * change_s
    turns_s = [-lag_s, -lag_s - 2 * change_s]  # until it is behind, and not ahead any more
    if not state.worker_step_s:
        text = f"no step yet, {left_s / 60:.0f} min before the deadline"
        return DeadlineProgress(0, behind, False, False, text, _wakes(turns_s, now_s))
    rest_s = (whole - done) * state.worker_step_s / _busy(state)
    usable_s = left_s * (1 - DEADLINE_KEPT) - 2 * change_s
    workers = ceil(rest_s / usable_s) if usable_s > 0 else 10**9
    last = False
    if steady_workers > 0:
        last_s = left_s - (rest_s / steady_workers + 2 * change_s) / (1 - DEADLINE_KEPT)
        last = last_s <= 0
        turns_s.append(last_s)
    lag = f"{abs(lag_s) / 60:.0f} min {'behind' if lag_s > 0 else 'ahead of'}"
    text = (
        f"step {step} of {steps}, {lag} even progress; the deadline is in "
        f"{left_s / 60:.0f} min and asks for "
        f"{min(workers, 10**6)} workers" + ("; spot is no longer counted on" if last else "")
    )
    return DeadlineProgress(workers, behind, ahead, last, text, _wakes(turns_s, now_s))


def _wakes(turns_s: Sequence[float], now_s: float) -> tuple[float, ...]:
    """Those that are still to come."""
    return tuple(now_s + max(LOOK_LEAST_S, left_s) for left_s in turns_s if left_s >= 0)


def safe_step(state: State) -> int:
    """Progress that counts: while nothing runs, what is held in the memory of idle nodes may yet be
    lost with them."""
    return state.saved_step if state.phase == "waiting" else state.step


def _busy(state: State) -> float:
    """The share of the time that the plan's expected reclaims leave."""
    per_h = hazard.reclaims_by_pool_per_h(state, state.plan_by_pool)
    return max(BUSY_LEAST, 1 - per_h * drain.lead_of(state).pause_s / 3600)
