"""300 random runs on the virtual clock: all of them finish, within the rules."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from elastic.driver import drive
from elastic.ledger.accounts import account
from elastic.ledger.journal import Journal, Line, Memory, parse_line, read, write_line
from elastic.policy.state import State
from elastic.sim.backend import SimBackend
from elastic.sim.faults import Delays, Fault, FaultKind, Moment
from elastic.sim.replay import replay
from elastic.types import (
    DriverStarted,
    EnterPlan,
    ModelProfile,
    NodeLost,
    OptimizerSpec,
    PlanEntered,
    Pool,
    SetShares,
    StepDone,
    TensorSpec,
)

N_RUNS, N_BATCHES = 300, 60
MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
    tp_limit=2,
)
KINDS: list[FaultKind] = [
    "notice", "notice", "notice", "withdraw", "loss", "loss", "loss", "hang", "process", "error", "drought", "add",
]  # fmt: skip
MOMENTS: list[Moment] = ["inside", "waiting", "torn"]


def scenario(seed: int) -> tuple[dict[str, Any], tuple[Pool, ...], list[Fault], Delays]:
    """A job, its pools, and faults that end at some time."""
    chance = random.Random(seed)
    pools = [Pool("spot", "CPU", chance.choice([1, 1, 2, 4]), "spot", 0.9, 0, chance.randint(1, 5))]
    if chance.random() < 0.4:
        pools.append(Pool("steady", "CPU", 1, "on-demand", 3.0, 0, chance.randint(1, 2)))
    job = {
        "name": "random", "steps": chance.randint(20, 60), "global_batch": chance.choice([8, 12, 32]), "seed": 0,
        "layout": "auto", "min_workers": 1, "max_workers": chance.choice([None, 6]),
        "peer_every": chance.choice(["auto", 1, 3]),
        "durable_every": chance.choice(["auto", 5, 0]), "budget_usd": None, "max_nodes": None,
    }  # fmt: skip
    faults = []
    for _ in range(chance.randint(0, 12)):
        at_s, kind = chance.uniform(5, 90), chance.choice(KINDS)
        lasts_s = chance.uniform(1, chance.choice([10, 40, 120]))
        fault = Fault(at_s, kind, chance.randrange(8), lasts_s, chance.choice(pools).name, chance.choice(MOMENTS))
        faults.append(fault)
        if kind == "loss" and chance.random() < 0.4:  # another one while the first is being dealt with
            faults.append(Fault(at_s + chance.uniform(0, 4), chance.choice(["loss", "notice"]), chance.randrange(8), 3.0))
    for once in ("corrupt", "not_finite"):  # one roll-back each is what a run bears
        if chance.random() < 0.2:
            faults.append(Fault(chance.uniform(20, 60), once))
    if chance.random() < 0.3:
        lasts_s = chance.uniform(10, 60)
        faults.append(Fault(chance.uniform(0, 60), "refuse", lasts_s=lasts_s, pool=chance.choice(pools).name))
    layouts, wrong = wrong_layouts(seed)
    return job | layouts, tuple(pools), faults + unequal(seed) + wrong, Delays(work_s=chance.choice([1.0, 4.0]))


def unequal(seed: int) -> list[Fault]:
    """In every second run: GPUs that are slow for some time or from some time on, jitter, numbers that are wrong."""
    chance = random.Random(seed + 1000)
    if chance.random() < 0.5:
        return []
    faults = [Fault(0.0, "jitter", seed, lasting=True, amount=chance.choice([0.0, 0.1]))]
    for _ in range(chance.randint(0, 5)):
        at_s, lasts_s, times = chance.uniform(5, 90), chance.uniform(2, 60), chance.choice([1.5, 2.0, 4.0, 10.0])
        gpu = chance.choice([-1, -1, 0])
        faults.append(
            Fault(at_s, "throttle", chance.randrange(8), lasts_s, lasting=chance.random() < 0.3, amount=times, gpu=gpu)
        )
    if chance.random() < 0.3:
        at_s, n_steps = chance.uniform(15, 80), chance.randint(1, 8)
        faults.append(Fault(at_s, "wrong_numbers", chance.randrange(8), lasting=chance.random() < 0.3, amount=n_steps))
    if chance.random() < 0.3:
        faults.append(Fault(chance.uniform(15, 80), "stall", chance.randrange(8)))
    return faults


def wrong_layouts(seed: int) -> tuple[dict[str, Any], list[Fault]]:
    """In every third run: a layout of any kind for each number of workers, and from some time on all axes that the running one
    has not are wrong."""
    chance = random.Random(seed + 2000)
    if chance.random() > 1 / 3:
        return {}, []
    layouts = {"1": "dp_shard=1"}
    for n in range(2, 9):
        kinds = [f"dp_shard={n}", *([f"pp={n}"] if n <= 4 else [])]
        kinds += [f"pp=2,dp_shard={n // 2}", f"tp=2,dp_shard={n // 2}"] if n % 2 == 0 else []
        layouts[str(n)] = chance.choice(kinds)
    return {"layout": layouts}, [Fault(chance.uniform(10, 80), "wrong_layout")]


def run(seed: int, path: Path) -> tuple[State, SimBackend, list[Line]]:
    job, pools, faults, delays = scenario(seed)
    backend = SimBackend(pools, job, faults, delays)
    start = DriverStarted("random", 1, job, pools, MODEL)
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


@pytest.mark.parametrize("batch", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, N_BATCHES))])
def test_random_runs_finish_within_the_rules(batch: int, tmp_path: Path) -> None:
    for seed in range(batch, N_RUNS, N_BATCHES):
        check(seed, tmp_path / f"{seed}.jsonl")
