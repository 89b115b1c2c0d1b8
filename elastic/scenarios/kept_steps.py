"""Which steps of a run count, by its journal: those that the last state comes of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from elastic.ledger.journal import Line
from elastic.types import (
    Action,
    EnterPlan,
    Event,
    Plan,
    PlanEntered,
    PlansFound,
    RollForward,
    StepDone,
)

E = TypeVar("E", bound=Event)


def events(lines: Sequence[Line], kind: type[E]) -> list[E]:
    return [event for line in lines for _, event in line.events if isinstance(event, kind)]


def actions(lines: Sequence[Line]) -> list[Action]:
    return [action for line in lines if line.decision for action in line.decision.actions]


def plans(lines: Sequence[Line]) -> list[Plan]:
    """Those that were ordered, in their order."""
    return [action.plan for action in actions(lines) if isinstance(action, EnterPlan)]


def kept(lines: Sequence[Line]) -> dict[int, StepDone]:
    """Each as the generation made it that handed its state on."""
    found: dict[int, StepDone] = {}
    known = {plan.generation: plan for event in events(lines, PlansFound) for plan in event.plans}
    known |= {plan.generation: plan for plan in plans(lines)}
    entered = {event.generation: event.step for event in events(lines, PlanEntered)}
    done = {(event.generation, event.step): event for event in events(lines, StepDone)}
    for action in actions(lines):  # a rank that had not seen the commit has applied it since
        if isinstance(action, RollForward):
            entered.setdefault(action.generation, action.step - 1)
    for number, step in done:  # entered, and its driver died before it wrote that down
        entered[number] = min(entered.get(number, step - 1), step - 1)
    generation = max(entered, default=0)
    last = max((step for _, step in done), default=0)
    while last > 0 and generation:
        found |= {
            step: event
            for (number, step), event in done.items()
            if number == generation and step <= last
        }
        if generation not in known:  # its driver's lines are lost, and what it came of with them
            return {step: event for (_, step), event in done.items() if step <= last} | found
        resume = known[generation].resume
        left = [
            step for number, step in done if number == resume.generation and resume.source == "live"
        ]
        # its driver died before it wrote that down
        last = min(last, entered.get(generation, max([resume.step, *left])))
        generation = resume.generation if resume.source != "fresh" else 0
    return found
