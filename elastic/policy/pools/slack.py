"""The slack of a deadline, and what it is spent on: on waiting for spot first, then on reclaims.

Work that on-demand nodes do early is work that spot could have done later at a third of the price;
so while there is slack nothing is paid but spot. It is not spent to the end: each reclaim takes
another start on demand out of it, and without any left spot could not be used any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from elastic.policy.pools import drain, hard_limits, hazard
from elastic.policy.speed import measured_steps
from elastic.policy.state.state import State
from elastic.types import Node, Pool

# of the time left, against steps that get slower
KEPT = 0.03
# Starts on demand. RESERVE: on-demand nodes stand in for spot from that slack on, until it is
# AHEAD more. RISKED: with less than that, no spot node is counted on. Searched with
# tests/bench/spot_policy.py --parts search on the first halves of the public traces.
RESERVE, AHEAD, RISKED = 9.0, 2.0, 1.5
# of the slack that the deadline began with, the most that is kept; but RESERVE_LEAST starts
RESERVED_MOST, RESERVE_LEAST = 0.5, 2.5
START_PRIOR_S = 600.0  # before any pool has given a node
RUNNING_MOST_S = 600.0  # what runs since the last step is believed to go on for so long
LOOK_S = 60.0  # how often it is looked at once it is used up
SCRIPT_REST_S = 3600.0  # believed of a script that is restarted, whose steps are its own


@dataclass(frozen=True)
class Slack:
    """`spare_s`: of the time left, what on-demand nodes alone would leave over; `whole_s`: of it
    when the run began. `start_s`: of one of them, with the pause that takes it in."""

    spare_s: float
    whole_s: float
    start_s: float
    left_s: float

    @property
    def reserve_s(self) -> float:
        """That is kept for reclaims."""
        most_s = max(RESERVE_LEAST * self.start_s, RESERVED_MOST * self.whole_s)
        return min(RESERVE * self.start_s, most_s)

    @property
    def behind(self) -> bool:
        return self.spare_s <= self.reserve_s

    @property
    def ahead(self) -> bool:
        return self.spare_s > self.reserve_s + AHEAD * self.start_s

    @property
    def last_call(self) -> bool:
        return self.spare_s <= RISKED * self.start_s

    @property
    def lasts_s(self) -> float:
        """Until it is behind, if nothing runs."""
        return self.spare_s - self.reserve_s

    def __str__(self) -> str:
        return (
            f"the deadline is in {self.left_s / 60:.0f} min, and on demand alone the rest leaves "
            f"{max(0.0, self.spare_s) / 60:.0f} min of it, "
            f"{self.reserve_s / 60:.0f} of which are kept for "
            f"{self.reserve_s / self.start_s:.0f} starts"
        )


def start_s(state: State, fixed: Pool) -> float:
    """Of a node on demand; before it has given one, the longest that another pool took, since what
    is prepared is the same."""
    others = [hazard.start_s(state, pool.name, START_PRIOR_S) for pool in state.pools]
    return hazard.start_s(state, fixed.name, max(others, default=START_PRIOR_S))


def step_at(state: State, step: int, now_s: float) -> float:
    """With the part of the running step that is done by now, so that slack does not seem to shrink
    between two looks."""
    if state.phase != "running" or not state.step_time_s:
        return step
    since_s = now_s - max(state.last_step_at_s, state.entered_at_s)
    return min(state.steps, step + min(max(0.0, since_s), RUNNING_MOST_S) / state.step_time_s)


def of(state: State, fixed: Pool, workers: int, *, step: float, now_s: float) -> Slack | None:
    """With so many workers on demand; None = no deadline, or no step has told yet how long the rest
    takes."""
    end_s = hard_limits.deadline_s(state)
    if end_s is None or not state.steps or not state.worker_step_s or workers <= 0:
        return None
    left_s = end_s - now_s
    work_s = measured_steps.worker_s(state, workers) / workers
    rest_s = state.work_between(step, state.steps) * work_s
    all_s = state.work_between(0, state.steps) * work_s
    whole_s = 3600 * (state.job.deadline_h or 0.0) * (1 - KEPT) - all_s
    change_s = start_s(state, fixed) + drain.lead_of(state).pause_s
    return Slack(left_s * (1 - KEPT) - rest_s, whole_s, change_s, left_s)


@dataclass(frozen=True)
class StandIn:
    """What it is worth that spot nodes do the work of on-demand ones: `less_usd_per_h` for `hours`,
    until one of them is taken or the job ends; then the nodes on demand start again, which costs
    `again_usd` at most as often."""

    less_usd_per_h: float
    hours: float
    again_usd: float

    @property
    def usd(self) -> float:
        return self.less_usd_per_h * self.hours - self.again_usd

    def __str__(self) -> str:
        return (
            f"${self.less_usd_per_h:.2f}/h less, for {60 * self.hours:.0f} min until the next "
            f"reclaim or the end: ${self.less_usd_per_h * self.hours:.2f} saved, and "
            f"${self.again_usd:.2f} for another start on demand"
        )


def stand_in(
    state: State, go: Sequence[Node | Pool], pools: Sequence[Pool], *, workers: int
) -> StandIn:
    """`go`: on-demand nodes, or a pool for one of its nodes each. `pools`: of the nodes that take
    over. `workers`: on which the rest of the job runs."""
    fixed = [one if isinstance(one, Pool) else state.pool(one.pool) for one in go]
    left = [pool for pool in fixed if pool is not None]
    gpus = sum(pool.gpus_per_node for pool in left)
    usd = sum(pool.usd_per_node_h for pool in left)
    cheap = min((pool.usd_per_gpu_h for pool in pools), default=inf)
    rest_s = SCRIPT_REST_S
    if state.rest_steps < inf:
        rest_s = state.rest_work * state.worker_step_s / max(1, workers)
    calm_h = hazard.calm_h(state, {pool.name for pool in pools})
    hours = min(calm_h, rest_s / 3600)
    longest_s = max((start_s(state, pool) for pool in left), default=0.0)
    again_s = longest_s + drain.lead_of(state).pause_s
    return StandIn(usd - gpus * cheap, hours, hours / calm_h * again_s / 3600 * usd)
