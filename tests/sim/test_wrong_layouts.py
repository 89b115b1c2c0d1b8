"""Layouts that compute something else, on the virtual clock: found out, left, and no step of them
counts."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal, parse_line, write_line
from elastic.observe.accounting.accounts import account
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Job,
    ModelProfile,
    OptimizerSpec,
    Plan,
    Pool,
    Probed,
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
JOB: dict[str, Any] = {
    "steps": 60, "global_batch": 12, "layout": "auto", "min_workers": 1, "peer_every": 5,
    "durable_every": 50,
}  # fmt: skip
WRONG = Fault(12.0, "wrong_layout")
DROUGHT = Fault(10.0, "drought", lasts_s=1e6, pool="p")  # no replacement comes
FEWER = {"4": "dp_shard=4", "3": "pp=3"}
STEP_9 = 20.6  # when four nodes are in the step after step 9


def run(
    *faults: Fault, max_nodes: int = 4, **changes: Any
) -> tuple[State, SimBackend, MemoryJournal]:
    """A run that succeeds within the rules, and in which no step counts that a wrong layout has
    made."""
    job, pools = (
        JOB | changes,
        (Pool("p", max_nodes=max_nodes, usd_per_node_h=1.0, market_type="spot"),),
    )
    backend, journal = SimBackend(pools, Job.from_plain(job), faults), MemoryJournal()
    state = drive(backend, journal, DriverStarted("r", 1, job, pools, MODEL))
    assert (state.phase, backend.violations) == ("succeeded", []), state.outcome_reason
    lines = [parse_line(write_line(line)) for line in journal.lines]
    again = replay(lines)
    assert again.identical and again.state == state
    last = {
        e.step: e.generation for line in lines for _, e in line.events if isinstance(e, StepDone)
    }
    assert sorted(last) == list(range(1, state.steps + 1))
    assert not set(backend.functions.trained) & {
        (generation, step) for step, generation in last.items()
    }
    return state, backend, journal


def plans(journal: MemoryJournal) -> list[Plan]:
    return [
        a.plan
        for line in journal.lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, EnterPlan)
    ]


def reasons(journal: MemoryJournal) -> str:
    return "\n".join(line.decision.reason for line in journal.lines if line.decision)


def verdicts(journal: MemoryJournal) -> list[tuple[str, str, bool | None]]:
    return [(t.cause, t.to_layout, t.loss_equal) for t in account(journal.lines).transitions]


def test_a_notice_costs_no_step_even_when_the_next_layout_is_wrong() -> None:
    state, backend, journal = run(
        DROUGHT, WRONG, Fault(15.0, "notice", 1, 60.0), layout=FEWER, steps=80
    )
    assert verdicts(journal) == [
        ("start", "dp_shard=4", None), ("notice", "pp=3", False), ("rollback", "dp_shard=3", True),
    ]  # fmt: skip
    assert backend.functions.trained == [] and list(state.unusable) == ["pp"]
    steps = [e.step for line in journal.lines for _, e in line.events if isinstance(e, StepDone)]
    assert steps == sorted(set(steps)), "none is done twice"
    text = reasons(journal)
    assert (
        "pp=3, computes something else than dp_shard=4 at step" in text
        and "the probe sample's loss is" in text
    )
    assert "this run takes no layout with pp any more" in text
    assert plans(journal)[-1].unusable == tuple(state.unusable.items())


def test_growth_into_a_wrong_layout_is_rolled_back_and_not_tried_again() -> None:
    add = (
        Fault(24.0, "wrong_layout"),
        Fault(30.0, "add", pool="p"),
        Fault(50.0, "notice", 0, 30.0),
    )
    state, _, journal = run(DROUGHT, *add, layout={"4": "pp=4", "3": "dp_shard=3"}, max_nodes=3)
    found = [str(plan.layout) for plan in plans(journal)]
    assert found[:3] == ["dp_shard=3", "pp=4", "dp_shard=4"] and found.count("pp=4") == 1
    assert all(plan.layout.pp == 1 for plan in plans(journal)[2:]) and list(state.unusable) == [
        "pp"
    ]


def test_growth_that_no_layout_gets_right_stays_on_the_nodes_that_it_had() -> None:
    faults = (
        Fault(9.0, "drought", lasts_s=1e6, pool="p"),
        Fault(15.0, "wrong_layout"),
        Fault(30.0, "add", pool="p"),
    )
    state, _, journal = run(*faults, max_nodes=1, steps=30)
    assert [plan.layout.world_size for plan in plans(journal)] == [1, 2, 2, 1]
    assert set(state.unusable) == {"dp", "pp"}, "tp never leaves a node"


def test_after_a_loss_the_steps_that_are_done_again_tell() -> None:
    state, backend, journal = run(DROUGHT, WRONG, Fault(STEP_9, "loss", 1), layout=FEWER)
    assert backend.functions.trained == [(2, 6)], "one step, and it is done again"
    assert verdicts(journal) == [
        ("start", "dp_shard=4", None), ("loss", "pp=3", False), ("rollback", "dp_shard=3", True),
    ]  # fmt: skip
    assert "its train_loss is 1.25 now that it is done again, it was 1" in reasons(journal)
    assert [plan.resume.step for plan in plans(journal)] == [0, 5, 5] and list(state.unusable) == [
        "pp"
    ]


def test_a_loss_right_after_a_transition_is_told_what_the_probe_was() -> None:
    """No step was made since the probe: the plan carries its number, and no step is needed to find
    out."""
    faults = (DROUGHT, WRONG, Fault(15.0, "notice", 1, 60.0), Fault(61.9, "loss", 2))
    state, backend, journal = run(
        *faults, layout={"4": "dp_shard=4", "3": "dp_shard=3", "2": "pp=2"}, steps=100, peer_every=1
    )
    last = plans(journal)[2]
    assert last.layout.pp == 2 and last.cause == "loss" and last.probe is not None
    assert backend.functions.trained == [] and verdicts(journal)[2] == ("loss", "pp=2", False)
    assert list(state.unusable) == ["pp"]


def test_where_no_step_would_be_done_again_one_is() -> None:
    """Nobody is gone, everyone has step 9: in the layout that the run would take next nothing could
    be compared there."""
    faults = (DROUGHT, WRONG, Fault(STEP_9, "error"), Fault(STEP_9 + 0.4, "notice", 1, 1.0))
    state, backend, journal = run(*faults, layout=FEWER)
    assert (
        "(not step 9: nothing is known there that would tell whether pp=3 computes the same)"
        in reasons(journal)
    )
    assert backend.functions.trained == [(2, 6)] and list(state.unusable) == ["pp"]


def test_probes_are_told_where_generations_stop_and_enter() -> None:
    _, _, journal = run(DROUGHT, Fault(15.0, "notice", 1, 60.0))
    told = [e for line in journal.lines for _, e in line.events if isinstance(e, Probed)]
    stop = told[1].step
    assert [(e.generation, e.step) for e in told] == [(1, 0), (1, stop), (2, stop), (2, 60)]
    assert [e.expected for e in told] == [None, None, told[1].loss, None]
    assert verdicts(journal) == [("start", "dp_shard=4", None), ("notice", "dp_shard=3", True)]
    assert account(journal.lines).transitions[1].probe_s == pytest.approx(0.02)
