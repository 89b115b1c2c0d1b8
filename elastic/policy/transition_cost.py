"""What a transition from memory will cost, told with the decision, and how far earlier ones were
from what was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic.planner.choice import Choice
from elastic.policy.speed import speeds
from elastic.policy.state.state import State
from elastic.reshard.rank_reuse import MOST_WORKERS, place
from elastic.reshard.transfer_forecast import MoveForecast, Room, TransferRates, forecast
from elastic.reshard.transfer_plan import holders_of, participants
from elastic.types import Move, Resume, WorkerId
from elastic.types.replacing import replace

# of the rate to and from pinned memory: an estimate, by what tests/gpu/one_shot_rows.py expects
PAGEABLE = 0.1


@dataclass(frozen=True, eq=False)
class _Transition:
    """What the order of the ranks and a forecast depend on: those of equal ones are equal, and are
    made once. The step is no part of it, so that looks between two steps have one answer."""

    state: State
    choice: Choice
    resume: Resume

    def _parts(self) -> tuple[Any, ...]:
        s, choice, resume = self.state, self.choice, self.resume
        into = (
            choice.ranks,
            choice.layout,
            choice.layers,
            choice.memory_bytes,
            choice.activation_bytes,
        )
        measured = (s.speeds, s.plan, s.timed_at_s, s.uneven_failed, s.job)
        known = (s.unpinned, s.nodes, s.pools, s.hardware, s.move_pace, s.model, measured)
        return (into, resume.layout, resume.layers, resume.holdings, known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Transition) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.choice.layout, self.resume.layout, len(self.resume.holdings)))


def predicted(state: State, choice: Choice, resume: Resume) -> Move | None:
    """None where the state does not come from memory."""
    found = _told(state, choice, resume)
    return found.move if found is not None else None


def predicted_s(state: State, choice: Choice, resume: Resume) -> float:
    """0 where the state does not come from memory."""
    found = _told(state, choice, resume)
    return found.unlinked.seconds if found is not None else 0.0


def _told(state: State, choice: Choice, resume: Resume) -> MoveForecast | None:
    if resume.source not in ("live", "peer") or resume.layout is None or state.model is None:
        return None
    return _forecast(_Transition(state, choice, resume))


@lru_cache(maxsize=4)
def _forecast(asked: _Transition) -> MoveForecast:
    state, choice, resume = asked.state, asked.choice, asked.resume
    assert state.model is not None and resume.layout is not None
    everyone = participants(choice.ranks, resume)
    nodes = [worker.node_id for worker in everyone]
    pools = state.pools_of(nodes)
    memory = [pool.memory_bytes_per_gpu for pool in pools]
    kinds = {pool.accelerator_type for pool in pools}
    rates = [
        profile.link_bytes_per_s for profile in state.hardware if profile.accelerator_type in kinds
    ]
    wire = "cpu" if kinds <= {"CPU"} else "cuda"
    running = choice.memory_bytes + choice.activation_bytes
    room = Room(
        min(memory) if memory and all(memory) else 0,
        running,
        wire,
        _host_bytes_per_s(state, kinds, nodes),
    )
    pace = (
        TransferRates(min(rates), state.move_pace)
        if rates
        else TransferRates(times=state.move_pace)
    )
    cuts = (resume.layout, resume.layers), (choice.layout, choice.layers)
    holders = holders_of(resume, everyone, state.model.by_owners)
    return forecast(state.model, *cuts, holders=holders, nodes=nodes, room=room, pace=pace)


def _host_bytes_per_s(state: State, kinds: set[str], nodes: Sequence[str]) -> float:
    """Between device and host memory, of the slowest; 0 = not known."""
    rates = [
        profile.host_bytes_per_s for profile in state.hardware if profile.accelerator_type in kinds
    ]
    share = PAGEABLE if any(name in state.unpinned for name in nodes) else 1.0
    return share * min(rates, default=0.0)


def placed(state: State, choice: Choice, resume: Resume) -> Choice:
    """The same choice with its workers in the order of ranks that keeps most bytes where they
    are."""
    if resume.source not in ("live", "peer") or resume.layout is None or state.model is None:
        return choice
    if len(choice.ranks) > MOST_WORKERS:
        return choice  # they would stay as they are
    return replace(choice, ranks=_order(_Transition(state, choice, resume)))


@lru_cache(maxsize=4)
def _order(asked: _Transition) -> tuple[WorkerId, ...]:
    state, choice, resume = asked.state, asked.choice, asked.resume
    assert state.model is not None and resume.layout is not None
    held: dict[WorkerId, list[int]] = {}
    for holding in resume.holdings:
        held.setdefault(holding.worker, []).append(holding.rank)
    kinds = speeds.kinds(state)
    if any(len(set(kind[1:])) > 1 for kind in kinds.values()):
        return choice.ranks  # each worker has the share that it can do
    cuts = (resume.layout, resume.layers), (choice.layout, choice.layers)
    return place(state.model, cuts, held, ranks=choice.ranks, kinds=kinds)


def transfer_message(move: Move | None) -> str:
    """For the decision's sentence."""
    if move is None:
        return ""
    way = (
        "the old state stays on the device"
        if move.via == "device"
        else "the old state leaves the device first"
    )
    return (
        f"moves {_mb(move.n_bytes)} between workers and {_mb(move.own_bytes)} in place in about "
        f"{move.seconds:.1f} s ({way}, {_mb(move.peak_bytes)} beyond the new one)"
    )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
