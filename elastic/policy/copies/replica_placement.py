"""Which ranks keep whose peer replicas, and whether the host memory is there for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from operator import attrgetter

from elastic.planner.choice import Choice
from elastic.policy.state.state import State
from elastic.reshard.pieces import Side, bytes_of
from elastic.types import HardwareProfile, Layout, ModelProfile, Node, Pool, WorkerId
from elastic.types.grid import replica_key

Keepers = tuple[tuple[int, ...], ...]

KEPT_ANSWERS = 8  # for other numbers of nodes
COPIES = 1  # in other failure domains, where the job says 'auto'
# of a node's host memory: for everything else
RESERVE_SHARE, RESERVE_BYTES, RESERVE_SHARE_MOST = 0.2, 8 << 30, 0.25
STORING = 1  # own buffers besides those of peer replicas, while a checkpoint is written


@dataclass(frozen=True)
class Copies:
    """The part of a Plan that says who keeps what. `to`: () = no peer replicas. `n_bytes`: the most
    that one rank sends. `replicas`: ranks of other nodes hold every box anyway. `note`: what is not
    as asked, for the plan's reason."""

    to: Keepers = ()
    buffers: int = 2
    bytes_per_s: float = 0.0
    n_bytes: int = 0
    replicas: bool = False
    note: str = ""

    @property
    def missing(self) -> bool:
        """Wanted and not to be had: nobody but storage holds a copy."""
        return bool(self.note) and not self.to and not self.replicas


def replica_holders(
    layout: Layout,
    ranks: Sequence[WorkerId],
    zones: Mapping[str, str],
    *,
    n: int,
    across: bool = False,
    alone: bool = False,
) -> Keepers:
    """For each rank the ranks that keep its copy, so that every box is held by workers of n + 1
    nodes, where there are so many.

    A node is a failure domain. `zones`: node -> its zone; a copy stays in its zone, unless
    `across`: then the first goes to another zone where there is one. Ranks with equal boxes
    (dp_replicate, unless they are `alone`) count as holders; only one of them sends. The k-th
    worker of a node begins its search k nodes behind the next one, so that what a lost node held
    comes back from many.
    """
    places, nodes = _places(ranks)
    return _spread_out(
        layout,
        places,
        tuple(zones.get(node, "") for node in nodes),
        known=frozenset(zones.values()),
        n=n,
        across=across,
        alone=alone,
    )


def _places(ranks: Sequence[WorkerId]) -> tuple[tuple[int, ...], list[str]]:
    """Of each rank its node, by its place among the nodes in rank order; and these."""
    of_rank = [worker.node_id for worker in ranks]
    nodes = list(dict.fromkeys(of_rank))
    number = {node: place for place, node in enumerate(nodes)}
    return tuple(map(number.__getitem__, of_rank)), nodes


@lru_cache(maxsize=KEPT_ANSWERS)
def _spread_out(
    layout: Layout,
    places: tuple[int, ...],
    zones: tuple[str, ...],
    *,
    known: frozenset[str],
    n: int,
    across: bool,
    alone: bool,
) -> Keepers:
    """What the nodes are called does not matter: runs lose some and get others, as many as
    before."""
    spread = _Spread(places, zones, known if across else None)
    groups: dict[int, list[int]] = {}
    for rank in range(len(places)):
        groups.setdefault(replica_key(layout, rank, alone), []).append(rank)
    holding = [(members, {places[rank] for rank in members}) for members in groups.values()]
    spread.limit(sum(max(0, n + 1 - len(nodes)) for _, nodes in holding))
    for _ in range(n):
        for members, nodes in holding:
            if len(nodes) <= n:
                nodes |= spread.one_more(members, nodes)
    return tuple(tuple(to) for to in spread.to)


class _Spread:
    """Gives copies to nodes evenly. `places`: of each rank its node; `zones`: of each node;
    `every`: the zones that there are, where copies go to other ones."""

    def __init__(
        self, places: Sequence[int], zones: Sequence[str], every: frozenset[str] | None
    ) -> None:
        self.places, self.zones, self.every = places, zones, every
        self.on: list[list[int]] = [[] for _ in zones]
        for rank, node in enumerate(places):
            self.on[node].append(rank)
        self.to: list[list[int]] = [[] for _ in places]
        self.kept = [0] * len(places)
        self.load = [0] * len(zones)
        self.most = 0

    def limit(self, n_copies: int) -> None:
        """No node takes more than its part while another can."""
        self.most = ceil(n_copies / len(self.on))

    def one_more(self, members: Sequence[int], nodes: set[int]) -> set[int]:
        """One of the members sends to a node that holds their boxes not yet. Returns that node;
        nothing when there is none."""
        for sender in sorted(members, key=lambda rank: len(self.to[rank])):
            node = self._node(sender, nodes)
            if node is not None:
                keeper = min(self.on[node], key=self.kept.__getitem__)  # of equal ones the first
                self.to[sender].append(keeper)
                self.kept[keeper] += 1
                self.load[node] += 1
                return {node}
        return set()

    def _node(self, sender: int, taken: set[int]) -> int | None:
        best: int | None = None
        for candidate in self._ring(sender):
            if candidate in taken or not self._allowed(sender, candidate, taken):
                continue
            if self.load[candidate] < self.most:
                return candidate
            if best is None or self.load[candidate] < self.load[best]:
                best = candidate
        return best

    def _ring(self, sender: int) -> Iterator[int]:
        home = self.places[sender]
        n, k = len(self.on), self.on[home].index(sender)
        for i in range(n - 1):
            yield (home + 1 + (k + i) % (n - 1)) % n

    def _allowed(self, sender: int, candidate: int, taken: set[int]) -> bool:
        other = self.zones[candidate]
        if self.every is None:
            return self.zones[self.places[sender]] == other
        held = {self.zones[node] for node in taken}
        return other not in held or held == self.every or len(held) > 1


def holders(
    layout: Layout, ranks: Sequence[WorkerId], to: Keepers, *, alone: bool = False
) -> dict[int, set[str]]:
    """Piece of the state (the key of the ranks that hold it) -> nodes that hold a copy of it."""
    places, names = _places(ranks)
    found = _held_on(layout, places, to, alone=alone)
    return {piece: {names[node] for node in nodes} for piece, nodes in found.items()}


def _held_on(
    layout: Layout, places: Sequence[int], to: Keepers, *, alone: bool
) -> dict[int, set[int]]:
    out: dict[int, set[int]] = {}
    for rank, place in enumerate(places):
        nodes = out.setdefault(replica_key(layout, rank, alone), set())
        nodes |= {place, *(places[keeper] for keeper in (to[rank] if to else ()))}
    return out


@lru_cache(maxsize=2 * KEPT_ANSWERS)
def _least_held(layout: Layout, places: tuple[int, ...], to: Keepers, *, alone: bool) -> int:
    """On how many nodes the piece is that has the fewest copies."""
    return min(map(len, _held_on(layout, places, to, alone=alone).values()))


# --------------------------------------------------------------------------------- what a plan gets


def copies(state: State, choice: Choice, nodes: Sequence[Node]) -> Copies:
    """Who keeps whose copies under this choice: as many as the job asks for, fewer where nodes or
    host memory do not do."""
    wanted = state.job.peer_copies
    n = COPIES if wanted == "auto" else wanted
    used = Counter(map(attrgetter("node_id"), choice.ranks))
    if not n or len(used) < 2 or state.job.peer_every == 0 or state.model is None:
        return Copies()
    by_id = {node.node_id: node for node in nodes}
    named = {pool.name: _zone(pool) for pool in state.pool_by_name.values()}
    zones = {name: named.get(by_id[name].pool, "") if name in by_id else "" for name in used}
    across, alone = state.job.copies_across_zones, state.model.by_owners
    places, _ = _places(choice.ranks)
    replicated = _least_held(choice.layout, places, (), alone=alone) > n
    sizes = rank_bytes(state.model, choice, rounded=bool(state.pinned_rounded & used.keys()))
    room = _room(state, choice, nodes, used=used)
    first = ""
    for k, buffers in [*((k, 2) for k in range(n, 0, -1)), (1, 1)]:
        to = replica_holders(choice.layout, choice.ranks, zones, n=k, across=across, alone=alone)
        held = _least_held(choice.layout, places, to, alone=alone) - 1
        if not held and not any(to):
            break
        needed = node_bytes(choice.ranks, to, sizes, buffers=buffers) if room else {}
        short = _too_little(needed, room)
        if not short:
            note = _note(n, min(k, held), buffers, short=first, zones=zones)
            pace = _pace(state, nodes) / max(used.values())
            sent = max(size * len(keep) for size, keep in zip(sizes, to, strict=True))
            return Copies(to, buffers, pace, sent, replicated, note)
        first = first or short
    if first:
        return Copies(replicas=replicated, note=f"no peer replicas: {first}")
    zone = next(iter(zones.values()))
    return Copies(
        note=f"no peer replicas: each node is alone in its zone ({zone or 'unnamed'} ...)"
    )


def _note(wanted: int, held: int, buffers: int, *, short: str, zones: Mapping[str, str]) -> str:
    if short:
        how = (
            "one buffer each, no whole copy while one is sent"
            if buffers < 2
            else f"{held} of {wanted}"
        )
        return f"peer replicas: {how}, since {short}"
    if held >= wanted:
        return ""
    why = (
        f"{len(zones)} nodes"
        if len(set(zones.values())) == 1
        else f"{len(zones)} nodes in {len(set(zones.values()))} zones"
    )
    return f"peer replicas: {held} of {wanted}, there are {why}"


def _zone(pool: Pool) -> str:
    return f"{pool.region}/{pool.zone}".strip("/")


def rank_bytes(model: ModelProfile, choice: Choice, rounded: bool = False) -> list[int]:
    """Host bytes of each rank's boxes, at most: those of the first rank of its stage, whose chunks
    are the largest, or of the owner that has most. `rounded`: up to a power of two, as torch
    allocates pinned memory unless it is told otherwise."""
    layout = choice.layout
    each = bytes_of(Side(model, (layout, choice.layers)), aligned=8).reshape(layout.pp, -1)
    most = each.max(axis=1) if model.by_owners else each[:, 0]
    sizes = [1 << (n - 1).bit_length() if rounded and n else n for n in most.tolist()]
    return [size for size in sizes for _ in range(each.shape[1])]


def _room(
    state: State, choice: Choice, nodes: Sequence[Node], *, used: Mapping[str, int]
) -> dict[str, int]:
    """Host memory for copies of the nodes where it is known: less the reserve, and on CPU less what
    training itself takes. `used`: node -> its workers."""
    found: dict[str, int] = {}
    for node in nodes:
        pool = state.pool(node.pool)
        whole = node.host_memory_bytes or (pool.host_memory_bytes if pool is not None else 0)
        if whole:
            reserve = max(RESERVE_SHARE * whole, min(RESERVE_BYTES, RESERVE_SHARE_MOST * whole))
            on_cpu = pool is not None and pool.accelerator_type == "CPU"
            found[node.node_id] = int(whole - reserve) - (
                choice.memory_bytes * used.get(node.node_id, 0) if on_cpu else 0
            )
    return found


def node_bytes(
    ranks: Sequence[WorkerId], to: Keepers, sizes: Sequence[int], *, buffers: int
) -> dict[str, int]:
    """Host bytes per node: own copies and those kept for others, `buffers` of each, and one own
    that is being stored."""
    out: dict[str, int] = {}
    for rank, worker in enumerate(ranks):
        out[worker.node_id] = out.get(worker.node_id, 0) + sizes[rank] * (buffers + STORING)
        for keeper in to[rank]:
            node = ranks[keeper].node_id
            out[node] = out.get(node, 0) + sizes[rank] * buffers
    return out


def _too_little(needed: Mapping[str, int], room: Mapping[str, int]) -> str:
    """Which node lacks host memory, with the numbers; '' when all have enough."""
    for node, n_bytes in needed.items():
        if node in room and n_bytes > room[node]:
            return (
                f"{node} would need {n_bytes / 2**30:.3g} GiB of host memory and has "
                f"{max(0, room[node]) / 2**30:.3g}"
            )
    return ""


def _pace(state: State, nodes: Sequence[Node]) -> float:
    """Bytes per second that a node may send of its copies."""
    kinds = {
        pool.accelerator_type for pool in state.pools if pool.name in {node.pool for node in nodes}
    }
    links = [
        profile.link_bytes_per_s for profile in state.hardware if profile.accelerator_type in kinds
    ]
    return state.job.copy_link_share * min(links, default=HardwareProfile().link_bytes_per_s)
