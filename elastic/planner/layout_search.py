"""The layout of a running job: enumerate, drop what does not fit (with the reason), take the best.
The policy asks it.

As many workers as possible. Among layouts of that size those that cut the model and its sequences
least come first (tp x pp x cp; plain data-parallel sharding cuts nothing): memory, or a batch
smaller than the number of workers, must ask for more. Among those, a layout that is simpler than
the fastest and at most SLOWER slower is taken. A tp x cp group never leaves its node, nor a replica
its zone. Fewer workers are taken where that is clearly faster: without the slow ones, where these
compute hardly more than nothing, or where all of them together would need to cut more. Which worker
is which rank: rank_placement.py; unequal batch shares and stages: hetero_split.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from math import inf
from statistics import median
from typing import NamedTuple

from elastic.errors import InfeasiblePlan
from elastic.planner.cost import default_hardware, memory
from elastic.planner.cost.compute import ComputeTarget
from elastic.planner.cost.kernels import MEASURED, generation
from elastic.planner.cost.memory import USABLE, Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Site, bubble, step_cost
from elastic.planner.hetero import hetero_shares, rank_placement
from elastic.planner.hetero.hetero_assign import (
    RECOMPUTED,
    HeteroAssigner,
    HeteroAssignment,
    guessed,
)
from elastic.planner.layout_space import Space, cut, n_options
from elastic.planner.step_split import step_of
from elastic.types import (
    HardwareProfile,
    Job,
    Layout,
    ModelProfile,
    Node,
    WorkerId,
    is_auto,
    parse_layout,
)

SHOWN = 6  # rejections that an error message names
SLOWER = 0.05  # that a simpler layout may be
# of a step, that heterogeneous GPUs may wait for each other before layouts that cut more are looked
# at
IDLE = 0.1
MOST_CUTS, MOST_REPLICAS, MOST_DROPPED, MOST_FEWER = 4, 4, 6, 8  # how many of each are looked at
MOST_DEALT = 24  # layouts of a size whose shares among heterogeneous GPUs are worked out


@dataclass(frozen=True)
class Choice:
    """The parts of a Plan that the planner decides, with what it expects and what it rejected."""

    layout: Layout
    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    n_microbatches: int
    memory_bytes: int
    relative_time: float  # of a step, in multiples of a perfect split of the model's FLOPs
    activation_bytes: int = 0  # beside `memory_bytes`, while a step is computed; 0 = not known
    parts: Mapping[str, float] = field(default_factory=dict)  # of relative_time
    model_step_s: float = 0.0  # of a step, by the cost model; 0 = the model is not known
    # else `model_step_s` is of the nominal hardware, and only good for comparing layouts
    hardware_known: bool = False
    rejected: tuple[str, ...] = ()


class CostedLayout(NamedTuple):
    """A layout that fits."""

    layout: Layout
    step: Step
    assigned: HeteroAssignment
    least_cut: int = 1  # of the layouts of as many workers that fit


@dataclass(frozen=True)
class LayoutLimits:
    """What layouts must fit into: bytes per worker (the smallest node's, 0 = not known) and layouts
    that were found not to (with the bytes). `on_gpus`: CUDA and NCCL take their part of these
    bytes. `memory`: node -> bytes per worker, where nodes differ. `hardware`: of nodes by their id,
    as far as it is known; where it is not of all of them, layouts are compared as on H100 nodes.
    `rates`: how fast each worker computes, in any one unit; where they are not there for all, the
    hardware says. `zones`: node -> its zone, where only replicas may lie in different ones.
    `unusable`: layouts, in words, that do not compute what the model does, and why."""

    memory_bytes: int = 0
    infeasible: Mapping[Layout, int] | None = None
    hardware: Mapping[str, HardwareProfile] | None = None
    rates: Mapping[WorkerId, float] | None = None
    zones: Mapping[str, str] | None = None
    memory: Mapping[str, int] | None = None
    unusable: Mapping[str, str] | None = None
    on_gpus: bool = False


def plan_layout(
    model: ModelProfile, job: Job, nodes: Sequence[Node], *, limits: LayoutLimits | None = None
) -> Choice:
    """The best layout on these nodes, which are used in the given order. Raises InfeasiblePlan with
    the reason of each rejection."""
    limits = limits or LayoutLimits()
    n_workers = sum(node.gpus for node in nodes)
    n_workers = min(n_workers, job.max_workers or n_workers)
    if n_workers < job.min_workers:
        raise InfeasiblePlan(f"{n_workers} of {job.min_workers} required (min_workers)")
    search = _Search(model, job, nodes, limits)
    named = layout_for(job, n_workers)
    if named is not None:
        choice = search.named(named)
        if choice is not None:
            return choice
        if not isinstance(job.layout, Mapping):
            raise InfeasiblePlan(_why(n_workers, search.rejected))
    best = search.best(n_workers)
    if best is None:
        raise InfeasiblePlan(_why(n_workers, search.rejected))
    if best.layout.world_size < job.min_workers:
        least = (
            f"only {best.layout.world_size} workers can be used, min_workers is {job.min_workers}"
        )
        raise InfeasiblePlan(f"{least}; {_why(n_workers, search.rejected)}")
    return best


@dataclass
class _Search:
    """One search; `rejected` says why of each layout that was dropped."""

    model: ModelProfile
    job: Job
    nodes: Sequence[Node]
    limits: LayoutLimits
    rejected: list[str] = field(default_factory=list)
    assigned: dict[tuple[Layout, int], HeteroAssignment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = ModelCost.of(self.model)
        self.per_node = min((node.gpus for node in self.nodes), default=1)
        known = self.limits.hardware or {}
        self.known = bool(self.nodes) and all(node.node_id in known for node in self.nodes)
        kinds = [
            known[node.node_id] if self.known else default_hardware.NOMINAL for node in self.nodes
        ]
        sites = {
            kind: site_of(self.job, kind, self.per_node)
            for kind in dict.fromkeys(kinds or [default_hardware.NOMINAL])
        }
        self.site = min(sites.values(), key=rate)
        by_kind = {node.node_id: rate(sites[kind]) for node, kind in zip(self.nodes, kinds)}
        workers = [WorkerId(node.node_id, k) for node in self.nodes for k in range(node.gpus)]
        measured = self.limits.rates or {}
        all_known = all(worker in measured for worker in workers)
        rates = {
            worker: measured[worker] if all_known else by_kind[worker.node_id] for worker in workers
        }
        slowest = [
            rates[worker] for worker in workers if by_kind[worker.node_id] == rate(self.site)
        ]
        zones = (
            {}
            if self.job.across_zones
            else rank_placement.named_zones(self.nodes, self.limits.zones)
        )
        self.place = rank_placement.PlacementSite(
            self.nodes, rates, rank_placement.kinds_of(rates, self.memory()), zones
        )
        usable = USABLE if self.model.sample is not None else 1.0
        room = {name: int(usable * n_bytes) for name, n_bytes in self.memory().items()}
        most, rows = self.job.max_workers or 0, self.job.microbatch_size or 0
        self.assigner = HeteroAssigner(
            self.work, self.site, self.place, median(slowest) if slowest else 1.0, room, most, rows
        )
        tight = bool(self.limits.memory_bytes or self.limits.infeasible)
        self.space = Space.of(
            self.model, self.job, self.nodes, roomy=bool(self.limits.memory_bytes), tight=tight
        )

    def memory(self) -> dict[str, int]:
        """Node -> bytes per worker, as far as they are known."""
        of_node = self.limits.memory or {}
        found = {
            node.node_id: of_node.get(node.node_id) or self.limits.memory_bytes
            for node in self.nodes
        }
        return {name: n_bytes for name, n_bytes in found.items() if n_bytes}

    def named(self, layout: Layout) -> Choice | None:
        """The layout that the job names. It is refused only where its state alone is too large, or
        where it was tried."""
        try:
            next(self.place.arrangements(layout, self.assigner.max_workers))
            step = self.step(layout)
            self.check_size(layout, step, exact=True)
            return self.choice(layout, step, self.assign(layout, step, exact=True))
        except InfeasiblePlan as error:
            self.rejected.append(f"{layout}: {error}")
            return None

    def best(self, n_workers: int) -> Choice | None:
        """Of as many workers as can be used; of fewer where a step would be clearly shorter."""
        if self.place.zones:
            names = " and ".join(sorted({zone or "unnamed" for zone in self.place.zones.values()}))
            self.rejected.append(
                f"{Layout(dp_shard=n_workers)}: its shards would lie in {names}; only replicas "
                "may, unless across_zones is true"
            )
        found: CostedLayout | None = None
        for world in range(n_workers, 0, -1):
            if self.too_few(world):
                return None  # fewer have less room still
            found = self.of_size(world)
            if found:
                break
        if found is None or found.layout.world_size < n_workers:
            self.rejected[:0] = [f"no {axis}: {why}" for axis, why in self.model.closed.items()]
        if found is None:
            return None
        first = found
        for world, most_cut in self.fewer(first):
            other = self.of_size(world, most_cut)
            if other is None or other.assigned.pace * (1 + SLOWER) >= found.assigned.pace:
                continue
            if (
                most_cut
                or self.place.zones
                or other.assigned.busy_s <= found.assigned.busy_s * (1 + SLOWER)
            ):
                found = other
        choice = self.choice(found.layout, found.step, found.assigned)
        if found is first:
            return choice
        times, left = (
            first.assigned.pace / found.assigned.pace,
            first.layout.world_size - found.layout.world_size,
        )
        why = (
            f"{first.layout}: with {left} worker{'s' * (left > 1)} more a step would take "
            f"{times:.2f} times as long"
        )
        return replace(choice, rejected=(why, *choice.rejected))

    def of_size(self, world: int, most_cut: int = 0) -> CostedLayout | None:
        """The simplest of those that are about as fast as the fastest, among those that cut least;
        where GPUs are unequal and wait for each other also among those that cut more. `most_cut`:
        only those that cut less."""
        best: CostedLayout | None = None
        for space in self.spaces(world):
            n_looked_at = 0
            for n_cut, shapes in groupby(space.shapes(world), cut):
                if most_cut and n_cut >= most_cut:
                    break
                found = [one for shape in shapes for one in self.fitting(space, shape)]
                if not found:
                    continue
                below = best.assigned.pace / (1 + SLOWER) if best else inf
                one, n_looked_at = self.simplest(found, below), n_looked_at + 1
                if one is not None and one.assigned.pace < below:
                    best = one._replace(least_cut=best.least_cut if best else n_cut)
                if (
                    not self.place.uneven
                    or (one and one.assigned.idle < IDLE)
                    or n_looked_at == MOST_CUTS
                ):
                    break
        return best

    def simplest(self, found: Sequence[tuple[Layout, Step]], below: float) -> CostedLayout | None:
        """Of those whose pace may be below that."""
        steps, paces, least = dict(found), dict[Layout, float](), inf
        floors = (
            {layout: self.assigner.floor(layout, step) for layout, step in found}
            if self.place.uneven
            else {}
        )
        for layout in sorted(steps, key=lambda layout: floors.get(layout, 0.0)):
            if floors and len(paces) == MOST_DEALT:
                break  # those that are left are likely slower
            if floors.get(layout, 0.0) < min(below, least * (1 + SLOWER)):
                paces[layout] = self.assign(layout, steps[layout]).pace
                least = min(least, paces[layout])
        if not paces:
            return None
        near = [layout for layout in paces if paces[layout] <= min(paces.values()) * (1 + SLOWER)]
        best = min(near, key=lambda layout: (n_options(layout), paces[layout]))
        return CostedLayout(best, steps[best], self.assign(best, steps[best]))

    def spaces(self, world: int) -> Iterator[Space]:
        """Where replicas must lie within a zone each, one for each number of them that goes, the
        fewest first."""
        if not self.place.zones:
            yield self.space
            return
        there = Counter(
            self.place.zones[node.node_id] for node in self.nodes for _ in range(node.gpus)
        )
        wanted = int(self.space.pins.get("dp_replicate", 0))
        fitting = (
            n
            for n in hetero_shares.divisors(world)
            if sum(gpus // (world // n) for gpus in there.values()) >= n
        )
        for n in islice((n for n in fitting if not wanted or n == wanted), MOST_REPLICAS):
            yield replace(self.space, pins={**self.space.pins, "dp_replicate": n})

    def fewer(self, found: CostedLayout) -> Iterator[tuple[int, int]]:
        """Numbers of workers that may be faster, and how little they must cut to be: without the
        slow ones, and where fewer need not be cut so far."""
        world, least = found.layout.world_size, self.job.min_workers
        kinds = sorted(rank_placement.kinds_of(self.place.rates).values())
        steps = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
        rates = sorted(self.place.rates.values(), reverse=True)
        work = (
            self.job.global_batch
            * self.work.n_blocks
            / (1 + SLOWER)
            / max(1e-300, found.assigned.busy_s)
        )
        enough = [n for n in steps if least <= n < world and sum(rates[:n]) >= work]
        yield from ((n, 0) for n in enough[-MOST_DROPPED:][::-1])
        n_cut = 0 if self.place.zones else found.least_cut
        if n_cut != 1:
            less = self.per_node if world > 4 * MOST_FEWER else 1
            lowest = max(least, -(-3 * world // 4), world - MOST_FEWER * less)
            yield from ((n, n_cut) for n in range(world - less, lowest - 1, -less))

    def too_few(self, world: int) -> bool:
        """Would the state alone, cut into equal parts for all of them, be too large for these
        workers?"""
        rooms = self.memory().values()
        there = (
            sum(rooms) // len(rooms)
            if len(rooms) == len(self.nodes) and rooms
            else self.limits.memory_bytes
        )
        least = 0 if self.job.offload else int(self.work.state_bytes) // world
        if there and least > there:
            self.rejected.append(
                f"on {world} the state alone needs {_gib(least)} GiB per worker, there are "
                f"{_gib(there)}"
            )
        return bool(there) and least > there

    def fitting(self, space: Space, shape: Layout) -> Iterator[tuple[Layout, Step]]:
        """What fits of the layouts of a shape: more is computed twice, or less at once, only where
        it must be."""
        modes = space.modes()
        for kind in space.kinds(shape):
            sizes = space.sizes(kind)
            if (
                self.fits(
                    replace(kind, activation_checkpointing=modes[-1], microbatch_size=sizes[-1])
                )
                is None
            ):
                if kind == shape and "schedule" not in space.pins:
                    return  # the other kinds ask for more
                continue
            for mode in modes:
                layouts = [
                    replace(kind, activation_checkpointing=mode, microbatch_size=size)
                    for size in sizes
                ]
                found = next(
                    ((layout, step) for layout in layouts if (step := self.fits(layout))), None
                )
                if found is not None:
                    yield found
                if found is not None and found[0] == layouts[0]:
                    break

    def fits(self, layout: Layout) -> Step | None:
        try:
            step = self.step(layout)
            if step.n_microbatches < layout.pp:
                raise InfeasiblePlan(
                    f"{step.n_microbatches} microbatches cannot fill {layout.pp} pipeline stages"
                )
            self.check_size(layout, step, exact=False)
            next(self.place.arrangements(layout, self.assigner.max_workers))
        except InfeasiblePlan as error:
            self.rejected.append(f"{layout}: {error}")
            return None
        return step

    def assign(self, layout: Layout, step: Step, exact: bool = False) -> HeteroAssignment:
        key = layout, step.n_microbatches
        if key not in self.assigned:
            self.assigned[key] = (
                self.assigner.assign(layout, step, exact)
                if self.place.uneven
                else self.alike(layout, step)
            )
        return self.assigned[key]

    def alike(self, layout: Layout, step: Step) -> HeteroAssignment:
        """On GPUs that are about equal: even stages, nodes in their order."""
        slots, m = (
            next(self.place.arrangements(layout, self.assigner.max_workers)),
            step.n_microbatches,
        )
        ranks = tuple(worker for slot in slots for worker in slot.workers)
        speeds = [min(slot.rate for slot in slots[d :: layout.dp]) for d in range(layout.dp)]
        samples = hetero_shares.shares(step.global_batch // m, speeds, m)
        layers = hetero_shares.stage_layers(self.model.n_blocks, layout.n_stages)
        parts = self.parts(layout, replace(step, largest_share=max(samples)))
        pace = sum(self.parts(layout, step).values()) / len(ranks) / self.assigner.reference
        step_s = self.step_s(layout, replace(step, largest_share=max(samples)))
        rates = [self.place.rates[worker] for worker in ranks]
        return HeteroAssignment(
            ranks,
            samples,
            layers,
            parts,
            pace,
            step_s,
            hetero_shares.busy_s(layout, samples, layers, n_microbatches=m, rates=rates),
        )

    def parts(self, layout: Layout, step: Step) -> dict[str, float]:
        """Of a step's time on equal GPUs, in multiples of a perfect split of the model's FLOPs over
        the same ranks."""
        sample = self.model.sample
        uneven = step.largest_share * layout.dp / max(1, step.global_batch)
        if sample is None or not sample.flop:
            busy = uneven * (1 + RECOMPUTED[layout.activation_checkpointing])
            idle = busy * bubble(layout, step.n_microbatches)
            return {"busy": busy, "bubble": idle, "guessed": (busy + idle) * (guessed(layout) - 1)}
        found = step_cost(self.site, self.work, layout, step=step)
        perfect_s = found.flop / layout.world_size / self.site.chip.gpu.peak(self.site.chip.dtype)
        return {name: seconds / perfect_s for name, seconds in found.parts.items()}

    def step_s(self, layout: Layout, step: Step) -> float:
        """On the hardware that is known, else on the nominal one; 0 where the model is not
        known."""
        known = self.model.sample is not None and self.model.sample.flop
        return step_cost(self.site, self.work, layout, step=step).step_s if known else 0.0

    def choice(self, layout: Layout, step: Step, assigned: HeteroAssignment) -> Choice:
        most = replace(step, largest_share=max(assigned.samples))
        deepest = max(sum(assigned.layers[p :: layout.pp]) for p in range(layout.pp))
        state = memory.memory_bytes(self.work, layout, step.dtype)
        active = memory.activation_bytes(self.work, layout, most if self.place.uneven else step)
        if deepest > -(-self.work.n_blocks // layout.pp):
            active = memory.stage_bytes(self.work, layout, most, n_blocks=deepest) - state
        return Choice(
            layout, assigned.ranks, assigned.samples, assigned.layers, step.n_microbatches,
            memory_bytes=state,
            activation_bytes=active,
            relative_time=sum(assigned.parts.values()),
            parts=assigned.parts,
            model_step_s=assigned.step_s,
            hardware_known=self.known,
            rejected=tuple(self.rejected),
        )  # fmt: skip

    def step(self, layout: Layout) -> Step:
        return step_of(self.model, self.job, layout, per_node=self.per_node)

    def needs(self, layout: Layout, step: Step) -> int:
        """Bytes of a worker."""
        return memory.memory_bytes(self.work, layout, step.dtype) + memory.activation_bytes(
            self.work, layout, step
        )

    def check_size(self, layout: Layout, step: Step, exact: bool) -> None:
        """Raises InfeasiblePlan where it needs more memory than there is, or as much as what was
        found not to fit. `exact`: only what is certain counts."""
        infeasible = self.limits.infeasible or {}
        needs, there = self.needs(layout, step), self.limits.memory_bytes
        if why := (self.limits.unusable or {}).get(str(layout)):
            raise InfeasiblePlan(why)
        if layout in infeasible:
            raise InfeasiblePlan(f"did not fit ({_gib(infeasible[layout])} GiB measured)")
        if exact:
            needs = memory.memory_bytes(self.work, layout, step.dtype)
        elif self.model.sample is not None:
            there = int(memory.usable_bytes(there, layout, self.limits.on_gpus))
        if self.limits.memory_bytes and needs > there:
            if not self.deepens(layout):
                raise InfeasiblePlan(f"needs {_gib(needs)} GiB per worker, there are {_gib(there)}")
            self.assign(layout, step)
        bigger = (
            []
            if exact
            else [tried for tried in infeasible if self.needs(tried, self.step(tried)) <= needs]
        )
        if bigger:
            raise InfeasiblePlan(f"needs at least as much memory as {bigger[0]}, which did not fit")

    def deepens(self, layout: Layout) -> bool:
        """May stages of unequal depth fit where even ones do not?"""
        return layout.pp > 1 and len(set(self.memory().values())) > 1


def layout_for(job: Job, n_workers: int) -> Layout | None:
    """The layout that the job names for this many workers; None = free choice."""
    wanted = job.layout
    if isinstance(wanted, Mapping):
        fitting = [key for key in wanted if int(key) <= n_workers]
        return job.layout_of(wanted[max(fitting, key=int)]) if fitting else None
    return None if is_auto(wanted) else job.layout_of(wanted)


def most_workers(job: Job) -> int | None:
    """More workers than this are of no use to the job; None = no such limit is known."""
    bounds = [job.max_workers] if job.max_workers else []
    wanted = job.layout
    if isinstance(wanted, Mapping) and wanted:
        bounds.append(max(int(key) for key in wanted))
    elif not is_auto(wanted) and not isinstance(wanted, Mapping):
        bounds.append(parse_layout(wanted).world_size)
    return min(bounds, default=None)


def rate(site: Site) -> float:
    """FLOP/s that products reach there."""
    gpu = site.chip.gpu
    return gpu.peak(site.chip.dtype) * (gpu.reached or 1.0) * site.kernels.matmul


def site_of(job: Job, gpu: HardwareProfile, per_node: int, *, world: int = 0) -> Site:
    """What the job's layouts run on: `elastic`'s own worker, in the job's precision. `world`:
    workers of the layout, all of which compute on this machine's cores where the profile says what
    that costs."""
    dtype = "float8" if job.float8 else job.precision
    gpu = default_hardware.among(gpu, max(per_node, world))
    if gpu.crowded_passes:
        return Site(ComputeTarget(gpu, MEASURED, dtype), max(per_node, world))
    return Site(ComputeTarget(gpu, generation("fsdp2", gpu.arch, job.compile), dtype), per_node)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}"


def _why(n_workers: int, rejected: Sequence[str]) -> str:
    shown = list(dict.fromkeys(rejected))
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return (
        f"no layout fits {n_workers} workers: "
        + ("; ".join(shown[:SHOWN]) or "there are none")
        + more
    )
