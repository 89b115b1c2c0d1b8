"""Replay notices a decision that comes out otherwise; the simulator notices orders that break the
rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.driver import drive, restored
from elastic.errors import InternalError
from elastic.ledger.journal import MemoryJournal
from elastic.observe.accounting.accounts import account
from elastic.policy.decide import decide
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Decision,
    DriverStarted,
    EnterPlan,
    Holding,
    Job,
    ModelProfile,
    OptimizerSpec,
    Plan,
    Pool,
    Resume,
    StepDone,
    TensorSpec,
    WorkerId,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=2,
)
POOLS = (Pool("p", max_nodes=3, usd_per_node_h=1.0, market_type="spot"),)
JOB: dict[str, Any] = {
    "steps": 20, "global_batch": 12, "layout": "auto", "min_workers": 1, "peer_every": 1,
    "durable_every": 5,
}  # fmt: skip


def run(*faults: Fault, **changes: Any) -> tuple[State, SimBackend, MemoryJournal]:
    job = JOB | changes
    backend, journal = SimBackend(POOLS, Job.from_plain(job), faults), MemoryJournal()
    return drive(backend, journal, DriverStarted("r", 1, job, POOLS, MODEL)), backend, journal


def plans(journal: MemoryJournal) -> list[Plan]:
    decisions = [line.decision for line in journal.lines if line.decision]
    return [
        action.plan
        for decision in decisions
        for action in decision.actions
        if isinstance(action, EnterPlan)
    ]


def test_a_replay_that_decides_the_same_is_identical() -> None:
    state, _, journal = run(Fault(20.0, "loss", 1))
    again = replay(journal.lines)
    assert again.identical and again.state == state and again.first_difference is None
    assert again.n_decisions == len(journal.lines)


def test_a_replay_finds_the_first_decision_that_differs() -> None:
    _, _, journal = run(Fault(20.0, "loss", 1))

    def other(state: State, now_s: float) -> Decision:
        decision = decide(state, now_s)
        return replace(decision, actions=()) if now_s > 15 else decision

    again = replay(journal.lines, other)
    assert not again.identical and again.first_difference is not None
    assert again.first_difference.at_s > 15 and again.first_difference.recorded.actions


def test_a_notice_costs_no_step_and_a_loss_at_most_the_steps_since_the_last_copy() -> None:
    for fault, cause in ((Fault(16.0, "notice", 1), "notice"), (Fault(16.0, "loss", 1), "loss")):
        _, backend, journal = run(fault)
        assert [plan.cause for plan in plans(journal)][:2] == [
            "start",
            cause,
        ] and not backend.violations
        steps = [
            event.step
            for line in journal.lines
            for _, event in line.events
            if isinstance(event, StepDone)
        ]
        again = len(steps) - len(set(steps))
        assert again == 0 if cause == "notice" else again <= 1


def test_two_nodes_at_once_go_back_to_storage() -> None:
    state, backend, journal = run(Fault(24.0, "loss", 0), Fault(24.0, "loss", 1), peer_every=1)
    assert [plan.resume.source for plan in plans(journal)][:2] == ["fresh", "durable"]
    assert state.phase == "succeeded" and not backend.violations


def test_a_layout_that_does_not_fit_is_left() -> None:
    job = JOB | {"max_nodes": 3}
    backend = SimBackend(
        POOLS,
        Job.from_plain(job),
        (),
        fits=lambda plan: plan.layout.world_size > 3 or plan.layout.pp > 1,
    )
    journal = MemoryJournal()
    state = drive(backend, journal, DriverStarted("r", 1, job, POOLS, replace(MODEL, n_blocks=6)))
    assert state.phase == "succeeded" and [plan.cause for plan in plans(journal)] == [
        "start",
        "infeasible",
    ]


def test_the_simulator_notes_orders_that_break_the_rules() -> None:
    _, backend, journal = run(steps=4)
    backend._stopped_s = None
    (last,) = plans(journal)
    backend.execute(EnterPlan(last))
    gone = replace(last, generation=7, ranks=(WorkerId("nowhere", 0), *last.ranks[1:]))
    backend.execute(EnterPlan(gone))
    nobody = Resume(
        "peer", 3, 1, last.layout, last.layers, (Holding(last.ranks[0], 1, 0, 3, "peer"),)
    )
    backend.execute(EnterPlan(replace(last, generation=9, resume=nobody)))
    until_s = backend.now_s() + 60
    while backend.now_s() < until_s:
        backend.poll(until_s)
    assert len(backend.violations) == 3, backend.violations
    assert (
        "after 1" in backend.violations[0]
        and "lost" in backend.violations[1]
        and "nobody holds" in backend.violations[2]
    )


def test_a_run_that_hangs_is_an_error() -> None:
    def never(state: State, now_s: float) -> Decision:
        return Decision()

    with pytest.raises(InternalError, match="the run hangs"):
        drive(
            SimBackend(POOLS, Job.from_plain(JOB)),
            MemoryJournal(),
            DriverStarted("r", 1, JOB, POOLS, MODEL),
            decide=never,
        )


def test_the_copy_of_the_last_step_that_is_lost_with_its_node_is_made_again() -> None:
    pools = (replace(POOLS[0], max_nodes=1),)
    job = JOB | {"steps": 4}
    backend, journal = (
        SimBackend(pools, Job.from_plain(job), [Fault(26.0, "loss")]),
        MemoryJournal(),
    )
    state = drive(backend, journal, DriverStarted("r", 1, job, pools, MODEL))
    assert state.phase == "succeeded" and len(plans(journal)) == 2 and not backend.violations
    assert state.best_step == 4 and backend.now_s() < 60


def test_a_run_that_is_done_goes_on_when_more_steps_are_asked_for() -> None:
    """The second driver finds only the checkpoints of the first; one journal, whose sums are those
    of both."""
    state, backend, journal = run(Fault(20.0, "loss", 1))
    assert (state.phase, state.step) == ("succeeded", 20)
    before, first, at_s = restored(journal.lines), account(journal.lines), backend.now_s()
    more = SimBackend(POOLS, Job.from_plain(JOB | {"steps": 50}), [])
    more._now_s = at_s + 3600.0
    start = DriverStarted("r", 2, JOB | {"steps": 50}, POOLS, MODEL, durable=state.durable)
    state = drive(more, journal, start, state=before)
    assert (state.phase, state.step, more.violations) == ("succeeded", 50, [])
    assert before is not None and state.usd > before.usd
    again = replay(journal.lines)
    assert again.identical and again.state == state, again.first_difference
    both = account(journal.lines)
    assert both.totals.steps == 50 and [t.source for t in both.transitions].count("durable") >= 1
    last = [e.step for line in journal.lines for _, e in line.events if isinstance(e, StepDone)]
    assert sorted(set(last)) == list(range(1, 51)) and last.count(21) == 1
    assert both.gpu_seconds["productive"] == pytest.approx(
        first.gpu_seconds["productive"] * 50 / 20, rel=0.35
    )
    assert both.totals.tokens > 2 * first.totals.tokens and both.totals.usd > first.totals.usd
    assert both.totals.usd == pytest.approx(state.usd), "the budget has the same dollars"
