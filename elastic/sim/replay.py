"""Reads a journal, folds its events and decides again: the same decisions must come out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.driver import Decide, decided
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.policy.decide import decide as decide_by_default
from elastic.policy.state.fold import State, fold
from elastic.types import Decided, Decision, DriverStarted


@dataclass(frozen=True)
class Difference:
    """The first decision that came out otherwise."""

    at_s: float
    recorded: Decision
    again: Decision


@dataclass(frozen=True)
class Replay:
    """`state` is what the journal ends with."""

    n_decisions: int
    identical: bool
    first_difference: Difference | None
    state: State


def replay(lines: Iterable[Line], decide: Decide = decide_by_default) -> Replay:
    """Folds what is recorded, events and decisions, and compares each decision with the one that `decide` takes now.

    Raises SpecError for a script that is restarted: Ray Train decides there.
    """
    state = State()
    n_decisions = 0
    first: Difference | None = None
    for line in lines:
        for at_s, event in line.events:
            if isinstance(event, DriverStarted) and event.job.get("restarted"):
                raise SpecError(
                    f"run '{event.run}' restarts a script through Ray Train: no policy decided there; see elastic why"
                )
            state = fold(state, event, at_s)
        if line.decision is None:
            continue
        n_decisions += 1
        again = decided(state, line.at_s, decide)
        if again != line.decision and first is None:
            first = Difference(line.at_s, line.decision, again)
        state = fold(state, Decided(line.decision), line.at_s)
    return Replay(n_decisions, first is None, first, state)
