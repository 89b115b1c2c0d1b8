"""Notices at random on the virtual clock: staggered, repeated, withdrawn, or cut short by the
node's death."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.policy.pools import drain
from elastic.policy.state.fold import State, fold
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Decided,
    DriverStarted,
    EnterPlan,
    Event,
    Job,
    ModelProfile,
    Notice,
    NoticeWithdrawn,
    OptimizerSpec,
    Plan,
    PlanEntered,
    Pool,
    StepDone,
    TensorSpec,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=2,
)
START_S = 15.0  # all nodes are prepared, and some steps are done
N_NODES = 4
POOLS = (Pool("p", max_nodes=N_NODES, usd_per_node_h=1.0, market_type="spot"),)
DROUGHT = Fault(10.0, "drought", lasts_s=1e6, pool="p")  # no replacement comes
JOB: dict[str, Any] = {
    "steps": 200, "global_batch": 12, "layout": "auto", "min_workers": 1, "peer_every": 1,
    "durable_every": 50,
}  # fmt: skip


def run(*faults: Fault, **changes: Any) -> tuple[State, SimBackend, MemoryJournal]:
    job = JOB | changes
    backend, journal = (
        SimBackend(POOLS, Job.from_plain(job), faults, delays=Delays(work_s=4.0)),
        MemoryJournal(),
    )
    state = drive(backend, journal, DriverStarted("r", 1, job, POOLS, MODEL))
    assert state.phase == "succeeded" and backend.violations == [], (
        state.outcome_reason,
        backend.violations,
    )
    assert replay(journal.lines).identical
    return state, backend, journal


def ordered(journal: MemoryJournal) -> list[tuple[float, Plan]]:
    actions = [
        (line.at_s, a) for line in journal.lines if line.decision for a in line.decision.actions
    ]
    return [(at_s, a.plan) for at_s, a in actions if isinstance(a, EnterPlan)]


def told(journal: MemoryJournal, kind: type[Event]) -> list[tuple[float, Any]]:
    return [
        (at_s, event)
        for line in journal.lines
        for at_s, event in line.events
        if isinstance(event, kind)
    ]


def causes(journal: MemoryJournal) -> list[str]:
    return [plan.cause for _, plan in ordered(journal)]


def test_a_node_with_notice_works_until_a_transition_must_begin() -> None:
    _, _, journal = run(DROUGHT, Fault(START_S, "notice", 1, 60.0))
    ((at_s, plan),) = ordered(journal)[1:]
    assert plan.cause == "notice"
    lead_s = START_S + 60.0 - at_s
    assert 13.0 < lead_s < 17.0, "twice the prior of 5 s, two steps of 1 s, 3 s"
    entered = next(
        at for at, event in told(journal, PlanEntered) if event.generation == plan.generation
    )
    assert entered < START_S + 60.0
    steps = [event.step for _, event in told(journal, StepDone)]
    assert steps == sorted(set(steps)), "a notice costs no step"


def test_the_second_lead_is_as_short_as_the_first_transition_was() -> None:
    _, _, journal = run(DROUGHT, Fault(START_S, "notice", 1, 60.0), Fault(120.0, "notice", 1, 60.0))
    (first, _), (second, _) = ordered(journal)[1:]
    assert START_S + 60.0 - first > 13.0
    assert 180.0 - second < 10.0


def test_withdrawn_before_is_none_and_repeated_is_one() -> None:
    notice = Fault(START_S, "notice", 1, 60.0)
    assert causes(run(DROUGHT, notice, Fault(START_S + 30, "withdraw"))[2]) == ["start"]
    _, _, journal = run(
        DROUGHT,
        notice,
        Fault(START_S + 10, "notice", 1, 20.0),
        Fault(START_S + 12, "notice", 1, 90.0),
    )
    assert causes(journal) == ["start", "notice"] and ordered(journal)[1][0] > START_S + 80


def test_staggered_notices_are_one_transition() -> None:
    faults = [Fault(START_S + k, "notice", k, 40.0) for k in range(3)]
    _, _, journal = run(DROUGHT, *faults)
    assert causes(journal) == ["start", "notice"] and len(ordered(journal)[1][1].nodes) == 1


def test_a_replacement_joins_in_the_same_transition() -> None:
    """The pool gives another node for the one that goes: ready about 10 s after the notice, 15 s
    before it must go."""
    _, _, journal = run(Fault(START_S, "notice", 1, 35.0))
    assert causes(journal) == ["start", "notice"]
    plan = ordered(journal)[1][1]
    assert len(plan.nodes) == N_NODES and "p-5" in plan.nodes


def test_a_death_before_the_deadline_is_a_loss_and_a_short_job_never_moves() -> None:
    _, _, journal = run(DROUGHT, Fault(START_S, "notice", 1, 60.0), Fault(START_S + 20, "loss", 1))
    assert causes(journal) == ["start", "loss"]
    _, _, journal = run(DROUGHT, Fault(START_S, "notice", 1, 60.0), steps=40)
    assert causes(journal) == ["start"]


# ---------------------------------------------------------------------------------------- at random

times = st.floats(START_S, 80.0, allow_nan=False)
nodes = st.integers(0, N_NODES - 1)
notices = st.builds(
    lambda at_s, which, lasts_s: Fault(at_s, "notice", which, lasts_s),
    times,
    nodes,
    st.floats(1.0, 90.0),
)
others = st.builds(
    lambda at_s, kind, which: Fault(at_s, kind, which),
    times,
    st.sampled_from(["withdraw", "loss"]),
    nodes,
)


@pytest.mark.slow
@given(st.lists(notices, min_size=1, max_size=5), st.lists(others, max_size=2), st.booleans())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_never_more_transitions_than_needed_and_nodes_are_used(
    given_notices: list[Fault], given_others: list[Fault], replaced: bool
) -> None:
    faults = [
        *given_notices,
        *given_others,
        Fault(9.0, "add", pool="p"),
        *(() if replaced else (DROUGHT,)),
    ]
    _, _, journal = run(*faults)
    plans = ordered(journal)
    moved = [at_s for at_s, plan in plans if plan.cause == "notice"]
    assert len(moved) <= len({event.node_id for _, event in told(journal, Notice)})
    state = State()
    for line in journal.lines:
        for at_s, event in line.events:
            state = fold(state, event, at_s)
        if line.decision is None:
            continue
        for action in line.decision.actions:
            if isinstance(action, EnterPlan):
                check_order(state, action.plan, line.at_s)
        state = fold(state, Decided(line.decision), line.at_s)
    withdrawn = {event.node_id for _, event in told(journal, NoticeWithdrawn)}
    for at_s, plan in plans:
        left = [
            name
            for _, p in plans
            if p.generation == plan.resume.generation
            for name in p.nodes
            if name not in plan.nodes
        ]
        if plan.cause == "notice":
            assert left, "a transition because of a notice leaves somebody"
            assert withdrawn or any(
                event.node_id in left for t, event in told(journal, Notice) if t <= at_s
            )


def check_order(state: State, plan: Plan, now_s: float) -> None:
    """No node beyond its deadline; a node that is left because of its notice had no time worth
    using; one that stays has."""
    noticed = {
        n.node_id: n
        for n in state.nodes.values()
        if n.status == "draining" and n.deadline_s is not None
    }
    for name in plan.nodes:
        if name in noticed:
            assert now_s < drain.act_at_s(state, [noticed[name]], now_s), (
                f"{name} is taken in though it is about to go"
            )
    if plan.cause != "notice" or state.plan is None:
        return
    gone = [
        noticed[name] for name in state.plan.nodes if name in noticed and name not in plan.nodes
    ]
    first_s = drain.act_at_s(state, gone, now_s)
    assert now_s >= first_s - 1e-6, f"left {first_s - now_s:.1f} s too early"
    gpus = sum(
        node.gpus for node in state.nodes.values() if node.status in ("prepared", "draining")
    )
    for node in gone:
        later = sum(other.gpus for other in gone if other.deadline_s >= node.deadline_s)  # type: ignore[operator]
        assert (
            later * (drain.act_at_s(state, [node], now_s) - now_s)
            <= drain.price_gpu_s(state, gpus) + 1e-6
        )
