"""300 random runs on the virtual clock: all of them finish, within the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sim.scenario import MODEL, scenario

from elastic.driver import drive
from elastic.ledger.accounts import account
from elastic.ledger.journal import Journal, Line, Memory, parse_line, read, write_line
from elastic.policy.state import State
from elastic.sim.backend import SimBackend
from elastic.sim.replay import replay
from elastic.types import DriverStarted, EnterPlan, NodeLost, PlanEntered, SetShares, StepDone

N_RUNS, N_BATCHES = 300, 60


def run(seed: int, path: Path) -> tuple[State, SimBackend, list[Line]]:
    job, pools, faults, delays = scenario(seed)
    ahead = seed % 2 == 1
    backend = SimBackend(pools, job, faults, delays)
    start = DriverStarted("random", 1, job, pools, MODEL, forms_ahead=ahead)
    if seed % 5 == 0:  # a real file, with its merged lines
        return drive(backend, Journal(path, epoch=1), start), backend, read(path)
    memory = Memory()
    state = drive(backend, memory, start)
    return state, backend, [parse_line(write_line(line)) for line in memory.lines]


def check(seed: int, path: Path) -> None:
    state, backend, lines = run(seed, path)
    assert state.phase == "succeeded", f"seed {seed}: {state.phase}, {state.outcome_reason}"
    assert backend.violations == [], f"seed {seed}"
    assert backend.closed
    lost: set[str] = set()
    generation = 0
    for line in lines:
        lost |= {event.node_id for _, event in line.events if isinstance(event, NodeLost)}
        for action in line.decision.actions if line.decision else ():
            assert line.decision is not None and line.decision.reason, f"seed {seed}: {action} without a reason"
            if isinstance(action, EnterPlan):
                assert action.plan.generation > generation, f"seed {seed}"
                assert not lost & set(action.plan.nodes), f"seed {seed}: {action.plan.nodes} of which {lost} are lost"
                generation = action.plan.generation
    calm(seed, lines)
    right(seed, lines, backend)
    again = replay(lines)
    assert again.identical and again.n_decisions > 3, f"seed {seed}: {again.first_difference}"
    assert again.state == state, f"seed {seed}"
    last = max(event.step for line in lines for _, event in line.events if isinstance(event, StepDone))
    assert last == state.steps == state.step
    money = account(lines)
    assert sum(money.gpu_seconds.values()) == pytest.approx(backend.gpu_seconds(), rel=1e-9, abs=1e-6), f"seed {seed}"
    assert sum(money.usd.values()) == pytest.approx(state.usd, rel=1e-6, abs=1e-9), f"seed {seed}"
    assert min(money.gpu_seconds.values()) >= 0, f"seed {seed}"


def right(seed: int, lines: list[Line], backend: SimBackend) -> None:
    """No step counts that a layout has made which computes something else."""
    kept = counted(lines) & set(backend.functions.trained)
    assert not kept, f"seed {seed}: {sorted(kept)}"


def counted(lines: list[Line]) -> set[tuple[int, int]]:
    """(generation, step) that the last state comes of."""
    plans = {
        a.plan.generation: a.plan for line in lines if line.decision for a in line.decision.actions if isinstance(a, EnterPlan)
    }
    events = [event for line in lines for _, event in line.events]
    entered = {event.generation: event.step for event in events if isinstance(event, PlanEntered)}
    done = {(event.generation, event.step) for event in events if isinstance(event, StepDone)}
    generation, last, found = max(entered), max(step for _, step in done), set[tuple[int, int]]()
    while last > 0:
        found |= {(g, step) for g, step in done if g == generation and entered[g] < step <= last}
        resume, last = plans[generation].resume, min(last, entered[generation])
        generation, last = (resume.generation, last) if resume.source != "fresh" else (0, 0)
    return found


def calm(seed: int, lines: list[Line]) -> None:
    """Speeds are followed, and nothing goes back and forth: few moves in any quarter of an hour."""
    orders = [(line.at_s, a) for line in lines if line.decision for a in line.decision.actions]
    shares = [at_s for at_s, a in orders if isinstance(a, SetShares)]
    stages = [at_s for at_s, a in orders if isinstance(a, EnterPlan) and a.plan.cause == "rebalance"]
    assert all(sum(at_s <= t < at_s + 900 for t in stages) <= 3 for at_s in stages), f"seed {seed}: {stages}"
    assert all(sum(at_s <= t < at_s + 900 for t in shares) <= 12 for at_s in shares), f"seed {seed}: {shares}"


@pytest.mark.sampled(14)
@pytest.mark.parametrize("batch", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, N_BATCHES))])
def test_random_runs_finish_within_the_rules(batch: int, tmp_path: Path) -> None:
    for seed in range(batch, N_RUNS, N_BATCHES):
        check(seed, tmp_path / f"{seed}.jsonl")
