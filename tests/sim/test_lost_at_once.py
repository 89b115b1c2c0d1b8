"""Any r nodes lost at once, at any time: the run resumes from memory, never from storage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sim.scenario import MODEL

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.sim.sim_backend import Delays, Fault, SimBackend
from elastic.text import n_of
from elastic.types import CopyStored, DriverStarted, EnterPlan, Job, Pool, SetCadence, StepDone

pytestmark = pytest.mark.slow

BACK_S = 60.0  # until lost nodes are replaced and the state is copied again


def job(n_copies: int, **more: Any) -> dict[str, Any]:
    return {
        "name": "copies", "steps": 400, "global_batch": 24, "seed": 0, "layout": "auto",
        "min_workers": 1, "max_workers": None, "peer_every": "auto", "durable_every": 25,
        "budget_usd": None, "max_nodes": None, "peer_copies": n_copies,
    } | more  # fmt: skip


@st.composite
def incidents(draw: st.DrawFn) -> tuple[int, int, list[Fault]]:
    """Copies, nodes, and losses of so many nodes at once, far enough apart; at any moment, also
    within a step or a copy."""
    n_copies = draw(st.integers(1, 2))
    n_nodes = draw(st.integers(n_copies + 2, 6))
    faults = []
    at_s = 30.0
    for _ in range(draw(st.integers(1, 3))):
        at_s += draw(st.floats(0, 20))
        moment = draw(st.sampled_from(["inside", "waiting", "torn"]))
        faults += [
            Fault(at_s, "loss", draw(st.integers(0, 7)), moment=moment) for _ in range(n_copies)
        ]  # type: ignore[arg-type]
        at_s += BACK_S
    return n_copies, n_nodes, faults


@settings(max_examples=8, deadline=None, derandomize=True)
@given(incidents())
def test_any_r_nodes_at_once_cost_no_read_from_storage(case: tuple[int, int, list[Fault]]) -> None:
    n_copies, n_nodes, faults = case
    pool = Pool("spot", "CPU", 2, "spot", 1.0, n_nodes, n_nodes)
    backend = SimBackend((pool,), Job.from_plain(job(n_copies)), faults, delays=Delays(work_s=4.0))
    memory = MemoryJournal()
    state = drive(backend, memory, DriverStarted("copies", 1, job(n_copies), (pool,), MODEL))
    assert state.phase == "succeeded" and backend.violations == []
    newest, step, recoveries = -1, 0, 0
    for line in memory.lines:
        for _, event in line.events:
            if isinstance(event, CopyStored) and event.copy.kind == "peer":
                newest = event.copy.step
            step = event.step if isinstance(event, StepDone) else step
        for action in line.decision.actions if line.decision else ():
            if isinstance(action, EnterPlan) and newest >= 0 and action.plan.cause == "loss":
                recoveries += 1
                assert action.plan.resume.source == "peer", f"{line.decision.reason}"
                assert action.plan.resume.step >= newest
                step = newest = action.plan.resume.step
    assert recoveries >= 1


def test_the_cadence_follows_the_cost_and_does_not_swing() -> None:
    """0.02 s per copy at steps of 0.25 s: every 9th, since a step has 0.245 s without its data; the
    plan began with 5."""
    pool = Pool("spot", "CPU", 2, "spot", 1.0, 4, 4)
    for copy_s, expected in ((0.2, 9), (0.001, 1)):
        backend = SimBackend(
            (pool,), Job.from_plain(job(1)), (), delays=Delays(work_s=2.0, copy_s=copy_s)
        )
        memory = MemoryJournal()
        state = drive(backend, memory, DriverStarted("copies", 1, job(1), (pool,), MODEL))
        changes = [
            (action, line.decision.reason)
            for line in memory.lines
            for action in (line.decision.actions if line.decision else ())
            if isinstance(action, SetCadence)
        ]
        assert [action.peer_every for action, _ in changes] == [expected]
        assert f"peer replicas every {n_of(expected, 'step')} instead of 5" in changes[0][1]
        assert "ms and takes" in changes[0][1]
        plan = max(state.plans.values(), key=lambda plan: plan.generation)
        assert plan.peer_every == expected, "replayed from the journal it is the same"
        stored = [
            e.copy for line in memory.lines for _, e in line.events if isinstance(e, CopyStored)
        ]
        told = [copy.step for copy in stored if copy.kind == "peer"]
        assert {b - a for a, b in zip(told[-5:], told[-4:], strict=False)} == {expected}
