"""Phases in random worlds: whatever is taken and comes, each step is made as its phase has it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.sim.worlds import world

from elastic.policy.decide import decide
from elastic.policy.state.fold import State, fold
from elastic.sim.markets.market_run import run_on
from elastic.types import Decided, EnterPlan, Job, StepDone


@pytest.mark.parametrize("seed", range(6))
def test_each_step_is_of_its_phase_and_the_run_replays(seed: int) -> None:
    made, chance = world(seed), random.Random(seed)
    job = made.subject.job
    begins = sorted(chance.sample(range(1, job.steps), chance.randint(1, 3)))
    batches = [chance.choice([12, 24, 48, 96]) for _ in begins]
    phases = [{"from_step": at, "global_batch": n} for at, n in zip(begins, batches, strict=True)]
    phased = Job.from_plain(job.plain() | {"phases": phases})
    subject = replace(made.subject, job=phased, batch_s=0.0)
    found = run_on(subject, made.markets, seed=seed, keep=True)
    assert found.violations == ()
    plans, state = {}, State()
    for line in found.lines:
        for at_s, event in line.events:
            state = fold(state, event, at_s)
            if isinstance(event, StepDone):
                assert plans[event.generation].phase == phased.phase_at(event.step - 1)
        if line.decision is None:
            continue
        assert decide(state, line.at_s) == line.decision
        state = fold(state, Decided(line.decision), line.at_s)
        for action in line.decision.actions:
            if isinstance(action, EnterPlan):
                plans[action.plan.generation] = action.plan
                assert sum(action.plan.samples) == phased.in_phase(action.plan.phase).global_batch
