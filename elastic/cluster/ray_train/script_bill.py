"""What a script's nodes cost over all of its drivers, and when budget or deadline end it: the
policy's own account of them."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.ledger.journal import Line
from elastic.policy.state.event_handlers import billed
from elastic.policy.state.fold import State, fold
from elastic.types import DriverStarted, Event, InstancesSeen, NodeLost, NodeReady, PriceSeen

# the groups end with their driver: this is only for what it asked of an autoscaler
ORPHAN_LEASE_S = 120.0
COUNTED = (DriverStarted, InstancesSeen, NodeReady, NodeLost, PriceSeen)


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
