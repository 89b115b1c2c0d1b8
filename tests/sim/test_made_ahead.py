"""Process groups that take long in the simulated world: in no pause of an announced change, and in
that of a loss."""

from __future__ import annotations

import pytest

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Job,
    ModelProfile,
    OptimizerSpec,
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
POOLS = (Pool("p", max_nodes=4, usd_per_node_h=1.0, market_type="spot"),)
JOB = {
    "steps": 150, "global_batch": 12, "layout": "auto", "min_workers": 1, "max_workers": 3,
    "peer_every": 1, "durable_every": 50,
}  # fmt: skip
SLOW = Delays(groups_s=2.0)


def run(*faults: Fault, forms_ahead: bool = True) -> tuple[State, SimBackend, MemoryJournal]:
    backend, journal = SimBackend(POOLS, Job.from_plain(JOB), faults, delays=SLOW), MemoryJournal()
    start = DriverStarted("r", 1, JOB, POOLS, MODEL, forms_ahead=forms_ahead)
    return drive(backend, journal, start), backend, journal


def pauses(journal: MemoryJournal) -> dict[str, float]:
    """Cause -> seconds from the last step of the generation before until the next one was entered,
    of the last such change."""
    plans = {
        a.plan.generation: a.plan
        for line in journal.lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, EnterPlan)
    }
    found, last_s = {}, 0.0
    for at_s, event in (pair for line in journal.lines for pair in line.events):
        if isinstance(event, StepDone):
            last_s = at_s
        elif isinstance(event, PlanEntered) and event.generation > 1:
            found[plans[event.generation].cause] = at_s - last_s
    return found


@pytest.mark.parametrize(
    ("cause", "fault"),
    [("notice", Fault(60.0, "notice", 1, 45.0)), ("growth", Fault(60.0, "loss", 1))],
)
def test_an_announced_change_does_not_pause_for_its_groups(cause: str, fault: Fault) -> None:
    state, backend, journal = run(fault)
    assert state.phase == "succeeded" and not backend.violations
    took_s = pauses(journal)[cause]
    without = pauses(run(fault, forms_ahead=False)[2])[cause]
    assert took_s == pytest.approx(SLOW.enter_s, abs=0.1) and without > took_s + 3 * SLOW.groups_s
    again = replay(journal.lines)
    assert again.identical and again.state == state


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["loss", "withdraw", "process", "hang"])
@pytest.mark.parametrize("after_s", [0.5, 4.0, 20.0])
def test_what_comes_while_groups_are_made_breaks_no_rule(kind: str, after_s: float) -> None:
    state, backend, journal = run(Fault(60.0, "notice", 1, 45.0), Fault(60.0 + after_s, kind, 0))  # type: ignore[arg-type]
    assert state.phase == "succeeded" and not backend.violations
    assert state.forming is None and replay(journal.lines).identical
