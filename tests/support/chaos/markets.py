"""Random worlds of the simulator of markets, each judged by its journal and by the market's own
bill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from support.sim.worlds import World, world

from elastic.driver import restored
from elastic.ledger.journal import Line, parse_line, write_line
from elastic.observe.accounting.accounts import account
from elastic.policy.state.fold import changes
from elastic.scenarios import judge
from elastic.scenarios.judge import Undisturbed
from elastic.scenarios.kept_steps import kept
from elastic.sim.markets.market_run import RunResult, RunSubject, run_on
from elastic.types import EnterPlan, Plan, PlanEntered, ReleaseNode, StepDone

SLACK, LATE_S = (
    1.1,
    300.0,
)  # of what nodes on demand take, that a deadline must leave to be a promise

# Ends that a market can bring about; all others are faults of the policy or the simulator.
STOPPED = ("given up after", "the budget of", "the deadline of")
FAILED = ("no copy of the training state is left", "InfeasiblePlan")


@dataclass
class PlayedWorld:
    world: World
    result: RunResult
    lines: list[Line]
    wrong: list[str] = field(default_factory=list)


def play(seed: int) -> PlayedWorld:
    made = world(seed)
    result = run_on(made.subject, made.markets, seed=seed, keep=True)
    lines = [parse_line(write_line(line)) for line in result.lines]
    played = PlayedWorld(made, result, lines)
    played.wrong = [*judged(played), *result.violations]
    return played


def judged(played: PlayedWorld) -> list[str]:
    lines, result, subject = played.lines, played.result, played.world.subject
    steps = _each_step(lines)
    n = subject.job.steps if result.done else max(kept(steps), default=0)
    expected = Undisturbed(
        [1.0] * n, [f"sample-{step}" for step in range(1, n + 1)], phase=_phase(lines)
    )
    longest_s = max((subject.step_s(plan) for plan in _plans(lines)), default=0.0)
    delays = subject.delays
    # an order that comes just behind a boundary waits for two; a change may be under way already
    leave_s = 2 * (longest_s + delays.enter_s + 5 * delays.groups_s) + delays.quiesce_s + 10
    checks = [
        *(one for one in judge.judged(steps, expected) if one.name != "replay"),
        judge.replayed(lines),
        judge.planned(lines, least_notice_s=leave_s),
    ]
    found = [f"{check.name}: {check.why}" for check in checks if check.verdict == "fail"]
    found += sorted(set(_bounds_broken(lines, over_s=60 + leave_s)))
    found += [f"at {line.at_s:.0f} s: {text}" for line in lines if (text := _released(line))]
    if not result.done and _must_be_met(subject):
        found.append(f"the deadline is missed, which nodes on demand meet: {result.reason}")
    books = account(lines)
    for what, said, paid in (
        ("GPU-seconds", sum(books.gpu_seconds.values()), result.gpu_seconds),
        ("dollars", sum(books.usd.values()), result.usd),
    ):
        if said != pytest.approx(paid, rel=1e-6, abs=1e-6):
            found.append(f"the ledger says {said:.4f} {what}, the market bills {paid:.4f}")
    return found


def _released(line: Line) -> str:
    """Nodes that a decision releases and its own plan uses; '' = none."""
    orders = line.decision.actions if line.decision else ()
    used = {name for order in orders if isinstance(order, EnterPlan) for name in order.plan.nodes}
    gone = {order.node_id for order in orders if isinstance(order, ReleaseNode)}
    return ", ".join(f"{name} is released, and a plan begins on it" for name in sorted(used & gone))


def _must_be_met(subject: RunSubject) -> bool:
    """Have nodes on demand alone, started a few minutes late, time enough before the deadline? What
    a budget or a bound on all nodes forbids is no promise, nor without checkpoints."""
    job, delays = subject.job, subject.delays
    fixed = [pool for pool in subject.pools if pool.market_type == "on-demand"]
    n = sum(pool.gpus_per_node * pool.max_nodes for pool in fixed)
    bound = job.max_nodes is not None and job.max_nodes < sum(p.max_nodes for p in subject.pools)
    if job.deadline_h is None or job.budget_usd is not None or job.durable_every == 0:
        return False
    if bound or n < max(1, job.min_workers):
        return False
    n = min(n, job.max_workers or n)
    start_s = delays.boot_s + delays.prepare_s + delays.enter_s + delays.restore_s
    least_s = start_s + job.steps * subject.step_s.of(n) + delays.store_s
    return 3600 * job.deadline_h >= SLACK * least_s + 2 * start_s + LATE_S


def _phase(lines: Sequence[Line]) -> str:
    """What the run ended in, where a market can bring that about; else what it should have."""
    state = restored(lines)
    why = state.outcome_reason if state is not None else ""
    ends = {"stopped": STOPPED, "failed": FAILED}.get(state.phase if state else "", ())
    return state.phase if state is not None and any(text in why for text in ends) else "succeeded"


def _plans(lines: Sequence[Line]) -> list[Plan]:
    orders = (a for line in lines if line.decision for a in line.decision.actions)
    return [order.plan for order in orders if isinstance(order, EnterPlan)]


def _each_step(lines: Sequence[Line]) -> list[Line]:
    """With every step of a batch told, as a cluster does."""
    step, found = 0, []
    for line in lines:
        events = []
        for at_s, event in line.events:
            if isinstance(event, PlanEntered):
                step = event.step
            if isinstance(event, StepDone):
                for k in range(step + 1, event.step):
                    events.append((at_s, replace(event, step=k, digest=f"sample-{k}", tokens=0)))
                step = event.step
            events.append((at_s, event))
        found.append(replace(line, events=tuple(events)))
    return found


def _bounds_broken(lines: Sequence[Line], *, over_s: float) -> Iterator[str]:
    """No pool has more nodes than it may, nor the run, warned nodes not counted, whose successors
    may join before they go; it ends, and its bill too, within `over_s` of its deadline and
    budget."""
    for change in changes(lines):
        state = change.after
        most = {pool.name: pool.max_nodes for pool in state.pools}
        staying = Counter(node.pool for node in state.alive if node.status != "draining")
        for pool, n in staying.items():
            if n > most.get(pool, 0):
                yield f"bounds: {n} nodes of pool {pool}, which may have {most.get(pool, 0)}"
        if state.job.max_nodes is not None and len(state.alive) > state.job.max_nodes:
            yield f"bounds: {len(state.alive)} nodes, max_nodes is {state.job.max_nodes}"
        budget, hours = state.job.budget_usd, state.job.deadline_h
        if budget is not None and state.usd > budget + state.usd_per_h * over_s / 3600 + 1e-9:
            yield f"bounds: it spent more than its budget of ${budget:.4f}"
        if hours is not None and change.at_s > 3600 * hours + over_s:
            yield f"bounds: it ran beyond its deadline of {hours:.4f} h"
