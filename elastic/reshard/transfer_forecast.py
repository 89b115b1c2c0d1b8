"""What taking over the state will cost, told before it starts: bytes per link, seconds, memory, and
by which way.

Seconds are those of the busiest part, since all parts work at once: a node's outgoing or incoming
link to other nodes; within a node, and for the boxes that a rank copies in its own memory, the same
rate per rank. `pace` corrects them by measured moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from elastic.reshard.chunks import chunk_bytes, sizes_of, staging_bytes
from elastic.reshard.communicators import CONTEXT_BYTES, messages_bytes, set_up_bytes
from elastic.reshard.pieces import Cut, Ints, Side, bytes_of, distinct
from elastic.reshard.routes import alike, routes_between
from elastic.types import Layout, ModelProfile, Move

LEAST_S = 0.02  # agreement on the step, sums, last answers


@dataclass(frozen=True)
class Room:
    """Memory of a GPU (0 = not known: taken for enough), and what the coming layout needs of it
    when it runs: state, gradients and activations (0 = not known). `device_type`: of the memory
    that the wire takes, cpu (gloo) or cuda (NCCL, which takes memory for itself).
    `host_bytes_per_s`: between device and host memory, 0 = not known."""

    memory_bytes: int = 0
    running_bytes: int = 0
    device_type: str = "cpu"
    host_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class TransferRates:
    """`link_bytes_per_s`: between two nodes, each way. `times`: measured seconds of earlier moves /
    predicted ones."""

    link_bytes_per_s: float = 2.9e9
    times: float = 1.0


def forecast(
    model: ModelProfile,
    old: Cut,
    new: Cut,
    *,
    holders: Mapping[int, tuple[int, ...]],
    nodes: Sequence[str],
    room: Room,
    pace: TransferRates,
) -> Move:
    """The Move of a transition from memory. Arguments as of `plan_transfers`. Raises StateLost
    where a part has no holder."""
    source, target = Side(model, old), Side(model, new)
    names = sorted(set(nodes))
    number = {name: i for i, name in enumerate(names)}
    node = np.array([number[name] for name in nodes], dtype=np.int64)
    sent = flows(source, target, holders, nodes=nodes)
    senders, destinations, n_bytes = sent
    moved = senders != destinations
    pairs, sums = summed(
        node[senders[moved]] * len(names) + node[destinations[moved]], n_bytes[moved]
    )
    ends = np.divmod(pairs, len(names))
    links = [
        (names[a], names[b], n)
        for a, b, n in zip(*(x.tolist() for x in (*ends, sums)), strict=True)
    ]
    taken = beside_torch(new[0], sent, node) if room.device_type != "cpu" else [0] * len(nodes)
    via, peak_bytes, leaving = memory(source, target, holders, taken=taken, room=room)
    host_s = 0.0
    # the old boxes leave the device, and their parts come back
    if via == "host" and room.host_bytes_per_s:
        back = np.bincount(senders, weights=n_bytes, minlength=len(nodes))
        host_s = max(n + float(back[p]) for p, n in leaving.items()) / room.host_bytes_per_s
    return Move(
        via=via,
        n_bytes=int(sums.sum()),
        own_bytes=int(n_bytes[~moved].sum()),
        links=tuple(links),
        seconds=LEAST_S
        + pace.times * (_busiest_bytes(sent, node) / pace.link_bytes_per_s + host_s),
        peak_bytes=peak_bytes,
    )


def flows(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], *, nodes: Sequence[str]
) -> tuple[Ints, Ints, Ints]:
    """Bytes from each participant to each other (and to itself): senders, destinations, bytes."""
    n = len(nodes)
    found = []
    for routes in routes_between(source, target, holders, nodes=nodes):
        pairs = routes.senders * n + routes.destination[:, None]
        each = routes.n_bytes * (len(routes.bundle.tensors) // pairs.shape[1])
        found.append(summed(pairs.ravel(), np.repeat(each, pairs.shape[1])))
    pairs, n_bytes = summed(*(np.concatenate(column) for column in zip(*found, strict=True)))
    return pairs // n, pairs % n, n_bytes


def summed(keys: Ints, amounts: Ints) -> tuple[Ints, Ints]:
    """The distinct keys in order, and the sum of the amounts of each."""
    distinct, at = np.unique(keys, return_inverse=True)
    sums = np.zeros_like(distinct)
    np.add.at(sums, at, amounts)
    return distinct, sums


def _busiest_bytes(sent: tuple[Ints, Ints, Ints], node: Ints) -> int:
    """Of the busiest node, to or from other nodes, or rank within its node."""
    senders, destinations, n_bytes = sent
    across, own = node[senders] != node[destinations], senders == destinations
    ways = (
        (node[senders], across),
        (node[destinations], across),
        (senders, ~across),
        (destinations, ~across & ~own),
    )
    return max(int(summed(ends[among], n_bytes[among])[1].max(initial=0)) for ends, among in ways)


def beside_torch(layout: Layout, sent: tuple[Ints, Ints, Ints], node: Ints) -> list[int]:
    """Of each participant, what CUDA and NCCL take on its GPU while the state is resharded: the
    coming generation's groups have been used once, and then who exchanges messages is connected."""
    n = len(node)
    senders, destinations, _ = sent
    moved = senders != destinations
    one, other = senders[moved], destinations[moved]
    pairs = distinct(np.concatenate([one * n + other, other * n + one]))
    here, there = np.divmod(pairs, n)
    peers = np.bincount(here, minlength=n)
    in_node = np.bincount(here[node[here] == node[there]], minlength=n)
    groups = {ranks: set_up_bytes(layout if ranks else Layout(), n) for ranks in (True, False)}
    return [
        CONTEXT_BYTES + groups[p < layout.world_size] + messages_bytes(near, near < all_)
        for p, (near, all_) in enumerate(zip(in_node.tolist(), peers.tolist(), strict=True))
    ]


def memory(
    source: Side,
    target: Side,
    holders: Mapping[int, tuple[int, ...]],
    *,
    taken: Sequence[int],
    room: Room,
) -> tuple[Literal["device", "host"], int, Mapping[int, int]]:
    """By which way, the most that a GPU needs beyond its new shard (promise 5), and the bytes of
    each participant's old boxes. `taken`: on each participant's GPU beside torch's memory.

    device: the old shard stays, next to it the new one and the staging buffers, and then all that
    the first steps need. host: the old shard has left before the new one is made, so that only what
    it was larger by counts. Gradients that a step which was aborted has left are gone by then (see
    elastic.worker.session.session).
    """
    n_participants = len(taken)
    sizes = sizes_of(room.device_type)
    old_bytes, new_bytes = bytes_of(source, padded=True), bytes_of(target)
    before: dict[int, int] = defaultdict(int)
    for rank, participants in alike(source, holders):
        for participant in participants:
            before[participant] = max(before[participant], old_bytes[rank])
    after = {p: new_bytes[p] if p < len(new_bytes) else 0 for p in range(n_participants)}
    staging = staging_bytes(n_participants, sizes) if n_participants > 1 else 0
    needed = (
        max(
            before[p] + (max(n, room.running_bytes) if n else 0) + taken[p]
            for p, n in after.items()
        )
        + staging
    )
    if not room.memory_bytes or needed <= room.memory_bytes:
        return "device", max(before.values()) + staging, before
    excess = max(before[p] - n for p, n in after.items())
    return "host", max(excess + chunk_bytes(n_participants, sizes), staging), before
