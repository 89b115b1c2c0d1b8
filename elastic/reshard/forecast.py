"""What taking over the state will cost, told before it starts: bytes per link, seconds, memory, and by which way.

Seconds are those of the busiest part, since all parts work at once: a node's outgoing or incoming link to other nodes; within a
node, and for the boxes that a rank copies in its own memory, the same rate per rank. `pace` corrects them by measured moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.reshard.chunks import chunk_bytes, sizes_of, staging_bytes
from elastic.reshard.routes import Cut, Side, bytes_of, routes_between
from elastic.types import ModelProfile, Move

LEAST_S = 0.02  # agreement on the step, sums, last answers


@dataclass(frozen=True)
class Room:
    """Memory of a GPU (0 = not known: taken for enough), and what the coming layout needs of it when it runs, the state
    included (0 = not known). `device_type`: of the memory that the wire takes, cpu (gloo) or cuda (NCCL)."""

    memory_bytes: int = 0
    running_bytes: int = 0
    device_type: str = "cpu"


@dataclass(frozen=True)
class Pace:
    """`link_bytes_per_s`: between two nodes, each way. `times`: measured seconds of earlier moves / predicted ones."""

    link_bytes_per_s: float = 2.9e9
    times: float = 1.0


def forecast(
    model: ModelProfile,
    old: Cut,
    new: Cut,
    holders: Mapping[int, tuple[int, ...]],
    nodes: Sequence[str],
    limits: tuple[Room, Pace],
) -> Move:
    """The Move of a transition from memory. Arguments as of `plan_transfers`. Raises StateLost where a part has no holder."""
    room, pace = limits
    source, target = Side(model, old), Side(model, new)
    sent = flows(source, target, holders, nodes)
    own_bytes = sum(n for (sender, destination), n in sent.items() if sender == destination)
    links: dict[tuple[str, str], int] = defaultdict(int)
    for (sender, destination), n in sent.items():
        if sender != destination:
            links[nodes[sender], nodes[destination]] += n
    via, peak_bytes = memory(source, target, holders, (len(nodes), room))
    return Move(
        via=via,
        n_bytes=sum(links.values()),
        own_bytes=own_bytes,
        links=tuple((a, b, n) for (a, b), n in sorted(links.items())),
        seconds=LEAST_S + pace.times * _busiest_s(sent, nodes, pace.link_bytes_per_s),
        peak_bytes=peak_bytes,
    )


def flows(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], nodes: Sequence[str]
) -> dict[tuple[int, int], int]:
    """Bytes from each participant to each other (and to itself)."""
    out: dict[tuple[int, int], int] = defaultdict(int)
    for bundle, routes in routes_between(source, target, holders, nodes):
        for route in routes:
            if len(route.senders) == 1:
                out[route.senders[0], route.destination] += route.n_bytes * len(bundle.tensors)
            else:
                for sender in route.senders:
                    out[sender, route.destination] += route.n_bytes
    return dict(out)


def _busiest_s(sent: Mapping[tuple[int, int], int], nodes: Sequence[str], link_bytes_per_s: float) -> float:
    """Seconds of the busiest node or rank."""
    busy: dict[tuple[str, object], int] = defaultdict(int)
    for (source, destination), n in sent.items():
        if nodes[source] != nodes[destination]:
            busy["from node", nodes[source]] += n
            busy["to node", nodes[destination]] += n
        else:
            busy["from rank", source] += n
            if source != destination:
                busy["to rank", destination] += n
    return max(busy.values(), default=0) / link_bytes_per_s


def memory(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], place: tuple[int, Room]
) -> tuple[Literal["device", "host"], int]:
    """By which way, and the most that a GPU needs beyond its new shard (promise 5).

    device: the old shard stays, next to it the new one and the staging buffers. host: the old shard has left before the new one
    is made, so that only what it was larger by counts.
    """
    n_participants, room = place
    sizes = sizes_of(room.device_type)
    old_bytes, new_bytes = bytes_of(source, padded=True), bytes_of(target)
    before: dict[int, int] = defaultdict(int)
    for rank, participants in holders.items():
        for participant in participants:
            before[participant] = max(before[participant], old_bytes[rank])
    after = {p: new_bytes[p] if p < len(new_bytes) else 0 for p in range(n_participants)}
    staging = staging_bytes(n_participants, sizes) if n_participants > 1 else 0
    needed = max(before[p] + (max(n, room.running_bytes) if n else 0) for p, n in after.items()) + staging
    if not room.memory_bytes or needed <= room.memory_bytes:
        return "device", max(before.values()) + staging
    excess = max(before[p] - n for p, n in after.items())
    return "host", max(excess + chunk_bytes(n_participants, sizes), staging)
