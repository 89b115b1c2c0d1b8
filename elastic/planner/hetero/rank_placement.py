"""Which worker becomes which rank: tp x cp groups of equal GPUs of one node, replicas within one
zone, and where GPUs differ the orders that are worth comparing. Equal GPUs keep the order that they
are given in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from elastic.errors import InfeasiblePlan
from elastic.text import n_of
from elastic.types import Layout, Node, WorkerId

CLEAR = 0.05  # by which rates must differ to count as different


@dataclass(eq=False, slots=True)  # thousands are made at once: not frozen
class Slot:
    """A tp x cp group: workers of one node, as fast as the slowest of them."""

    node_id: str
    workers: tuple[WorkerId, ...]
    rate: float
    kind: int
    zone: str = ""


def speed_kinds(found: Iterable[tuple[float, int]]) -> dict[tuple[float, int], int]:
    """Of (rate, memory): 0 for the fastest, 1 for those that are clearly slower than these, and so
    on; of equally fast ones those with more memory first."""
    kinds: dict[tuple[float, int], tuple[int, int]] = {}
    kind, fastest = -1, 0.0
    for rate, memory in sorted(set(found), key=lambda one: -one[0]):
        if kind < 0 or rate * (1 + CLEAR) < fastest:
            kind, fastest = kind + 1, rate
        kinds[rate, memory] = kind, -memory
    order = {one: i for i, one in enumerate(sorted(set(kinds.values())))}
    return {one: order[kind] for one, kind in kinds.items()}


def kinds_of(
    rates: Mapping[WorkerId, float], memory: Mapping[str, int] | None = None
) -> dict[WorkerId, int]:
    """Worker -> its kind, as `speed_kinds`. `memory`: of nodes."""
    rooms = memory or {}
    known = not rooms or all(worker.node_id in rooms for worker in rates)
    if known and len(set(rates.values())) <= 1 and len(set(rooms.values())) <= 1:
        return dict.fromkeys(rates, 0)
    of = {worker: (rate, rooms.get(worker.node_id, 0)) for worker, rate in rates.items()}
    kinds = speed_kinds(of.values())
    return {worker: kinds[one] for worker, one in of.items()}


def named_zones(nodes: Sequence[Node], zones: Mapping[str, str] | None) -> dict[str, str]:
    """Node -> zone, where at least two are named; {} = all may be in one place. Nodes of no zone
    are together."""
    found = {node.node_id: (zones or {}).get(node.node_id, "") for node in nodes}
    return found if len({zone for zone in found.values() if zone}) > 1 else {}


@dataclass(frozen=True, eq=False)
class PlacementSite:
    """Where workers stand and how fast they are. `zones` as `named_zones` makes them: a replica
    must lie within one."""

    nodes: Sequence[Node]
    rates: Mapping[WorkerId, float]
    kinds: Mapping[WorkerId, int]
    zones: Mapping[str, str]
    _slots: dict[int, list[Slot]] = field(default_factory=dict)

    @cached_property
    def uneven(self) -> bool:
        """Are there several kinds?"""
        return any(self.kinds.values())

    def slots(self, inner: int) -> list[Slot]:
        """Of `inner` workers each; where a node's GPUs differ, equal ones are together and the
        slowest are left over."""
        if inner not in self._slots:
            self._slots[inner] = (
                self._single()
                if inner == 1 and not self.uneven
                else [slot for node in self.nodes for slot in self._of_node(node, inner)]
            )
        return self._slots[inner]

    def _single(self) -> list[Slot]:
        """Of one worker each, in the given order."""
        zones = self.zones
        return [
            Slot(worker[0], (worker,), rate, 0, zones.get(worker[0], "") if zones else "")
            for worker, rate in self.rates.items()
        ]

    def _of_node(self, node: Node, inner: int) -> list[Slot]:
        workers = [WorkerId(node.node_id, k) for k in range(node.gpus)]
        if self.uneven:
            workers.sort(key=lambda worker: self.kinds[worker])
        groups = [tuple(workers[i : i + inner]) for i in range(0, node.gpus - inner + 1, inner)]
        if self.uneven:
            groups = sorted(tuple(sorted(group)) for group in groups)
        zone = self.zones.get(node.node_id, "")
        rates, kinds = self.rates, self.kinds
        return [
            Slot(node.node_id, group, min(rates[w] for w in group), max(kinds[w] for w in group),
            zone)
            for group in groups
        ]  # fmt: skip

    def arrangements(self, layout: Layout, max_workers: int = 0) -> Iterator[tuple[Slot, ...]]:
        """Orders of slots along pp x dp, the given one first. Raises InfeasiblePlan with the
        numbers where there is none."""
        if max_workers and layout.world_size > max_workers:
            raise InfeasiblePlan(
                f"needs {n_of(layout.world_size, 'worker')}, max_workers is {max_workers}"
            )
        inner = layout.tp * layout.cp
        slots = self.slots(inner)
        n = layout.world_size // inner
        if len(slots) < n:
            raise InfeasiblePlan(self._too_few(layout, len(slots) * inner))
        if not self.uneven:  # and thousands of workers are long to hash
            yield _stagewise(self._replicas(slots, layout), layout)
            return
        seen: set[tuple[Slot, ...]] = set()
        for order in self._orders(slots, n, layout.pp):
            replicas = self._replicas(order, layout)
            for made in (_stagewise(replicas, layout), _replicawise(replicas, layout)):
                if made not in seen:
                    seen.add(made)
                    yield made

    def _orders(self, slots: list[Slot], n: int, pp: int) -> Iterator[list[Slot]]:
        """The given one; without the slowest; for stages also the slow ones first (the last stage
        has the head), then last."""
        yield slots
        falling = sorted(slots, key=attrgetter("kind"))
        if not self.zones:
            fastest = set(falling[:n])
            slots, falling = [slot for slot in slots if slot in fastest], falling[:n]
            yield slots
            if pp == 1:
                return
            yield sorted(slots, key=lambda slot: -slot.kind)
        yield falling

    def _replicas(self, order: Sequence[Slot], layout: Layout) -> list[list[Slot]]:
        """What each replica has, where zones bind; else all in one list."""
        n = layout.world_size // (layout.tp * layout.cp)
        if not self.zones:
            return [list(order[:n])]
        size, by_zone = n // layout.dp_replicate, dict[str, list[Slot]]()
        for slot in order:
            by_zone.setdefault(slot.zone, []).append(slot)
        found = [
            there[i : i + size]
            for there in by_zone.values()
            for i in range(0, len(there) - size + 1, size)
        ]
        if len(found) < layout.dp_replicate:
            inner = layout.tp * layout.cp
            has = ", ".join(
                f"{zone or 'unnamed'} {len(there) * inner}"
                for zone, there in sorted(by_zone.items())
            )
            what = (
                "stages, shards and tp peers"
                if layout.dp_replicate == 1
                else f"{layout.dp_replicate} replicas"
            )
            raise InfeasiblePlan(
                f"{what} of {size * inner} workers each within one zone do not fit: workers in "
                f"zones are {has} (across_zones: true would let them cross)"
            )
        return found[: layout.dp_replicate]

    def _too_few(self, layout: Layout, in_groups: int) -> str:
        group, n_workers = layout.tp * layout.cp, sum(node.gpus for node in self.nodes)
        inside = f", {in_groups} of them in groups of {group} inside a node" if group > 1 else ""
        return (
            f"needs {n_of(layout.world_size, 'worker')}, there are {n_workers} on "
            f"{n_of(len(self.nodes), 'node')}{inside}"
        )


def _stagewise(replicas: Sequence[Sequence[Slot]], layout: Layout) -> tuple[Slot, ...]:
    """Neighbors share a stage: with slots sorted by kind, each stage is of one kind as far as the
    numbers go."""
    if len(replicas) == 1:
        return tuple(replicas[0])
    each = len(replicas[0]) // layout.pp
    return tuple(
        slot
        for p in range(layout.pp)
        for slots in replicas
        for slot in slots[p * each : (p + 1) * each]
    )


def _replicawise(replicas: Sequence[Sequence[Slot]], layout: Layout) -> tuple[Slot, ...]:
    """Neighbors share a pipeline: with slots sorted by kind, each data-parallel rank is of one
    kind."""
    return tuple(
        slot for p in range(layout.pp) for slots in replicas for slot in slots[p :: layout.pp]
    )
