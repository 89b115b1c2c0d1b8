"""What taking over the state will cost, told before it starts: bytes per link, seconds, memory, and
by which way.

Seconds are those of the busiest part, since all parts work at once: a node's outgoing or incoming
link to other nodes; within a node, and for the boxes that a rank copies in its own memory, the same
rate per rank. `pace` corrects them by measured moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from elastic.reshard.chunks import LEAST_S, chunk_bytes, sizes_of, staging_bytes
from elastic.reshard.communicators import CONTEXT_BYTES, messages_bytes, set_up_bytes
from elastic.reshard.flows import Flows, flows
from elastic.reshard.pieces import Cut, Ints, Side, bytes_of
from elastic.reshard.routes import Holdings
from elastic.types import Layout, ModelProfile, Move
from elastic.types.replacing import follows_from, replace


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


@dataclass(frozen=True, eq=False)
class MoveForecast:
    """A Move, whose links get their names when somebody asks for them: thousands of nodes have tens
    of thousands. `nodes`: their names; `links`: senders' and receivers' places there, bytes."""

    unlinked: Move
    nodes: Sequence[str]
    links: tuple[Ints, Ints, Ints]

    @cached_property
    def move(self) -> Move:
        place = np.empty(len(self.nodes), dtype=np.int64)  # of each by its name
        place[sorted(range(len(self.nodes)), key=self.nodes.__getitem__)] = np.arange(len(place))
        order = np.lexsort((place[self.links[1]], place[self.links[0]]))
        senders, receivers, n_bytes = (x[order].tolist() for x in self.links)
        name = self.nodes.__getitem__
        links = tuple(zip(map(name, senders), map(name, receivers), n_bytes, strict=True))
        return replace(self.unlinked, links=links)


def forecast(
    model: ModelProfile,
    old: Cut,
    new: Cut,
    *,
    holders: Mapping[int, tuple[int, ...]],
    nodes: Sequence[str],
    room: Room,
    pace: TransferRates,
) -> MoveForecast:
    """The Move of a transition from memory. Arguments as of `plan_transfers`. Raises StateLost
    where a part has no holder."""
    number: dict[str, int] = {}
    places = tuple(number.setdefault(node, len(number)) for node in nodes)
    unlinked, links = _summed(model, (old, new), places, holders=holders, room=room, pace=pace)
    return MoveForecast(unlinked, list(number), links)


@follows_from()
def _summed(
    model: ModelProfile,
    cuts: tuple[Cut, Cut],
    nodes: Sequence[int],
    *,
    holders: Mapping[int, tuple[int, ...]],
    room: Room,
    pace: TransferRates,
) -> tuple[Move, tuple[Ints, Ints, Ints]]:
    """What the nodes are called does not matter: a run that lost some gets as many others."""
    old, new = cuts
    source, target = Side(model, old), Side(model, new)
    held = Holdings(source, holders, nodes)
    sums = flows(source, target, held)
    links = sums.links()
    leaving, taken = old_bytes(source, held), np.zeros_like(sums.own)
    if room.device_type != "cpu" and room.memory_bytes:
        taken = beside_torch(new[0], sums)
    via, peak_bytes = memory(leaving, bytes_of(target), taken=taken, room=room)
    host_s = 0.0
    # the old boxes leave the device, and their parts come back
    if via == "host" and room.host_bytes_per_s:
        host_s = int((leaving + sums.own + sums.sent).max()) / room.host_bytes_per_s
    move = Move(
        via=via,
        n_bytes=int(links[2].sum()),
        own_bytes=int(sums.own.sum()),
        seconds=LEAST_S
        + pace.times * (_busiest_bytes(sums, links) / pace.link_bytes_per_s + host_s),
        peak_bytes=peak_bytes,
    )
    return move, links


def _busiest_bytes(sums: Flows, links: tuple[Ints, Ints, Ints]) -> int:
    """Of the busiest node, to or from other nodes, or rank within its node."""
    across = links[0] != links[1]
    most = [int((sums.own + sums.near_sent).max()), int(sums.near_received.max())]
    for ends in links[:2]:
        of_node = np.zeros(sums.n_nodes, dtype=np.int64)
        np.add.at(of_node, ends[across], links[2][across])
        most.append(int(of_node.max()))
    return max(most)


def beside_torch(layout: Layout, sums: Flows) -> Ints:
    """Of each participant, what CUDA and NCCL take on its GPU while the state is resharded: the
    coming generation's groups have been used once, and then who exchanges messages is connected."""
    n = len(sums.own)
    groups = [set_up_bytes(layout if ranks else Layout(), n) for ranks in (True, False)]
    across = (sums.sent > sums.near_sent) | (sums.received > sums.near_received)
    peers = sums.near_peers()
    messages = np.array(
        [
            [messages_bytes(near, far) for far in (False, True)]
            for near in range(int(peers.max()) + 1)
        ]
    )
    set_up = np.where(np.arange(n) < layout.world_size, *groups)
    found: Ints = CONTEXT_BYTES + set_up + messages[peers, across.astype(np.int64)]
    return found


def old_bytes(source: Side, held: Holdings) -> Ints:
    """Of each participant's old boxes."""
    found = np.zeros(len(held.node), dtype=np.int64)
    np.maximum.at(found, held.who, bytes_of(source, padded=True)[held.ranks])
    return found


def memory(
    before: Ints, new_bytes: Ints, *, taken: Ints, room: Room
) -> tuple[Literal["device", "host"], int]:
    """By which way, and the most that a GPU needs beyond its new shard (promise 5). `before`: of
    each participant's old boxes; `new_bytes`: of each rank's new ones; `taken`: on each
    participant's GPU beside torch's memory.

    device: the old shard stays, next to it the new one and the staging buffers, and then all that
    the first steps need. host: the old shard has left before the new one is made, so that only what
    it was larger by counts. Gradients that a step which was aborted has left are gone by then (see
    elastic.worker.session.session).
    """
    n_participants = len(before)
    sizes = sizes_of(room.device_type)
    after = np.zeros_like(before)
    after[: len(new_bytes)] = new_bytes
    staging = staging_bytes(n_participants, sizes) if n_participants > 1 else 0
    running = np.where(after > 0, np.maximum(after, room.running_bytes), 0)
    needed = int((before + running + taken).max()) + staging
    if not room.memory_bytes or needed <= room.memory_bytes:
        return "device", int(before.max()) + staging
    excess = int((before - after).max())
    return "host", max(excess + chunk_bytes(n_participants, sizes), staging)
