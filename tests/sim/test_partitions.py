"""Nodes that are cut off for some time, on the virtual clock: they wait, are replaced, and are
taken back."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Delays, Fault, Moment
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Job,
    ModelProfile,
    NodePrepared,
    OptimizerSpec,
    Plan,
    PlanEntered,
    Pool,
    Quarantine,
    RollForward,
    Silent,
    StepDone,
    TensorSpec,
)  # fmt: skip

MODEL = ModelProfile(
    4, 1_000_000, (TensorSpec("w", (1000, 1000), "float32", 0, 1),), (OptimizerSpec(("exp_avg",)),)
)
JOB: dict[str, Any] = {
    "steps": 60, "global_batch": 12, "layout": "auto", "min_workers": 1, "peer_every": 3,
    "durable_every": 5,
}  # fmt: skip
AT_S = 24.3  # inside a step
SILENT_S = 6.0


def run(
    *faults: Fault, n_nodes: int = 3, gpus: int = 1, **changes: Any
) -> tuple[State, SimBackend, MemoryJournal]:
    pools = (
        Pool("p", gpus_per_node=gpus, max_nodes=n_nodes, usd_per_node_h=1.0, market_type="spot"),
    )
    job = JOB | changes
    backend, journal = SimBackend(pools, Job.from_plain(job), faults), MemoryJournal()
    state = drive(backend, journal, DriverStarted("r", 1, job, pools, MODEL))
    assert backend.violations == [] and replay(journal.lines).identical
    assert state.phase == "succeeded"
    return state, backend, journal


def plans(journal: MemoryJournal) -> list[Plan]:
    actions = [a for line in journal.lines if line.decision for a in line.decision.actions]
    return [action.plan for action in actions if isinstance(action, EnterPlan)]


def told(journal: MemoryJournal, kind: type) -> list[tuple[float, Any]]:
    return [
        (at_s, event)
        for line in journal.lines
        for at_s, event in line.events
        if isinstance(event, kind)
    ]


def test_a_short_cut_is_waited_out() -> None:
    _, _, calm = run()
    _, _, journal = run(Fault(AT_S, "partition", 1, lasts_s=4.0))
    assert len(plans(journal)) == len(plans(calm)) and not told(journal, Silent)
    steps = told(journal, StepDone)
    assert [event.step for _, event in steps] == list(range(1, 61)), "nothing is done twice"
    assert not [at_s for at_s, _ in steps if AT_S < at_s < AT_S + 4.0], (
        "no step is whole without all of its ranks"
    )
    assert steps[-1][0] == pytest.approx(told(calm, StepDone)[-1][0] + 4.0, abs=1.5)


@pytest.mark.parametrize("moment", ["inside", "waiting", "torn"])
def test_a_node_that_is_cut_off_for_longer_is_replaced_and_taken_back(moment: Moment) -> None:
    _, _, journal = run(Fault(AT_S, "partition", 1, lasts_s=12.0, moment=moment))
    (at_s, silent), *more = told(journal, Silent)
    assert not more and at_s == pytest.approx(AT_S + SILENT_S, abs=0.1)
    node_id = silent.worker.node_id
    with_it, without, again = [node_id in plan.nodes for plan in plans(journal)][-3:]
    assert (with_it, without, again) == (True, False, True)
    back_s = [at_s for at_s, event in told(journal, NodePrepared) if event.node_id == node_id][-1]
    assert back_s >= AT_S + 12.0, "nothing of it is heard before it is reached again"
    newest = [event.generation for _, event in told(journal, StepDone)]
    assert newest == sorted(newest), "no step of a generation after the first of a later one"
    assert {event.step for _, event in told(journal, StepDone)} == set(range(1, 61))


def test_the_others_apply_the_step_whose_commit_some_of_them_have_seen() -> None:
    cut = Fault(AT_S, "partition", 0, lasts_s=12.0, moment="torn")
    _, _, journal = run(
        cut, n_nodes=4, layout={4: "dp_replicate=2,dp_shard=2", 3: "dp_shard=3"}, peer_every=0
    )
    assert (
        len(
            [
                a
                for line in journal.lines
                if line.decision
                for a in line.decision.actions
                if isinstance(a, RollForward)
            ]
        )
        == 1
    )
    assert [event.step for _, event in told(journal, StepDone)] == list(range(1, 61)), (
        "each step is done once"
    )


def test_ranks_that_are_cut_off_together_step_on_and_are_heard_later() -> None:
    _, _, journal = run(Fault(AT_S, "partition", 0, lasts_s=5.0), n_nodes=1, gpus=2)
    heard = [
        event.step
        for at_s, event in told(journal, StepDone)
        if at_s == pytest.approx(AT_S + 5.0, abs=1e-6)
    ]
    assert len(heard) == 2 and not [
        at_s for at_s, _ in told(journal, StepDone) if AT_S < at_s < AT_S + 4.9
    ]
    assert len(plans(journal)) == 1


def test_nothing_is_heard_any_more_of_ranks_that_were_given_up() -> None:
    """All are cut off together and step on; the driver takes them for lost, and resumes from what
    was heard of."""
    _, _, journal = run(Fault(AT_S, "partition", 0, lasts_s=30.0), n_nodes=1, gpus=2)
    generations = [event.generation for _, event in told(journal, StepDone)]
    assert len(set(generations)) == 2 and generations == sorted(generations)
    assert not [
        event
        for at_s, event in told(journal, StepDone)
        if at_s > AT_S and event.generation == generations[0]
    ]
    assert not [at_s for at_s, _ in told(journal, StepDone) if AT_S < at_s < AT_S + 30.0]
    assert {event.step for _, event in told(journal, StepDone)} == set(range(1, 61))


def test_an_idle_node_that_is_cut_off_is_prepared_anew() -> None:
    add = Fault(10.0, "add", pool="p")
    _, _, journal = run(add, Fault(AT_S, "partition", 2, lasts_s=9.0), n_nodes=3, max_workers=2)
    ((at_s, silent),) = told(journal, Silent)
    assert silent.phase == "idle" and len(plans(journal)) == 1, "the others train on"
    prepared_s = [
        at_s
        for at_s, event in told(journal, NodePrepared)
        if event.node_id == silent.worker.node_id
    ]
    assert len(prepared_s) == 2 and prepared_s[1] >= AT_S + 9.0


def leaves_out(
    *faults: Fault, n_nodes: int = 3, forms_ahead: bool = False, **changes: Any
) -> MemoryJournal:
    pools = (Pool("p", max_nodes=n_nodes, usd_per_node_h=1.0, market_type="spot"),)
    job = JOB | {"steps": 200} | changes
    delays = Delays(groups_s=1.0 if forms_ahead else 0.0)
    backend = SimBackend(pools, Job.from_plain(job), faults, delays=delays)
    journal = MemoryJournal()
    start = DriverStarted("r", 1, job, pools, MODEL, forms_ahead=forms_ahead, leaves_out=True)
    state = drive(backend, journal, start)
    assert backend.violations == [] and replay(journal.lines).identical
    assert state.phase == "succeeded"
    done = [event.step for _, event in told(journal, StepDone)]
    assert sorted(set(done)) == list(range(1, 201))
    return journal


def aside(journal: MemoryJournal) -> list[Quarantine]:
    actions = [a for line in journal.lines if line.decision for a in line.decision.actions]
    return [action for action in actions if isinstance(action, Quarantine)]


def test_of_two_nodes_that_do_not_reach_each_other_one_is_left_out_and_replaced() -> None:
    journal = leaves_out(Fault(AT_S, "apart", 1, lasts_s=1200.0))
    (one,) = aside(journal)
    met = [
        plan
        for _, event in told(journal, PlanEntered)
        for plan in plans(journal)
        if plan.generation == event.generation
    ]
    left_s = next(
        line.at_s for line in journal.lines if line.decision and one in line.decision.actions
    )
    assert left_s < AT_S + 60.0, "not after ten minutes"
    assert "do not reach each other" in one.reason
    assert [len(plan.nodes) for plan in met] == [3, 2, 3], "two continue, and another one comes"
    assert not any(one.node_id in plan.nodes for plan in met[1:])


@pytest.mark.parametrize("lasts_s", [3.0, 9.0])
def test_a_cut_between_two_nodes_that_is_short_leaves_nobody_out(lasts_s: float) -> None:
    assert aside(leaves_out(Fault(AT_S, "apart", 1, lasts_s=lasts_s))) == []


def test_a_newcomer_that_a_node_of_the_plan_does_not_reach_is_left_out_while_that_trains() -> None:
    """Its groups are made ahead: nobody has paused for it, and another one comes in its place."""
    journal = leaves_out(
        Fault(60.0, "loss", 1), Fault(68.0, "apart", 2, lasts_s=1200.0), forms_ahead=True
    )
    (one,) = aside(journal)
    assert "which trains, do not reach each other" in one.reason
    assert [len(plan.nodes) for plan in plans(journal)] == [3, 2, 3]
    assert one.node_id not in plans(journal)[-1].nodes


def test_what_cannot_train_without_waits_for_the_link() -> None:
    journal = leaves_out(Fault(AT_S, "apart", 0, lasts_s=300.0), n_nodes=2, layout="dp_shard=2")
    assert aside(journal) == []
