"""The nodes of a search, what is known of them, and which parts of them are worth a look.

Nodes are told apart by their hardware, their memory, their zone and, where workers were measured,
by how fast these are. All of it counts for a plan and for a run alike; a plan has measured nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations, repeat
from math import inf
from statistics import median

from elastic.planner.cost import default_hardware
from elastic.planner.cost.block_cost_cache import BlockCostCache
from elastic.planner.cost.memory import usable_bytes
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import rate, site_of
from elastic.planner.cost.step_cost import Site
from elastic.planner.hetero import rank_placement
from elastic.planner.hetero.hetero_assign import HeteroAssigner
from elastic.types import HardwareProfile, Job, Layout, Node, WorkerId, worker_ids

MOST_KINDS = 3  # of hardware, of which every combination is looked at
MOST_DROPPED = 6  # sets without the slowest workers that are looked at
SMALLEST_SHARE = 8  # nodes are halved down to this part of them where fewer may be better


@dataclass(frozen=True)
class LayoutLimits:
    """What layouts must fit into. `memory`: node -> bytes of each of its GPUs, `memory_bytes`: of
    those of nodes that it does not name; 0 = not known. `infeasible`: layouts that were found not
    to fit, with the bytes; `infeasible_on`: on what memory of a GPU, where that is known: on more
    they are tried again. `on_gpus`: CUDA and NCCL take their part of these bytes. `hardware`: of
    nodes by their id, as far as it is known; where it is not of all of them, layouts are compared
    on default hardware. `rates`: how fast each worker computes, in any one unit; where they are not
    there for all, the hardware says. `zones`: node -> its zone, where only replicas may lie in
    different ones. `unusable`: layouts, in words, that do not compute what the model does, and why.
    `host_memory`: node -> bytes of its own memory, as far as they are known."""

    memory_bytes: int = 0
    infeasible: Mapping[Layout, int] | None = None
    infeasible_on: Mapping[Layout, int] | None = None
    hardware: Mapping[str, HardwareProfile] | None = None
    rates: Mapping[WorkerId, float] | None = None
    zones: Mapping[str, str] | None = None
    memory: Mapping[str, int] | None = None
    unusable: Mapping[str, str] | None = None
    on_gpus: bool = False
    host_memory: Mapping[str, int] | None = None

    def of_plan(self) -> LayoutLimits:
        """What is known before anything has run."""
        return replace(self, infeasible=None, infeasible_on=None, rates=None, unusable=None)


@dataclass(eq=False)
class SearchedNodes:
    """All nodes of a search. `known`: is the hardware of each of them, and what a sample asks of
    the model? Else times only rank layouts that cut the model equally far."""

    work: ModelCost
    job: Job
    nodes: tuple[Node, ...]
    limits: LayoutLimits
    _sites: dict[tuple[int, float, int, int], Site] = field(default_factory=dict)
    _usable: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        said = self.limits.hardware or {}
        all_said = bool(self.nodes) and all(node.node_id in said for node in self.nodes)
        default = default_hardware.NOMINAL if self.limits.on_gpus else default_hardware.GUESSED_CPU
        self.timed = self.work.sample is not None and self.work.sample.flop > 0
        self.hardware_known, self.known = all_said, all_said and self.timed
        self.hardware: list[HardwareProfile] = []
        self.kind_of: dict[str, int] = {}  # node -> place in `hardware`
        places: dict[int, int] = {}  # by identity first: profiles are long to compare
        for node in self.nodes:
            gpu = said[node.node_id] if all_said else default
            if id(gpu) not in places:
                same = (i for i, other in enumerate(self.hardware) if other == gpu)
                places[id(gpu)] = next(same, len(self.hardware))
                if places[id(gpu)] == len(self.hardware):
                    self.hardware.append(gpu)
            self.kind_of[node.node_id] = places[id(gpu)]
        workers = sum(node.gpus for node in self.nodes)
        self.n_workers = min(workers, self.job.max_workers or workers)
        self.cache = BlockCostCache(self.work)
        speeds = [self._nominal(i) for i in range(len(self.hardware))]
        self.nominal = [speed / min(speeds) for speed in speeds]
        self.measured = self._measured()
        named = {} if self.job.across_zones else self.limits.zones
        self.zones = rank_placement.named_zones(self.nodes, named)

    @cached_property
    def whole(self) -> NodeSet:
        return NodeSet(self, self.nodes, self.n_workers)

    @cached_property
    def larger(self) -> list[NodeSet]:
        """Those with more memory than some layout did not fit; [] = none, or all fitted."""
        tried = max((self.limits.infeasible_on or {}).values(), default=0)
        some = self._set(node for node in self.nodes if 0 < tried < self.memory(node))
        return [some] if some.nodes else []

    def memory(self, node: Node) -> int:
        """Of each of its GPUs; 0 = not known."""
        return (self.limits.memory or {}).get(node.node_id) or self.limits.memory_bytes

    def usable(self, room: int, layout: Layout) -> float:
        """Of so many bytes of a GPU those that a layout may take: all where what a sample asks is
        not known; never 0, which is of memory that is not known."""
        if not room or self.work.sample is None:
            return room
        key = room, layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp
        if key not in self._usable:
            self._usable[key] = max(1.0, usable_bytes(room, layout, self.limits.on_gpus))
        return self._usable[key]

    def _measured(self) -> dict[WorkerId, float] | None:
        """None where not all workers are measured."""
        rates = self.limits.rates
        if not rates:
            return None
        each = [WorkerId(node.node_id, k) for node in self.nodes for k in range(node.gpus)]
        if not all(worker in rates for worker in each):
            return None
        return {worker: rates[worker] for worker in each}

    def speed(self, worker: WorkerId) -> float:
        if self.measured is not None:
            return self.measured[worker]
        return self.nominal[self.kind_of[worker.node_id]]

    def _nominal(self, kind: int) -> float:
        """What each GPU of a kind should compute in a second: samples through a block where the
        model is known."""
        site = self.site(kind, self.hardware[kind].link_bytes_per_s, 8)
        if not self.timed:
            return rate(site)
        n_rows = max(1, self.job.global_batch // max(1, self.n_workers))
        return n_rows / self.cache.block_s(site, Layout(), n_rows).busy

    def site(self, kind: int, links: float, per_node: int, *, world: int = 0) -> Site:
        """`links`: bytes a second between nodes; `world`: as for `site_of`."""
        gpu = self.hardware[kind]
        key = kind, links, per_node, world if gpu.crowded_passes else 0
        if key not in self._sites:
            linked = replace(gpu, link_bytes_per_s=links)
            self._sites[key] = site_of(self.job, linked, per_node, world=key[3])
        return self._sites[key]

    # -------------------------------------------------------------------------------------- sets

    def sets(self) -> Iterator[NodeSet]:
        """All nodes; those without the slowest workers; those with more memory than some layout did
        not fit; and where the hardware is known: some kinds of it without the others, each zone
        alone, and a half, a quarter ... of each of these."""
        whole = self.whole
        seen = {whole.key}
        yield whole
        found = [whole, *self._without_slow(whole)]
        found += self.larger
        if self.known:
            found += self._of_kinds()
            found += self._of_zones()
            for n in (2**k for k in range(1, SMALLEST_SHARE.bit_length())):
                found += [self._part(there, n) for there in tuple(found) if there.whole_nodes]
        for there in found:
            enough = there.nodes and there.most >= self.job.min_workers
            if enough and there.key not in seen:
                seen.add(there.key)
                yield there

    def _without_slow(self, whole: NodeSet) -> Iterator[NodeSet]:
        """As many workers as are clearly faster than the others."""
        if not whole.uneven:
            return
        kinds = rank_placement.speed_kinds((rate, 0) for rate in whole.place.rates.values())
        kind_of = {worker: kinds[speed, 0] for worker, speed in whole.place.rates.items()}
        numbers = Counter(kind_of.values())
        for least in sorted(numbers)[:-1][-MOST_DROPPED:][::-1]:
            n = sum(numbers[kind] for kind in numbers if kind <= least)
            fast = {worker.node_id for worker, kind in kind_of.items() if kind <= least}
            nodes = tuple(node for node in self.nodes if node.node_id in fast)
            if n <= self.n_workers:
                yield NodeSet(self, nodes, n)

    def _of_kinds(self) -> Iterator[NodeSet]:
        kinds = range(len(self.hardware))
        for n in range(len(kinds) - 1, 0, -1) if len(kinds) <= MOST_KINDS else (1,):
            for some in combinations(kinds, n):
                yield self._set(node for node in self.nodes if self.kind_of[node.node_id] in some)

    def _of_zones(self) -> Iterator[NodeSet]:
        for zone in dict.fromkeys(self.zones.values()):
            yield self._set(node for node in self.nodes if self.zones[node.node_id] == zone)

    def _part(self, there: NodeSet, n: int) -> NodeSet:
        """One in `n` of the nodes of each pool."""
        left = {pool: count // n for pool, count in Counter(x.pool for x in there.nodes).items()}
        found = []
        for node in there.nodes:
            if left[node.pool]:
                left[node.pool] -= 1
                found.append(node)
        return self._set(found)

    def _set(self, nodes: Iterator[Node] | Sequence[Node]) -> NodeSet:
        some = tuple(nodes)
        return NodeSet(self, some, min(self.n_workers, sum(node.gpus for node in some)))


@dataclass(eq=False)
class NodeSet:
    """Some of the nodes. `most`: workers of them that are used at most."""

    every: SearchedNodes
    nodes: tuple[Node, ...]
    most: int
    _in_zones: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def key(self) -> tuple[object, ...]:
        return (self.most, *(node.node_id for node in self.nodes))

    @cached_property
    def whole_nodes(self) -> bool:
        return self.most == sum(node.gpus for node in self.nodes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({node.gpus for node in self.nodes}))

    @property
    def per_node(self) -> int:
        return self.sizes[0] if self.sizes else 1

    @cached_property
    def kinds(self) -> Counter[int]:
        """Workers of each kind of hardware."""
        found: Counter[int] = Counter()
        for node in self.nodes:
            found[self.every.kind_of[node.node_id]] += node.gpus
        return found

    @cached_property
    def slowest(self) -> int:
        """Kind of hardware."""
        return min(self.kinds or [0], key=lambda kind: self.every.nominal[kind])

    def site(self, world: int = 0, kind: int | None = None) -> Site:
        """Of the slowest kind, with the slowest links there are."""
        kind = self.slowest if kind is None else kind
        return self.every.site(kind, self._links, self.per_node, world=world)

    @cached_property
    def _links(self) -> float:
        """Bytes a second of the slowest ones between nodes."""
        return min(self.every.hardware[kind].link_bytes_per_s for kind in self.kinds)

    @cached_property
    def zones(self) -> Mapping[str, str]:
        """As `rank_placement.named_zones`; {} = all may be in one place."""
        return rank_placement.named_zones(self.nodes, self.every.zones)

    # -------------------------------------------------------------------------------------- memory

    @cached_property
    def memory(self) -> dict[str, int]:
        """Node -> bytes of each of its GPUs, as far as they are known."""
        found = {node.node_id: self.every.memory(node) for node in self.nodes}
        return {name: n_bytes for name, n_bytes in found.items() if n_bytes}

    @cached_property
    def memory_bytes(self) -> int:
        """Of the smallest GPU; 0 = not known of all."""
        rooms = self.memory
        return min(rooms.values()) if rooms and len(rooms) == len(self.nodes) else 0

    @cached_property
    def mean_memory_bytes(self) -> int:
        return sum(self.memory.values()) // len(self.nodes) if self.memory_bytes else 0

    # -------------------------------------------------------------------------------------- speeds

    @cached_property
    def uneven(self) -> bool:
        """Are some GPUs clearly slower than others, or smaller?"""
        if self.every.measured is not None:
            return self.place.uneven
        pairs = {(self.every.kind_of[x.node_id], self.every.memory(x)) for x in self.nodes}
        speeds = {(self.every.nominal[kind], n_bytes) for kind, n_bytes in pairs}
        return len(set(rank_placement.speed_kinds(speeds).values())) > 1

    @cached_property
    def place(self) -> rank_placement.PlacementSite:
        names = chain.from_iterable(repeat(node.node_id, node.gpus) for node in self.nodes)
        places = chain.from_iterable(range(node.gpus) for node in self.nodes)
        workers = [*worker_ids(names, places)]
        speeds = map(self.every.speed, workers)
        if self.every.measured is None and len(self.kinds) == 1:
            speeds = map(self.every.nominal.__getitem__, repeat(self.slowest, len(workers)))
        rates = dict(zip(workers, speeds, strict=True))
        kinds = rank_placement.kinds_of(rates, self.memory)
        return rank_placement.PlacementSite(self.nodes, rates, kinds, self.zones)

    @cached_property
    def reference(self) -> float:
        """Speed of a worker of the slowest kind of hardware."""
        return self._middle(self.slowest) or 1.0

    @cached_property
    def slower(self) -> float:
        """How much slower the slowest kind of these nodes is than it should be beside the slowest
        of all nodes, as far as workers were measured."""
        if self.every.measured is None:
            return 1.0
        whole = self.every.whole
        nominal = self.every.nominal[self.slowest] / self.every.nominal[whole.slowest]
        return nominal * whole.reference / self.reference

    @property
    def unit(self) -> float:
        """Speed that costs are told in where the model is not known."""
        return self.every.whole.reference

    def _middle(self, kind: int) -> float:
        if self.every.measured is None:
            return self.every.nominal[kind]
        of = [node for node in self.nodes if self.every.kind_of[node.node_id] == kind]
        speeds = (self.every.speed(WorkerId(x.node_id, k)) for x in of for k in range(x.gpus))
        return median(list(speeds) or [0.0])

    @cached_property
    def assigner(self) -> HeteroAssigner:
        most, rows = self.every.job.max_workers or 0, self.every.job.microbatch_size or 0
        cache, site, usable = self.every.cache, self.site(), self.every.usable
        return HeteroAssigner(
            cache, site, self.place, self.reference, self.memory, usable, most, rows,
            self.slower, self.unit,
        )  # fmt: skip

    def least_s(self, n_workers: int | None = None) -> float:
        """Of a step the blocks' computation at best, perfectly shared out over so many workers."""
        cache, batch = self.every.cache, self.every.job.global_batch
        each = [
            (1 / cache.floor_s(self.site(kind=kind), Layout(), batch), n)
            for kind, n in self.kinds.items()
        ]
        left, total = n_workers or self.most, 0.0
        for speed, n in sorted(each, reverse=True):
            total += min(n, left) * speed
            left -= min(n, left)
        faster = min(1.0, self.slower)
        return faster * batch * self.every.work.n_blocks / total if total else inf

    def holds(self, layout: Layout) -> bool:
        """Are there groups of tp x cp workers inside of nodes for it, and replicas inside of
        zones?"""
        inner = layout.tp * layout.cp
        there, n_groups = self._groups(inner), layout.world_size // inner
        if not self.zones:
            return sum(there) >= n_groups
        size = n_groups // layout.dp_replicate
        return sum(n // size for n in there) >= layout.dp_replicate

    def _groups(self, inner: int) -> tuple[int, ...]:
        """Groups of so many workers inside of nodes, by zone."""
        if inner not in self._in_zones:
            there: Counter[str] = Counter()
            for (zone, gpus), n in self._classes.items():
                there[zone] += n * (gpus // inner)
            self._in_zones[inner] = tuple(there.values())
        return self._in_zones[inner]

    @cached_property
    def _classes(self) -> Counter[tuple[str, int]]:
        return Counter((self.zones.get(node.node_id, ""), node.gpus) for node in self.nodes)
