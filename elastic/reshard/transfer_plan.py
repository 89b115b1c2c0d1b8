"""Old boxes x new boxes -> Transfers, and the proof that they cover what they must. Integers only;
routes.py has the choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from elastic.errors import InternalError
from elastic.reshard.pieces import Cut
from elastic.reshard.rank_boxes import Region, meet, placements
from elastic.reshard.routes import Routes, plan_routes
from elastic.types import Box, ModelProfile, Resume, Transfer, WorkerId
from elastic.types.grid import replica_keys


def plan_transfers(
    model: ModelProfile,
    old: Cut,
    new: Cut,
    holders: Mapping[int, tuple[int, ...]],
    nodes: Sequence[str],
    me: int | None = None,
) -> tuple[Transfer, ...]:
    """Where each rank of the new layout gets its boxes from: every element of each of its boxes
    exactly once.

    `holders`: rank of the old layout -> participants that hold its boxes. `nodes`: node of each
    participant, ranks of the new layout first. `me`: only the transfers that this participant sends
    or receives. The order is that of the state's tensors, then of the destinations; equal input
    gives equal output, and what `me` gets is a part of the whole in the same order. Raises
    StateLost, naming the tensor, when a part has no holder.
    """
    of_tensor: dict[int, list[tuple[Region, list[int]]]] = {}
    for routes in plan_routes(model, old, new, holders=holders, nodes=nodes):
        of_tensor.update(_by_tensor(routes, me))
    out: list[Transfer] = []
    for i, placed in enumerate(placements(model)):
        for (offsets, sizes), way in of_tensor[i]:
            out.append(Transfer(placed.spec.fqn, offsets, sizes, placed.spec.dtype, *way))
    return tuple(out)


def _by_tensor(
    routes: Routes, me: int | None
) -> Iterator[tuple[int, list[tuple[Region, list[int]]]]]:
    """Of each tensor of the bundle: the parts of `me` and their source, destination and holding."""
    mine = (
        (routes.destination == me) | (routes.senders == me).any(axis=1)
        if me is not None
        else routes.size > 0
    )
    parts = np.flatnonzero(mine)
    regions = [routes.region(i) for i in parts.tolist()]
    for k, tensor in enumerate(routes.bundle.tensors):
        senders, destination = (
            routes.senders[parts, k if routes.senders.shape[1] > 1 else 0],
            routes.destination[parts],
        )
        ways = np.stack(
            [senders, destination, routes.givers.holding(routes.old[parts], senders)], axis=1
        ).tolist()
        yield (
            tensor,
            [
                (region, way)
                for region, way in zip(regions, ways, strict=True)
                if me is None or me in way[:2]
            ],
        )


def check_cover(transfers: Iterable[Transfer], mine: Iterable[Box], me: int) -> None:
    """Proof (a) of promise 5, for one destination: its transfers cover each of its boxes exactly
    once.

    Pieces inside the box, none meeting another, with as many elements as the box: nothing is
    missing, nothing comes twice. Raises InternalError, naming the tensor.
    """
    pieces: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.destination == me:
            pieces.setdefault(transfer.fqn, []).append(transfer)
    for box in mine:
        found = sorted(pieces.pop(box.fqn, ()), key=lambda t: t.offsets)
        inside = sum(
            meet((t.offsets, t.sizes), (box.offsets, box.sizes)) == (t.offsets, t.sizes)
            for t in found
        )
        n_bytes = sum(t.n_bytes for t in found)
        if inside != len(found) or n_bytes != box.n_bytes or _meeting(found):
            text = (
                f"{len(found)} transfers with {n_bytes} of {box.n_bytes} bytes do not cover it once"
            )
            raise InternalError(f"{box.fqn} on rank {me}: {text}")
    if pieces:
        raise InternalError(
            f"{next(iter(pieces))}: transfers go to rank {me}, which has no box of it"
        )


def _meeting(found: Sequence[Transfer]) -> bool:
    """Do two of the transfers, sorted by their offsets, have an element in common?"""
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            if meet((one.offsets, one.sizes), (other.offsets, other.sizes)) is not None:
                return True
    return False


def participants(ranks: Sequence[WorkerId], resume: Resume) -> tuple[WorkerId, ...]:
    """Everyone who takes part in a transition: the ranks of the new plan, then the workers that
    only send."""
    return tuple(dict.fromkeys((*ranks, *(holding.worker for holding in resume.holdings))))


def holders_of(
    resume: Resume, everyone: Sequence[WorkerId], alone: bool = False
) -> dict[int, tuple[int, ...]]:
    """Rank of the old layout -> participants that hold its boxes (its own, or equal ones of a
    replica, unless they are `alone`: see replica_key)."""
    assert resume.layout is not None
    index = dict(zip(everyone, range(len(everyone))))
    keys = replica_keys(resume.layout, alone)
    held, n = defaultdict[int, list[int]](list), len(keys)
    for holding in resume.holdings:
        if 0 <= (rank := holding.rank) < n:
            held[keys[rank]].append(index[holding.worker])
    found = {key: tuple(dict.fromkeys(who) if len(who) > 1 else who) for key, who in held.items()}
    return {rank: found.get(key, ()) for rank, key in enumerate(keys)}
