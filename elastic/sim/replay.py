"""Reads a journal, folds its events and decides again: the same decisions must come out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic.driver import Decide, decided
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.policy.decide import decide as decide_by_default
from elastic.policy.state.fold import State, changes
from elastic.types import (
    Action,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    FormGroups,
    Quarantine,
    Stop,
)


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise."""

    at_s: float
    recorded: Decision
    again: Decision


@dataclass(frozen=True)
class Replay:
    """`state` is what the journal ends with. `n_reworded`: decisions that are the same in other
    words, as those of another version may be."""

    n_decisions: int
    identical: bool
    first_difference: Difference | None
    state: State
    n_reworded: int = 0


def replay(lines: Iterable[Line], decide: Decide = decide_by_default) -> Replay:
    """Folds what is recorded, events and decisions, and compares each decision with the one that
    `decide` takes now.

    Raises SpecError for a script that an older version has restarted: Ray Train decided there.
    """
    state = State()
    n_decisions = n_reworded = 0
    first: Difference | None = None
    for change in changes(lines):
        state, event = change.after, change.event
        if isinstance(event, DriverStarted) and _by_ray_train(event):
            raise SpecError(
                f"run '{event.run}' is of an older version, where Ray Train restarted scripts: "
                "no policy decided there; see elastic why"
            )
        if not isinstance(event, Decided):
            continue
        n_decisions += 1
        again = decided(change.before, change.at_s, decide)
        if again == event.decision:
            continue
        if wordless(again) == wordless(event.decision):
            n_reworded += 1
        elif first is None:
            first = Difference(change.at_s, event.decision, again)
    return Replay(n_decisions, first is None, first, state, n_reworded)


def _by_ray_train(event: DriverStarted) -> bool:
    return bool(event.job.get("restarted")) and "cwd" not in event.job


def wordless(decision: Decision) -> Decision:
    """What it does and when it looks again, without its sentences."""
    return replace(decision, actions=tuple(map(_wordless, decision.actions)), reason="")


def _wordless(action: Action) -> Action:
    if isinstance(action, Quarantine | Stop):
        return replace(action, reason="")
    if isinstance(action, EnterPlan | FormGroups):
        closed = tuple((name, "") for name, _ in action.plan.unusable)
        return replace(action, plan=replace(action.plan, unusable=closed))
    return action
