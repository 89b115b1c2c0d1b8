"""What taking over the state will cost, told before it starts: bytes per link, seconds, memory, and by which way.

Seconds are those of the busiest part, since all parts work at once: a node's outgoing or incoming link to other nodes; within a
node, and for the boxes that a rank copies in its own memory, the same rate per rank. `pace` corrects them by measured moves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.reshard.chunks import chunk_bytes, sizes_of, staging_bytes
from elastic.reshard.communicators import CONTEXT_BYTES, messages_bytes, set_up_bytes
from elastic.reshard.routes import Cut, Side, bytes_of, routes_between
from elastic.types import Layout, ModelProfile, Move

LEAST_S = 0.02  # agreement on the step, sums, last answers


@dataclass(frozen=True)
class Room:
    """Memory of a GPU (0 = not known: taken for enough), and what the coming layout needs of it when it runs: state, gradients
    and activations (0 = not known). `device_type`: of the memory that the wire takes, cpu (gloo) or cuda (NCCL, which takes
    memory for itself). `host_bytes_per_s`: between device and host memory, 0 = not known."""

    memory_bytes: int = 0
    running_bytes: int = 0
    device_type: str = "cpu"
    host_bytes_per_s: float = 0.0


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
    taken = [0] * len(nodes)
    if room.device_type != "cpu":
        taken = beside_torch(new[0], sent, nodes)
    via, peak_bytes, leaving = memory(source, target, holders, (taken, room))
    host_s = 0.0
    if via == "host" and room.host_bytes_per_s:  # the old boxes leave the device, and their parts come back
        back = Counter[int]()
        for (sender, _), n in sent.items():
            back[sender] += n
        host_s = max(n + back[p] for p, n in leaving.items()) / room.host_bytes_per_s
    return Move(
        via=via,
        n_bytes=sum(links.values()),
        own_bytes=own_bytes,
        links=tuple((a, b, n) for (a, b), n in sorted(links.items())),
        seconds=LEAST_S + pace.times * (_busiest_s(sent, nodes, pace.link_bytes_per_s) + host_s),
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


def beside_torch(layout: Layout, sent: Mapping[tuple[int, int], int], nodes: Sequence[str]) -> list[int]:
    """Of each participant, what CUDA and NCCL take on its GPU while the state moves: the coming generation's groups have been
    used once, and then who exchanges messages is connected."""
    peers: dict[int, set[int]] = defaultdict(set)
    for one, other in sent:
        if one != other:
            peers[one].add(other)
            peers[other].add(one)
    found = []
    for p, node in enumerate(nodes):
        groups = set_up_bytes(layout if p < layout.world_size else Layout(), len(nodes))
        n_in_node = sum(nodes[other] == node for other in peers[p])
        found.append(CONTEXT_BYTES + groups + messages_bytes(n_in_node, n_in_node < len(peers[p])))
    return found


def memory(
    source: Side, target: Side, holders: Mapping[int, tuple[int, ...]], place: tuple[Sequence[int], Room]
) -> tuple[Literal["device", "host"], int, Mapping[int, int]]:
    """By which way, the most that a GPU needs beyond its new shard (promise 5), and the bytes of each participant's old boxes.
    `place`: what is taken on each participant's GPU beside torch's memory.

    device: the old shard stays, next to it the new one and the staging buffers, and then all that the first steps need. host:
    the old shard has left before the new one is made, so that only what it was larger by counts. Gradients that a step which
    was broken off has left are gone by then (see elastic.worker.session).
    """
    taken, room = place
    n_participants = len(taken)
    sizes = sizes_of(room.device_type)
    old_bytes, new_bytes = bytes_of(source, padded=True), bytes_of(target)
    before: dict[int, int] = defaultdict(int)
    for rank, participants in holders.items():
        for participant in participants:
            before[participant] = max(before[participant], old_bytes[rank])
    after = {p: new_bytes[p] if p < len(new_bytes) else 0 for p in range(n_participants)}
    staging = staging_bytes(n_participants, sizes) if n_participants > 1 else 0
    needed = max(before[p] + (max(n, room.running_bytes) if n else 0) + taken[p] for p, n in after.items()) + staging
    if not room.memory_bytes or needed <= room.memory_bytes:
        return "device", max(before.values()) + staging, before
    excess = max(before[p] - n for p, n in after.items())
    return "host", max(excess + chunk_bytes(n_participants, sizes), staging), before
