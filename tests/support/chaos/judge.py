"""What must be true of a run to which faults happened, whoever ran it: judged from its journal,
beside an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from elastic.api.running.sample_check import Unwritten
from elastic.driver import restored
from elastic.ledger.accounts import account
from elastic.ledger.journal import Line
from elastic.observe.run_view import view_of
from elastic.sim.replay import replay
from elastic.types import (
    Action,
    CopyStored,
    DigestChecked,
    EnterPlan,
    Event,
    NodeLost,
    NodeReady,
    PlanEntered,
    PlansFound,
    RollForward,
    StepDone,
    Stop,
)

LATER_S = 3600.0


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults: its losses and the digests of its samples, from step 1 on.
    `content_harmed`: a fault is that what was sent is not what came. `end_waits`: its last order
    may wait for storage; what is paid meanwhile is in no bill."""

    losses: Sequence[float]
    digests: Sequence[str]
    tolerance: float = 0.0
    content_harmed: bool = False
    end_waits: bool = False


def wrong(lines: Sequence[Line], expected: Undisturbed) -> list[str]:
    """All that is wrong with the run, one sentence each."""
    state = restored(lines)
    if state is None or state.phase != "succeeded":
        return [
            f"it {state.phase if state else 'has no journal'}: "
            f"{state.outcome_reason if state else ''}"
        ]
    return [
        *_orders(lines),
        *_steps(lines, expected),
        *_again(lines),
        *_money(_until_its_end(lines) if expected.end_waits else lines),
    ]


def _again(lines: Sequence[Line]) -> Iterator[str]:
    again = replay(lines)
    if not again.identical:
        yield f"a replay decides otherwise: {again.first_difference}"
    if again.state != restored(lines):
        yield "a replay ends in another state"


def _orders(lines: Sequence[Line]) -> Iterator[str]:
    """A reason for each, ever newer generations, on nodes that are not lost."""
    lost: set[str] = set()
    generation, newest = 0, None
    for line in lines:
        for _, event in line.events:
            lost |= {event.node_id} if isinstance(event, NodeLost) else set()
            lost -= {event.node.node_id} if isinstance(event, NodeReady) else set()
        for action in line.decision.actions if line.decision else ():
            if line.decision is not None and not line.decision.reason:
                yield f"{action} without a reason"
            # the same again: by a driver that attaches
            if isinstance(action, EnterPlan) and action.plan != newest:
                if action.plan.generation <= generation:
                    yield f"generation {action.plan.generation} is ordered after {generation}"
                if there := lost & set(action.plan.nodes):
                    yield (
                        f"generation {action.plan.generation} is ordered on "
                        f"{', '.join(sorted(there))}, which is lost"
                    )
                generation, newest = action.plan.generation, action.plan


def kept(lines: Sequence[Line]) -> dict[int, StepDone]:
    """The steps that the last state comes of: each as the generation made it that handed its state
    on."""
    found: dict[int, StepDone] = {}
    told = [event for line in lines for _, event in line.events]
    plans = {
        action.plan.generation: action.plan
        for action in actions(lines)
        if isinstance(action, EnterPlan)
    }
    plans = {
        plan.generation: plan for event in events(lines, PlansFound) for plan in event.plans
    } | plans  # type: ignore[attr-defined]
    entered = {event.generation: event.step for event in told if isinstance(event, PlanEntered)}
    done = {(event.generation, event.step): event for event in told if isinstance(event, StepDone)}
    for action in actions(lines):  # a rank that had not seen the commit has applied it since
        if isinstance(action, RollForward):
            entered.setdefault(action.generation, action.step - 1)
    for number, step in done:  # entered, and its driver died before it wrote that down
        entered[number] = min(entered.get(number, step - 1), step - 1)
    generation, last = max(entered), max(step for _, step in done)
    while last > 0 and generation:
        found |= {
            step: event
            for (number, step), event in done.items()
            if number == generation and step <= last
        }
        resume = plans[generation].resume
        left = [
            step for number, step in done if number == resume.generation and resume.source == "live"
        ]
        # its driver died before it wrote that down
        last = min(last, entered.get(generation, max([resume.step, *left])))
        generation = resume.generation if resume.source != "fresh" else 0
    return found


def actions(lines: Sequence[Line]) -> list[Action]:
    return [action for line in lines if line.decision for action in line.decision.actions]


def events(lines: Sequence[Line], kind: type[Event]) -> list[Event]:
    return [event for line in lines for _, event in line.events if isinstance(event, kind)]


def _steps(lines: Sequence[Line], expected: Undisturbed) -> Iterator[str]:
    """Each once, on its own samples, with the loss of the undisturbed run, and content that arrived
    as it was sent."""
    found, curve = kept(lines), {point.step: point for point in view_of(lines).curve()}
    steps, unwritten = range(1, len(expected.losses) + 1), Unwritten.of(lines).steps
    for step in steps:
        if step not in found:
            if step not in unwritten:
                yield f"step {step} is in no generation that the last state comes of"
            continue
        event, loss = found[step], expected.losses[step - 1]
        if not abs(event.train_loss - loss) <= expected.tolerance:
            yield (
                f"step {step} of generation {event.generation} has train_loss "
                f"{event.train_loss:.6f}, undisturbed {loss:.6f}"
            )
        if event.digest != expected.digests[step - 1]:
            yield f"step {step} of generation {event.generation} was trained on other samples"
        if step not in curve or (curve[step].digest, curve[step].train_loss) != (
            event.digest,
            event.train_loss,
        ):
            yield f"the curve that a user sees has another step {step}"
    if more := set(found) - set(steps):
        yield f"steps {sorted(more)} are too many"
    if not expected.content_harmed and not all(event.ok for event in events(lines, DigestChecked)):  # type: ignore[attr-defined]
        yield "content differs after a transition"


def _until_its_end(lines: Sequence[Line]) -> Sequence[Line]:
    last = max(
        (
            i
            for i, line in enumerate(lines)
            if line.decision and any(isinstance(a, Stop) for a in line.decision.actions)
        ),
        default=-1,
    )
    return lines[: last + 1] or lines


def _money(lines: Sequence[Line]) -> Iterator[str]:
    """Two counts of the bill agree, nothing is below zero, and nothing is paid once the run is
    over."""
    state, books = restored(lines), account(lines)
    assert state is not None
    if not any(
        isinstance(action, Stop)
        for action in (lines[-1].decision.actions if lines[-1].decision else ())
    ):
        yield "its last line does not end it"
    if min(books.gpu_seconds.values()) < -1e-6:
        yield f"less than no GPU-seconds: {books.gpu_seconds}"
    if sum(books.usd.values()) != pytest.approx(state.usd, rel=1e-6, abs=1e-9):
        yield f"the ledger says ${sum(books.usd.values()):.6f}, the policy ${state.usd:.6f}"
    later = replace(lines[-1], at_s=lines[-1].at_s + LATER_S, events=(), decision=None)
    if account([*lines, later]).gpu_seconds != books.gpu_seconds:
        yield "nodes are paid for after its end"


def copies_stored(lines: Sequence[Line], kind: str) -> int:
    return sum(event.copy.kind == kind for event in events(lines, CopyStored))  # type: ignore[attr-defined]
