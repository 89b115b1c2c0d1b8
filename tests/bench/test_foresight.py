"""The best policy without foresight: equal to the whole tree of what may happen, on a small world."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from foresight import FIXED, IDLE, NEVER, PARTS, SPOT, TICK_S, Market, Task, choices, market, played

from elastic.sim.markets.traces import Trace

TASK = Task(work=8, ticks=7, spot_usd=1.0, fixed_usd=3.0, start=4)
CHANCES = Market((0, 1), np.array([[0.7, 0.3], [0.4, 0.6]]), 1)


def expected(of: Market, task: Task, status: int) -> float:
    """Every choice in every tick, and everything that may come of it. What was begun is waited for."""

    @cache
    def least(tick: int, runs: int, age: int, status: int, rest: int) -> float:
        if tick == task.ticks:
            return NEVER
        if runs == SPOT and status >= of.n_up:
            runs, age = IDLE, 0
        found = []
        begun = runs != IDLE and age * PARTS < task.start
        for what in [runs] if begun else [IDLE, FIXED, *([SPOT] if status < of.n_up else [])]:
            old = age if what == runs else 0
            price = (0.0, task.spot_usd, task.fixed_usd)[what]
            works = min(PARTS, max(0, (old + 1) * PARTS - task.start)) if what != IDLE else 0
            if rest <= works:
                found.append(price * (PARTS - works + rest) / PARTS)
                continue
            age_after = min(old + 1, task.ticks) if what != IDLE else 0
            after = [
                chance * least(tick + 1, what, age_after, then, rest - works)
                for then, chance in enumerate(of.moves[status])
            ]
            found.append(price + sum(after))
        return min(NEVER, min(found))

    return least(0, IDLE, 0, status, task.work)


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("ticks", [3, 4, 5, 7])
def test_it_expects_the_least_of_all_that_may_happen(status: int, ticks: int) -> None:
    task = Task(TASK.work, ticks, TASK.spot_usd, TASK.fixed_usd, TASK.start)
    _, costs = choices(CHANCES, task)
    assert costs[status, task.work] == pytest.approx(expected(CHANCES, task, status), rel=1e-9)


def test_where_nothing_changes_it_pays_for_spot_and_one_start() -> None:
    """12 parts of work, 4 of a start: five ticks and a third of one."""
    trace = Trace("t", (0.0,), (1,), 20 * TICK_S)
    of = market(trace)
    task = Task(12, 10, 1.0, 3.0, 4)
    chosen, _ = choices(of, task)
    assert played(of, task, chosen, 0) == pytest.approx(16 / PARTS)


def test_a_market_that_is_dry_is_waited_for_no_longer_than_the_deadline_allows() -> None:
    trace = Trace("t", (0.0, 6 * TICK_S), (0, 1), 12 * TICK_S)
    of = market(trace)
    assert [status < of.n_up for status in of.seen] == [False] * 6 + [True] * 6
    wide, tight = Task(5, 12, 1.0, 3.0, 3), Task(5, 3, 1.0, 3.0, 3)
    assert played(of, wide, choices(of, wide)[0], 0) == pytest.approx(8 / PARTS)
    assert played(of, tight, choices(of, tight)[0], 0) == pytest.approx(3 * 8 / PARTS)
    late = Task(5, 2, 1.0, 3.0, 3)
    assert played(of, late, choices(of, late)[0], 0) == float("inf")
