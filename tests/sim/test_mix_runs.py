"""Random markets: what every run keeps to, and how the mix does against spot alone and on-demand
alone."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from support.docs.pages import text_of
from support.sim.market import FIXED, SLOW, SPOT, Run, play, weather

from elastic.policy.pools import hard_limits
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault
from elastic.types import RequestNodes, Stop

N_RUNS, N_BATCHES = 200, 20
DEADLINE_H = 3.5  # two hours of work on all nodes


def scenario(seed: int) -> Run:
    """A job with limits on a market with droughts, crash loops, slow answers, prices that move and
    a reservation that ends."""
    chance = random.Random(seed)
    hours = 12.0
    faults = weather(seed, hours)
    for kind in ("slow", "crash", "drought"):
        for _ in range(chance.randint(0, 2)):
            pool, lasts_s = chance.choice(["spot", "fixed"]), chance.uniform(300, 5400)
            faults.append(
                Fault(
                    chance.uniform(0, 3 * 3600),
                    kind,
                    pool=pool,
                    lasts_s=lasts_s,
                    amount=chance.uniform(60, 3000),
                )
            )  # type: ignore[arg-type]
    pools = [
        replace(SPOT, max_nodes=chance.randint(1, 4)),
        replace(FIXED, max_nodes=chance.randint(1, 4)),
    ]
    if chance.random() < 0.3:
        pools.append(
            replace(
                FIXED,
                name="ours",
                market_type="reserved",
                max_nodes=1,
                ends_at_s=chance.uniform(1200, 9000),
            )
        )
    job = {
        "steps": chance.randint(20, 120), "min_workers": chance.randint(1, 2),
        "max_workers": chance.choice([None, 4]), "budget_usd": chance.choice([None, 0.05, 1.0, 4.0,
        12.0, 30.0]), "max_nodes": chance.choice([None, 2, 3, 5]),
        "deadline_h": chance.choice([None, None, 0.5, 3.0, 8.0]),
        "on_demand_floor": chance.choice(["auto", "copy", 0, 1]), "purpose": chance.choice(["auto",
        "cheapest", "fastest"]), "waiting_usd_per_h": chance.choice(["auto", 0, 5.0]),
    }  # fmt: skip
    if job["deadline_h"] is None and job["budget_usd"] is None:
        job["deadline_h"] = 24.0
    delays = replace(SLOW, work_s=chance.choice([8.0, 60.0, 240.0]))
    return play(faults, tuple(pools), delays, **job)


def check(seed: int) -> Run:
    run = scenario(seed)
    state, backend = run.state, run.backend
    job = state.job
    said = f"seed {seed}: {state.phase} at {backend.now_s():.0f} s, {state.outcome_reason}"
    # the pools end, all copies are gone
    never = any(word in state.outcome_reason for word in ("InfeasiblePlan", "StateLost"))
    assert state.phase in ("succeeded", "stopped") or never, said
    assert not backend.violations, f"{said}: {backend.violations}"
    if job.max_nodes is not None:
        assert backend.most_nodes <= job.max_nodes, f"{said}: {backend.most_nodes} nodes"
    assert backend.usd() == pytest.approx(state.usd, rel=1e-6, abs=1e-6), said
    budget = job.budget_usd
    if budget is not None:
        step_s = backend.delays.work_s / job.min_workers
        grace_s = 0.0 if state.durable_s else hard_limits.STOP_MOST_S
        one_step_usd = (
            (grace_s + step_s)
            / 3600
            * sum(pool.max_nodes * max(4.0, pool.usd_per_node_h) for pool in state.pools)
        )
        assert state.usd <= budget + one_step_usd, f"{said}: ${state.usd:.2f} of ${budget:.2f}"
    if job.deadline_h is not None:
        assert run.hours <= job.deadline_h + 0.1, said
    if state.phase == "stopped":
        assert any(word in state.outcome_reason for word in ("budget", "deadline")), said
        assert "last checkpoint at step" in state.outcome_reason, said
    if seed // N_BATCHES % 5 == 0:
        again = replay(run.journal.lines)
        assert again.identical and again.state == state, f"{said}: {again.first_difference}"
    check_pace(run, said)
    return run


def check_pace(run: Run, said: str) -> None:
    """No tight loop: a pool is asked at most a few times in any minute, and each order has its
    reason."""
    times: dict[str, list[float]] = {}
    for line in run.journal.lines:
        for action in line.decision.actions if line.decision else ():
            assert line.decision is not None and line.decision.reason, (
                f"{said}: {action} without a reason"
            )
            if isinstance(action, RequestNodes) and action.count:
                times.setdefault(action.pool, []).append(line.at_s)
            assert not isinstance(action, Stop) or line is run.journal.lines[-1], said
    for pool, asked in times.items():
        most = max(sum(at_s <= t < at_s + 60 for t in asked) for at_s in asked)
        assert most <= 8, f"{said}: pool {pool} was asked {most} times in a minute"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, N_BATCHES))]
)
def test_every_run_ends_within_its_limits(batch: int) -> None:
    for seed in range(batch, N_RUNS, N_BATCHES):
        check(seed)


def met(run: Run) -> bool:
    return run.done and run.hours <= DEADLINE_H


def race(seeds: range) -> dict[str, list[Run]]:
    """The same markets for the mix, for spot alone and for on-demand alone; the deadline is the
    same for all."""
    ways = {"mix": {}, "spot alone": {"pools": (SPOT,)}, "on demand alone": {"pools": (FIXED,)}}
    return {
        name: [play(weather(seed, 6.0), deadline_h=DEADLINE_H, **way) for seed in seeds]
        for name, way in ways.items()
    }  # type: ignore[arg-type]


def table(found: dict[str, list[Run]]) -> tuple[dict[str, tuple[int, float]], str]:
    """Deadlines met and mean dollars, and as a text."""
    rows = {
        name: (sum(map(met, runs)), mean(run.state.usd for run in runs))
        for name, runs in found.items()
    }
    lines = [
        f"{name:16} deadline met in {n} of {len(found[name])} markets, ${usd:.2f} on average\n"
        for name, (n, usd) in rows.items()
    ]
    return rows, "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(9, 14), pytest.param(range(60), marks=pytest.mark.whole)])
def test_the_mix_meets_deadlines_that_spot_misses_for_less_than_on_demand(seeds: range) -> None:
    (rows, printed), n_markets = table(race(seeds)), len(seeds)
    print(printed)
    (mix, usd), (spot, _), (fixed, fixed_usd) = (
        rows["mix"],
        rows["spot alone"],
        rows["on demand alone"],
    )
    assert mix == fixed == n_markets and spot < n_markets
    assert usd < 0.8 * fixed_usd
    if n_markets == 60:
        assert printed in text_of("capacity.md")
