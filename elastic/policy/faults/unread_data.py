"""What cannot be read for no fault of the program, data or a checkpoint: how long it is waited for,
and which node it is held against.

Storage that does not answer is waited for as long as that lasts, as that of the run is. One that
refuses (credentials that have expired) is asked for `orphan_lease_s`, as where it refuses the
checkpoint of a stop: until then somebody may have mended it, and nodes are paid meanwhile. What the
disk or the network of a node does not give is held against that node where it is the only one that
says so, time after time.
"""

from __future__ import annotations

from math import inf

from elastic.policy.state.breaks import ReadFailures
from elastic.policy.state.state import State
from elastic.types import WorkerFailed
from elastic.types.replacing import replace

AWAY, REFUSED, OF_NODE = "storage", "refused", "unread"  # kinds of WorkerFailed
KINDS = (AWAY, REFUSED, OF_NODE)
NODE_MOST = 3  # generations in a row that the same node has broken so


def waited_until_s(state: State) -> float:
    """Until when a run that has begun is tried, however often that was in vain."""
    if not state.best_step:
        return -inf
    lease_s, known = state.job.orphan_lease_s, state.unread
    away_s = known[AWAY].at_s + lease_s if AWAY in known else -inf
    refused_s = known[REFUSED].since_s + lease_s if REFUSED in known else -inf
    return max(away_s, refused_s)


def to_blame(state: State, node_id: str) -> bool:
    """Is it that node which does not read what others do? Not where it is the only one."""
    known, names = state.unread.get(OF_NODE), state.available_names
    again = known is not None and [name for _, name in known.places] == [node_id] * NODE_MOST
    return again and node_id in names and len(names) > 1


# --------------------------------------------------------------------------------------------- fold


def told(state: State, event: WorkerFailed, at_s: float) -> State:
    """Its generation breaks off for that, and not for its program."""
    known = state.unread.get(event.kind, ReadFailures(at_s))
    place = (event.generation, event.worker.node_id)
    places = known.places if place in known.places else (*known.places, place)[-NODE_MOST:]
    found = replace(known, at_s=at_s, places=places)
    breaks = tuple(one for one in state.breaks if one.generation != event.generation)
    return replace(state, unread={**state.unread, event.kind: found}, breaks=breaks)


def explains(state: State, generation: int) -> bool:
    """Why that generation broke."""
    places = (place for one in state.unread.values() for place in one.places)
    return any(number == generation for number, _ in places)
