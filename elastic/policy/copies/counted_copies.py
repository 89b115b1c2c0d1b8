"""Which copies count: those that a driver finds in storage when it starts, and those that are
stored while it drives.

A checkpoint of which it is known that it holds wrong content counts for nothing and is removed. Nor
does one that is known to be damaged, which stays: a person may mend it. Where none but such are
left, a driver that resumes from storage tries them all again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.policy.faults.corruption import corrupted, without_copies
from elastic.policy.state.state import State
from elastic.types import Copy, CopyStored, DriverStarted
from elastic.types.gates import Gates
from elastic.types.replacing import replace

KEPT_COPIES = 100


def at_start(state: State, event: DriverStarted) -> dict[str, Any]:
    """Fields of the state: the checkpoints that the driver has found, and what is known of them."""
    found, wrong = list[Copy](), list[Copy]()
    for copy in event.durable:
        distrusted = copy.generation in state.distrusted
        bad = distrusted or corrupted(state, copy.generation, copy.step)
        (wrong if bad else found).append(copy)
    damaged = [c for c in found if c.uri in state.damaged] if event.remembers_damage else []
    if len(damaged) == len(found) and not event.attached:
        damaged = []
    right = (copy for copy in found if copy not in damaged)
    spoilt = state.spoilt if event.attached else ()
    if event.removes_distrusted:
        spoilt = tuple(dict.fromkeys((*spoilt, *(copy.uri for copy in wrong))))
    known = {copy.uri: state.damaged[copy.uri] for copy in damaged}
    return {
        "durable": _newest_first((*right, *(state.durable if event.attached else ())), event),
        "damaged": state.damaged if event.attached else known,
        "damaged_copies": tuple(damaged),
        "spoilt": spoilt,
    }


def _copy_stored(state: State, event: CopyStored, at_s: float) -> State:
    copy = event.copy
    distrusted = copy.generation in state.distrusted
    if distrusted or corrupted(state, copy.generation, copy.step):
        goes = copy.kind == "durable" and (state.removes_distrusted or not distrusted)
        return without_copies(state, [copy]) if goes else state
    if copy.kind == "durable":
        stall_s = (
            event.stall_s
            if not state.durable_stall_s
            else 0.5 * (state.durable_stall_s + event.stall_s)
        )
        n_ranks, before_s = copy.layout.world_size, state.durable_s
        alike = not state.scales_saves or n_ranks == state.durable_ranks
        took_s = 0.5 * (before_s + event.seconds) if before_s and alike else event.seconds
        return replace(
            state, durable=_newest_first((copy, *state.durable), state), durable_stall_s=stall_s,
            durable_s=took_s, durable_ranks=n_ranks, copy_failed=None, copy_failures=0,
        )  # fmt: skip
    if copy.kind != "peer" or state.plan is None or copy.generation != state.plan.generation:
        return state
    return (
        state
        if state.peer and state.peer.step >= copy.step
        else _copy_timed(replace(state, peer=copy), event)
    )


def _copy_timed(state: State, event: CopyStored) -> State:
    """Running means of what a peer replica costs. The first of a generation counts only where
    nothing was measured before: its buffers are new."""
    if event.copy.step == state.entered_step and state.copy_flight_s:
        return state
    weight = 0.3 if state.copy_flight_s else 1.0
    return replace(
        state,
        copy_stall_s=(1 - weight) * state.copy_stall_s + weight * event.stall_s,
        copy_slowed_s=(1 - weight) * state.copy_slowed_s + weight * event.slowed_s,
        copy_flight_s=(1 - weight) * state.copy_flight_s + weight * event.seconds,
        n_copies_timed=state.n_copies_timed + 1,
    )


def _newest_first(copies: tuple[Copy, ...], gates: Gates) -> tuple[Copy, ...]:
    by_uri = {(copy.step, copy.uri): copy for copy in copies}
    found = sorted(by_uri.values(), key=lambda copy: (-copy.step, -copy.generation))
    return tuple(found if gates.judges_all else found[:KEPT_COPIES])


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {CopyStored: _copy_stored}
