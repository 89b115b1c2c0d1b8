"""The judge sees each thing that may be wrong with a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.chaos.simulated import play

from elastic.ledger.journal import Line
from elastic.scenarios.judge import Undisturbed, wrong
from elastic.scenarios.kept_steps import kept
from elastic.types import EnterPlan, Event, NodeLost, StepDone

# aborted, rolled back, and resumed from a checkpoint that is newer than what was resumed from
# before
SEED = 12
STEP = 30


@cache
def lines() -> tuple[Line, ...]:
    return tuple(play(SEED).lines)


def expected() -> Undisturbed:
    steps = max(kept(lines()))
    return Undisturbed([1.0] * steps, [f"sample-{step}" for step in range(1, steps + 1)])


def changed(change: Callable[[Event], Event | None]) -> list[Line]:
    """With another event in the place of each that `change` says; None = it is left out."""
    found = []
    for line in lines():
        events = [(at_s, change(event)) for at_s, event in line.events]
        found.append(
            replace(
                line, events=tuple((at_s, event) for at_s, event in events if event is not None)
            )
        )
    return found


def of_step(event: Event) -> bool:
    return isinstance(event, StepDone) and event.step == STEP


def on_a_lost_node() -> list[Line]:
    plan = next(
        a.plan
        for line in reversed(lines())
        if line.decision
        for a in line.decision.actions
        if isinstance(a, EnterPlan)
    )
    at = next(
        i
        for i, line in enumerate(lines())
        if line.decision and any(a == EnterPlan(plan) for a in line.decision.actions)
    )
    before = replace(
        lines()[at], events=((lines()[at].at_s, NodeLost(plan.nodes[0])),), decision=None
    )
    return [*lines()[:at], before, *lines()[at:]]


HARMED: dict[str, Callable[[], Sequence[Line]]] = {
    "has train_loss": lambda: changed(lambda e: replace(e, train_loss=1.1) if of_step(e) else e),  # type: ignore[call-arg]
    "on other samples": lambda: changed(lambda e: replace(e, digest="other") if of_step(e) else e),  # type: ignore[call-arg]
    "in no generation": lambda: changed(lambda e: None if of_step(e) else e),
    "is lost": on_a_lost_node,
    "does not end it": lambda: [*lines(), replace(lines()[-1], events=(), decision=None)],
    "decides otherwise": lambda: changed(lambda e: None if isinstance(e, NodeLost) else e),
    "it running": lambda: lines()[:-1],
}


@pytest.mark.slow
def test_a_good_run_is_not_wrong() -> None:
    assert wrong(lines(), expected()) == []


@pytest.mark.parametrize("what", HARMED)
def test_what_is_wrong_is_seen(what: str) -> None:
    found: Any = wrong(HARMED[what](), expected())
    assert any(what in text for text in found), found
