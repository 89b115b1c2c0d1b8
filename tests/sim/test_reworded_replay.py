"""Journals of an older version say the same things in other words: their decisions are identical
all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from elastic.driver import drive
from elastic.ledger.journal import Line, MemoryJournal
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Action,
    DriverStarted,
    EnterPlan,
    Job,
    ModelProfile,
    OptimizerSpec,
    Pool,
    Stop,
    TensorSpec,
)

MODEL = ModelProfile(
    4, 1_000_000, (TensorSpec("w", (1000, 1000), "float32", 0, 1),), (OptimizerSpec(("exp_avg",)),)
)
POOLS = (Pool("p", max_nodes=3, usd_per_node_h=1.0, market_type="spot"),)
JOB: dict[str, Any] = {"steps": 20, "global_batch": 12, "layout": "auto", "min_workers": 1}


def recorded() -> list[Line]:
    journal = MemoryJournal()
    drive(
        SimBackend(POOLS, Job.from_plain(JOB), (Fault(20.0, "loss", 1),)),
        journal,
        DriverStarted("r", 1, JOB, POOLS, MODEL),
    )
    return journal.lines


def in_other_words(action: Action) -> Action:
    return replace(action, reason="it is over") if isinstance(action, Stop) else action


def changed(lines: list[Line], of: Any) -> Iterator[Line]:
    for line in lines:
        yield replace(line, decision=of(line.decision)) if line.decision else line


def test_other_sentences_are_counted_and_are_no_difference() -> None:
    lines = recorded()
    assert replay(lines).n_reworded == 0

    def reworded(decision: Any) -> Any:
        actions = tuple(map(in_other_words, decision.actions))
        return replace(
            decision, actions=actions, reason=decision.reason and f"once more: {decision.reason}"
        )

    again = replay(list(changed(lines, reworded)))
    n_sentences = sum(bool(line.decision and line.decision.reason) for line in lines)
    assert again.identical and again.first_difference is None
    assert again.n_reworded == n_sentences > 3


def test_another_action_another_time_and_another_outcome_are_differences() -> None:
    lines = recorded()

    def other_plan(decision: Any) -> Any:
        plans = [a for a in decision.actions if isinstance(a, EnterPlan)]
        actions = tuple(
            replace(a, plan=replace(a.plan, peer_every=77)) if a in plans else a
            for a in decision.actions
        )
        return replace(decision, actions=actions)

    def later(decision: Any) -> Any:
        return (
            decision
            if decision.wake_at_s is None
            else replace(decision, wake_at_s=decision.wake_at_s + 1.0)
        )

    def failed(decision: Any) -> Any:
        return replace(
            decision,
            actions=tuple(
                replace(a, outcome="failed") if isinstance(a, Stop) else a for a in decision.actions
            ),
        )

    for change in (other_plan, later, failed):
        again = replay(list(changed(lines, change)))
        assert not again.identical and again.first_difference is not None, change
