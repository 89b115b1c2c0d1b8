"""Process groups that are made ahead, in the fold: ordered, made, dropped."""

from __future__ import annotations

from typing import Any

from elastic.policy.faults import unreached
from elastic.policy.state.state import Forming, State, standing_of
from elastic.types import DropGroups, FormGroups, GroupsFormed
from elastic.types.replacing import replace


def _formed(state: State, event: GroupsFormed, at_s: float) -> State:
    forming = state.forming
    if forming is None or forming.ended or event.generation != forming.plan.generation:
        return state
    setup_s = state.setup_s if event.error else event.seconds
    if event.apart:
        node_id, *others = event.apart
        state = unreached.told(state, node_id, others, generation=event.generation, at_s=at_s)
    return replace(
        state, forming=replace(forming, seconds=event.seconds, error=event.error), setup_s=setup_s
    )


def ordered(state: State, action: FormGroups, at_s: float) -> State:
    """The fold of an order; it takes the place of one before, whose time counts."""
    since_s = state.forming.since_s if state.forming is not None else at_s
    return replace(state, forming=Forming(action.plan, since_s, standing_of(state)))


def dropped(state: State, action: DropGroups, at_s: float) -> State:
    return replace(state, forming=None, repeat=())


HANDLERS: dict[type, Any] = {GroupsFormed: _formed}
