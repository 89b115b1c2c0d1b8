"""What foresight is worth: the least that anybody can expect who knows how a market behaves, and not
what comes next.

A market of one node is a Markov chain over what is seen of it in a tick: whether the node is there,
and for how long that has been so (`AGES`). With the chances of the whole trace, a dynamic program
over time, status, what runs and the work that is left finds the choice (nothing, spot, on demand)
of the least expected dollars with which no deadline is missed. It knows the chances beforehand,
sees without asking whether spot is there, and pays for nothing twice. What it pays on the trace
itself is no bound: the least is that of the mean and of the chain, which knows nothing of what
happened before the status that is there now; from one moment a policy may pay less by luck.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.sim.markets.traces import Trace

TICK_S, PARTS = 300.0, 3  # work is counted in parts of a tick
AGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 36, 60, 120)  # ticks, up to which one status lasts
NEVER = 1e7  # dollars: the deadline would be missed
IDLE, SPOT, FIXED = 0, 1, 2
Table = NDArray[np.float64]


@dataclass(frozen=True)
class Market:
    """`seen`: the status of each tick of a trace; `moves`: from status to status, a chance; a node
    is there in those below `n_up`."""

    seen: tuple[int, ...]
    moves: Table
    n_up: int


def market(trace: Trace) -> Market:
    """The trace follows upon itself."""
    n_ticks, n = int(trace.ends_s // TICK_S), len(AGES) + 1
    there = [trace.nodes_at(tick * TICK_S) >= trace.most for tick in range(n_ticks)]
    seen, age = list[int](), 0
    for tick in range(2 * n_ticks):
        age = age + 1 if there[tick % n_ticks] == there[tick % n_ticks - 1] else 1
        seen.append(bisect_left(AGES, age) + (0 if there[tick % n_ticks] else n))
    seen = seen[n_ticks:]
    moves = np.zeros((2 * n, 2 * n))
    for tick, status in enumerate(seen):
        moves[seen[tick - 1], status] += 1
    return Market(tuple(seen), moves / np.maximum(1, moves.sum(1, keepdims=True)), n)


@dataclass(frozen=True)
class Task:
    """Work of one node in parts of a tick, ticks until the deadline, dollars of a tick on spot and
    on demand, parts of a start."""

    work: int
    ticks: int
    spot_usd: float
    fixed_usd: float
    start: int

    @property
    def gains(self) -> list[int]:
        """Work of the first tick of a node, of the second ..., and of all that follow."""
        n = -(-self.start // PARTS) + 1
        return [min(PARTS, max(0, k * PARTS - self.start)) for k in range(1, n + 1)]


def _paid(after: Table, usd: float, gain: int) -> Table:
    """A tick that brings so much, and what is expected then; the last one is paid in part."""
    found = np.empty_like(after)
    found[:, gain:] = usd + after[:, : after.shape[1] - gain]
    for rest in range(gain):
        found[:, rest] = usd * (PARTS - gain + rest) / PARTS
    found[:, 0] = 0.0
    return found


def choices(of: Market, task: Task) -> tuple[NDArray[np.uint8], Table]:
    """[tick, what runs, status, work left] -> what to do, where nothing starts; and what it costs
    from the beginning on, [status, work left]."""
    gains, up = task.gains, np.arange(len(of.moves)) < of.n_up
    n = len(gains)
    costs = np.full((1 + 2 * n, len(up), task.work + 1), NEVER)  # nothing, ticks on spot, on demand
    costs[:, :, 0] = 0.0
    chosen = np.zeros((task.ticks, 3, len(up), task.work + 1), np.uint8)
    for tick in reversed(range(task.ticks)):
        lost = [np.where(up[:, None], one, costs[0]) for one in costs[1 : 1 + n]]
        idle = of.moves @ costs[0]
        spot = [
            _paid(of.moves @ lost[min(k, n - 1)], task.spot_usd, gain)
            for k, gain in enumerate(gains)
        ]
        fixed = [
            _paid(of.moves @ costs[1 + n + min(k, n - 1)], task.fixed_usd, gain)
            for k, gain in enumerate(gains)
        ]
        for one in spot:
            one[~up] = NEVER
        best = {}
        for what, rows in (
            (IDLE, (idle, spot[0], fixed[0])),
            (SPOT, (idle, spot[-1], fixed[0])),
            (FIXED, (idle, spot[0], fixed[-1])),
        ):
            chosen[tick, what] = np.argmin(rows, axis=0)
            best[what] = np.min(rows, axis=0)
        # after its k-th tick; a start that was begun is waited for
        costs = np.stack([best[IDLE], *spot[1:], best[SPOT], *fixed[1:], best[FIXED]])
        np.minimum(costs, NEVER, out=costs)
        costs[:, :, 0] = 0.0
    return chosen, costs[0]


def played(of: Market, task: Task, chosen: NDArray[np.uint8], first: int) -> float:
    """Dollars on the trace itself from its tick `first` on; infinite = it was late."""
    runs, age, rest, usd = IDLE, 0, task.work, 0.0
    gains = task.gains
    for tick in range(task.ticks):
        status = of.seen[(first + tick) % len(of.seen)]
        if runs == SPOT and status >= of.n_up:
            runs, age = IDLE, 0
        starts = 0 < age < len(gains)
        wanted = runs if starts else int(chosen[tick, runs, status, rest])
        runs, age = wanted, age + 1 if wanted == runs else 1
        if runs == IDLE:
            age = 0
            continue
        price = task.spot_usd if runs == SPOT else task.fixed_usd
        gain = gains[min(age, len(gains)) - 1]
        if rest <= gain:
            return usd + price * (PARTS - gain + rest) / PARTS
        usd, rest = usd + price, rest - gain
    return float("inf")


def without_foresight(trace: Trace, like: Any, starts_s: Sequence[float]) -> list[float]:
    """Dollars from each of these moments. `like`: the TickWorld of the job on one node."""
    per_tick = TICK_S / 3600
    task = Task(
        round(like.work_node_s * PARTS / TICK_S), int(like.deadline_s // TICK_S),
        like.spot_usd_per_h * per_tick, like.on_demand_usd_per_h * per_tick,
        int(like.start_s * PARTS / TICK_S),
    )  # fmt: skip
    of = market(trace)
    chosen, _ = choices(of, task)
    return [played(of, task, chosen, round(at_s / TICK_S)) for at_s in starts_s]
