"""fold: events in, State out. What the driver knows is a function of the journal, and whoever reads
a journal goes through it by `changes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, cast

from elastic.ledger.journal import Line, built
from elastic.policy.faults.quiesced_workers import all_quiesced
from elastic.policy.state.action_effects import ORDERS
from elastic.policy.state.event_handlers import HANDLERS, billed, step_done
from elastic.policy.state.state import ENDED as ENDED
from elastic.policy.state.state import Aborting as Aborting
from elastic.policy.state.state import Backoff as Backoff
from elastic.policy.state.state import Failure as Failure
from elastic.policy.state.state import Phase as Phase
from elastic.policy.state.state import PoolSeen as PoolSeen
from elastic.policy.state.state import Request as Request
from elastic.policy.state.state import State as State
from elastic.types import Decided, DriverStarted, Event, Quiesced, StepDone
from elastic.types.replacing import replace


def fold(state: State, event: Event, at_s: float) -> State:
    """The state after `event`, which became known at `at_s`. By a decision without orders only the
    bill continues."""
    if isinstance(event, StepDone):
        return _still_ended(state, step_done(state, event, at_s))
    if not isinstance(event, Decided):
        handler = HANDLERS.get(type(event))
        # clocks of two drivers may differ: the bill resumes from this one's
        if isinstance(event, DriverStarted):
            until_s = ran_until_s(event, at_s, state.billed_at_s)
            return HANDLERS[DriverStarted](billed(state, until_s), event, at_s)
        if handler is None:
            return state
        return _still_ended(state, handler(billed(state, at_s), event, at_s))
    # also of one without orders: the next driver's clock may be behind this line's
    state = billed(state, at_s)
    for action in event.decision.actions:
        order = ORDERS.get(type(action))
        state = order(state, action, at_s) if order else state
    return state


def ran_until_s(event: DriverStarted, at_s: float, last_s: float) -> float:
    """Until when what the driver before has left was there and paid for; its last line is of
    `last_s`."""
    if event.paid_until_s is not None:
        return min(at_s, event.paid_until_s)
    return at_s if event.attached else last_s


def _still_ended(before: State, state: State) -> State:
    """The Stop waits for its line to be in storage. What workers tell meanwhile (a plan entered, a
    group left) is known, and begins nothing: else the driver would decide again once the Stop is
    carried out."""
    begun = state.phase != before.phase and before.phase in ENDED and before.stays_ended
    return replace(state, phase=before.phase) if begun else state


def folded(state: State, events: Sequence[tuple[float, Event]]) -> State:
    """The state after these, one after the other."""
    for (kind, at_s), same in groupby(events, key=lambda entry: (type(entry[1]), entry[0])):
        if kind is Quiesced:  # of thousands of workers at a time
            left = [event for _, event in same]
            told = all_quiesced(billed(state, at_s), cast(Sequence[Quiesced], left), at_s)
            state = _still_ended(state, told)
        else:
            for _, event in same:
                state = fold(state, event, at_s)
    return state


class Change(NamedTuple):
    """An entry of a journal, and what is known before and after it. `event`: a Decided for a
    decision; None for a stored State, which stands for lines that are not there."""

    before: State
    event: Event | None
    at_s: float
    after: State


EMPTY = State()


def changes(lines: Iterable[Line], state: State = EMPTY) -> Iterator[Change]:
    """The one pass over a journal, or over what was added to one whose lines before ended with
    `state`."""
    for line in lines:
        if line.state is not None:
            before, state = state, built(State, line.state)
            yield Change(before, None, line.at_s, state)
        entries = line.events
        if line.decision is not None:
            entries = (*entries, (line.at_s, Decided(line.decision)))
        for at_s, event in entries:
            before, state = state, fold(state, event, at_s)
            yield Change(before, event, at_s, state)
