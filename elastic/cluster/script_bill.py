"""What a script's nodes cost over all of its drivers, and when budget or deadline end it: the policy's own account of them."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.cluster.claims import LEAVE_MOST_S
from elastic.driver import LINE_EVERY_S
from elastic.ledger.journal import Line
from elastic.policy.facts import billed
from elastic.policy.state import State, fold
from elastic.types import DriverStarted, Event, NodeLost, NodeReady, PriceSeen, Stop

ORPHAN_LEASE_S = 120.0  # the groups end with their driver: this is only for what it asked of an autoscaler
COUNTED = (DriverStarted, NodeReady, NodeLost, PriceSeen)


def bill_of(lines: Sequence[Line]) -> State:
    """By the journal of earlier drivers."""
    bill = State()
    for line in lines:
        for at_s, event in line.events:
            bill = counted(bill, event, at_s)
        bill = billed(bill, line.at_s)
    return bill


def counted(bill: State, event: Event, at_s: float) -> State:
    """With what the event means for it."""
    return fold(bill, event, at_s) if isinstance(event, COUNTED) else bill


def paid_until_s(lines: Sequence[Line], embedded: bool) -> float | None:
    """Until when the nodes of the driver before may have been paid for: one that has ended the run has given them back."""
    if not lines:
        return None
    last = lines[-1]
    ended = last.decision is not None and any(isinstance(action, Stop) for action in last.decision.actions)
    return last.at_s + (0.0 if embedded or ended else LINE_EVERY_S + ORPHAN_LEASE_S + LEAVE_MOST_S)
