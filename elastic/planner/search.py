"""Which layout on which workers: enumerate, drop what does not fit (with the reason), take the best.

As many workers as possible. Among layouts of that size those that cut the model and its sequences least come first (tp x pp x
cp; plain data-parallel sharding cuts nothing): memory, or a batch smaller than the number of workers, must ask for more. Among
those, a layout that is simpler than the fastest and at most SLOWER slower is taken. A tp x cp group never leaves its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner import balance, memory, nominal
from elastic.planner.compute import Chip
from elastic.planner.cost import Site, bubble, step_cost
from elastic.planner.kernels import MEASURED, generation
from elastic.planner.memory import Step
from elastic.planner.options import Space, cut, n_options
from elastic.planner.steps import step_of
from elastic.planner.work import Work
from elastic.types import AUTO, HardwareProfile, Layout, ModelProfile, Node, WorkerId, is_auto, parse_layout

SHOWN = 6  # rejections that an error message names
SLOWER = 0.05  # that a simpler layout may be
RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1 / 3}  # of the step, where the model is not known
USABLE = 0.92  # of a GPU's memory: the rest is CUDA's, NCCL's, and lies between allocations


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
    hardware_known: bool = False  # else `model_step_s` is of the nominal hardware, and only good for comparing layouts
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What layouts must fit into: bytes per worker (0 = not known) and layouts that were found not to (with the bytes).
    `hardware`: of nodes by their id, as far as it is known; where it is not of all of them, layouts are compared as on H100
    nodes. `rates`: how fast each worker computes, in any one unit; where they are not there for all,
    the hardware says. `zones`: node -> its zone, where only replicas may lie in different ones."""

    memory_bytes: int = 0
    infeasible: Mapping[Layout, int] | None = None
    hardware: Mapping[str, HardwareProfile] | None = None
    rates: Mapping[WorkerId, float] | None = None
    zones: Mapping[str, str] | None = None


def plan_layout(model: ModelProfile, job: Mapping[str, Any], nodes: Sequence[Node], limits: Limits | None = None) -> Choice:
    """The best layout on these nodes, which are used in the given order. Raises InfeasiblePlan with the reason of each
    rejection."""
    limits = limits or Limits()
    n_workers = sum(node.gpus for node in nodes)
    if job.get("max_workers"):
        n_workers = min(n_workers, int(job["max_workers"]))
    minimum = int(job.get("min_workers") or 1)
    if n_workers < minimum:
        raise InfeasiblePlan(f"{n_workers} of the at least {minimum} workers (min_workers) are there")
    search = _Search(model, job, nodes, limits)
    named = layout_for(job, n_workers)
    if named is not None:
        choice = search.named(named)
        if choice is not None:
            return choice
        if not isinstance(job.get("layout"), Mapping):
            raise InfeasiblePlan(_why(n_workers, search.rejected))
    best = search.best(n_workers)
    if best is None:
        raise InfeasiblePlan(_why(n_workers, search.rejected))
    if best.layout.world_size < minimum:
        raise InfeasiblePlan(
            f"only {best.layout.world_size} workers can be used, min_workers is {minimum}; {_why(n_workers, search.rejected)}"
        )
    return best


@dataclass
class _Search:
    """One search; `rejected` says why of each layout that was dropped."""

    model: ModelProfile
    job: Mapping[str, Any]
    nodes: Sequence[Node]
    limits: Limits
    rejected: list[str] = field(default_factory=list)
    placed: dict[tuple[int, int], tuple[WorkerId, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = Work.of(self.model)
        self.per_node = min((node.gpus for node in self.nodes), default=1)
        known = self.limits.hardware or {}
        self.known = bool(self.nodes) and all(node.node_id in known for node in self.nodes)
        kinds = [known[node.node_id] if self.known else nominal.NOMINAL for node in self.nodes]
        sites = {kind: site_of(self.job, kind, self.per_node) for kind in dict.fromkeys(kinds or [nominal.NOMINAL])}
        self.site = min(sites.values(), key=rate)
        by_kind = {node.node_id: rate(sites[kind]) for node, kind in zip(self.nodes, kinds)}
        workers = [WorkerId(node.node_id, k) for node in self.nodes for k in range(node.gpus)]
        measured = self.limits.rates or {}
        all_known = all(worker in measured for worker in workers)
        self.rates = {worker: measured[worker] if all_known else by_kind[worker.node_id] for worker in workers}

    def named(self, layout: Layout) -> Choice | None:
        """The layout that the job names. It is refused only where its state alone is too large, or where it was tried."""
        try:
            self.place(layout)
            step = self.step(layout)
            self.check_size(layout, step, exact=True)
            return self.choice(layout, step)
        except InfeasiblePlan as error:
            self.rejected.append(f"{layout}: {error}")
            return None

    def best(self, n_workers: int) -> Choice | None:
        """The simplest of those that are about as fast as the fastest, among those that cut least."""
        tight = bool(self.limits.memory_bytes or self.limits.infeasible)
        space = Space.of(self.model, self.job, self.nodes, bool(self.limits.memory_bytes), tight)
        for world in range(n_workers, 0, -1):
            if self.too_few(world):
                return None  # fewer have less room still
            for _, shapes in groupby(space.shapes(world), cut):
                found = [one for shape in shapes for one in self.fitting(space, shape)]
                if found:
                    times = {layout: sum(self.parts(layout, step).values()) for layout, step in found}
                    near = [layout for layout in times if times[layout] <= min(times.values()) * (1 + SLOWER)]
                    best = min(near, key=lambda layout: (n_options(layout), times[layout]))
                    return self.choice(best, dict(found)[best])
        return None

    def too_few(self, world: int) -> bool:
        """Would the state alone, cut into equal parts for all of them, be too large for these workers?"""
        there = self.limits.memory_bytes
        least = 0 if self.job.get("offload") else int(self.work.state_bytes) // world
        if there and least > there:
            self.rejected.append(f"on {world} the state alone needs {_gib(least)} GiB per worker, there are {_gib(there)}")
        return bool(there) and least > there

    def fitting(self, space: Space, shape: Layout) -> Iterator[tuple[Layout, Step]]:
        """What fits of the layouts of a shape: more is computed twice, or less at once, only where it must be."""
        modes = space.modes()
        for kind in space.kinds(shape):
            sizes = space.sizes(kind)
            if self.fits(replace(kind, activation_checkpointing=modes[-1], microbatch_size=sizes[-1])) is None:
                if kind == shape and "schedule" not in space.pins:
                    return  # the other kinds ask for more
                continue
            for mode in modes:
                layouts = [replace(kind, activation_checkpointing=mode, microbatch_size=size) for size in sizes]
                found = next(((layout, step) for layout in layouts if (step := self.fits(layout))), None)
                if found is not None:
                    yield found
                if found is not None and found[0] == layouts[0]:
                    break

    def fits(self, layout: Layout) -> Step | None:
        try:
            step = self.step(layout)
            if step.n_microbatches < layout.pp:
                raise InfeasiblePlan(f"{step.n_microbatches} microbatches cannot fill {layout.pp} pipeline stages")
            self.check_size(layout, step, exact=False)
            self.place(layout)
        except InfeasiblePlan as error:
            self.rejected.append(f"{layout}: {error}")
            return None
        return step

    def parts(self, layout: Layout, step: Step) -> dict[str, float]:
        """Of a step's time, in multiples of a perfect split of the model's FLOPs over the same ranks."""
        sample = self.model.sample
        uneven = step.largest_share * layout.dp / max(1, step.global_batch)
        if sample is None or not sample.flop:
            busy = uneven * (1 + RECOMPUTED[layout.activation_checkpointing])
            idle = busy * bubble(layout, step.n_microbatches)
            return {"busy": busy, "bubble": idle, "guessed": (busy + idle) * (_guessed(layout) - 1)}
        found = step_cost(self.site, self.work, layout, step)
        perfect_s = found.flop / layout.world_size / self.site.chip.gpu.peak(self.site.chip.dtype)
        return {name: seconds / perfect_s for name, seconds in found.parts.items()}

    def step_s(self, layout: Layout, step: Step) -> float:
        """On the hardware that is known, else on the nominal one; 0 where the model is not known."""
        known = self.model.sample is not None and self.model.sample.flop
        return step_cost(self.site, self.work, layout, step).step_s if known else 0.0

    def choice(self, layout: Layout, step: Step) -> Choice:
        ranks, m = self.place(layout), step.n_microbatches
        samples = balance.shares(step.global_batch // m, _dp_speeds(layout, ranks, self.rates), m)
        layers = balance.stage_layers(self.model.n_blocks, layout.n_stages)
        parts = self.parts(layout, replace(step, largest_share=max(samples)))
        return Choice(
            layout, ranks, samples, layers, m,
            memory_bytes=memory.memory_bytes(self.work, layout, step.dtype),
            activation_bytes=memory.activation_bytes(self.work, layout, step),
            relative_time=sum(parts.values()),
            parts=parts,
            model_step_s=self.step_s(layout, replace(step, largest_share=max(samples))),
            hardware_known=self.known,
            rejected=tuple(self.rejected),
        )  # fmt: skip

    def place(self, layout: Layout) -> tuple[WorkerId, ...]:
        key = layout.tp * layout.cp, layout.world_size
        if key not in self.placed:
            self.placed[key] = place(layout, self.nodes, int(self.job.get("max_workers") or 0))
        return self.placed[key]

    def step(self, layout: Layout) -> Step:
        return step_of(self.model, self.job, layout, self.per_node)

    def needs(self, layout: Layout, step: Step) -> int:
        """Bytes of a worker."""
        return memory.memory_bytes(self.work, layout, step.dtype) + memory.activation_bytes(self.work, layout, step)

    def check_size(self, layout: Layout, step: Step, exact: bool) -> None:
        """Raises InfeasiblePlan where it needs more memory than there is, or as much as what was found not to fit. `exact`:
        only what is certain counts."""
        infeasible = self.limits.infeasible or {}
        needs, there = self.needs(layout, step), self.limits.memory_bytes
        if layout in infeasible:
            raise InfeasiblePlan(f"did not fit ({_gib(infeasible[layout])} GiB measured)")
        if exact:
            needs = memory.memory_bytes(self.work, layout, step.dtype)
        elif self.model.sample is not None:
            there = int(USABLE * there)
        if there and needs > there:
            raise InfeasiblePlan(f"needs {_gib(needs)} GiB per worker, there are {_gib(there)}")
        bigger = [] if exact else [tried for tried in infeasible if self.needs(tried, self.step(tried)) <= needs]
        if bigger:
            raise InfeasiblePlan(f"needs at least as much memory as {bigger[0]}, which did not fit")


def layout_for(job: Mapping[str, Any], n_workers: int) -> Layout | None:
    """The layout that the job names for this many workers; None = free choice."""
    wanted = job.get("layout", AUTO)
    if isinstance(wanted, Mapping):
        fitting = [key for key in wanted if int(key) <= n_workers]
        return parse_layout(wanted[max(fitting, key=int)], job) if fitting else None
    return None if is_auto(wanted) else parse_layout(str(wanted), job)


def most_workers(job: Mapping[str, Any]) -> int | None:
    """More workers than this are of no use to the job; None = no such limit is known."""
    bounds = [int(job["max_workers"])] if job.get("max_workers") else []
    wanted = job.get("layout", AUTO)
    if isinstance(wanted, Mapping) and wanted:
        bounds.append(max(int(key) for key in wanted))
    elif not is_auto(wanted) and not isinstance(wanted, Mapping):
        bounds.append(parse_layout(str(wanted)).world_size)
    return min(bounds, default=None)


def place(layout: Layout, nodes: Sequence[Node], max_workers: int = 0) -> tuple[WorkerId, ...]:
    """Workers in rank order, node by node; each tp x cp group inside one node. Raises InfeasiblePlan with the numbers."""
    group = layout.tp * layout.cp
    ranks: list[WorkerId] = []
    for node in nodes:
        ranks += [WorkerId(node.node_id, k) for k in range(node.gpus // group * group)]
    n_workers = sum(node.gpus for node in nodes)
    if max_workers and layout.world_size > max_workers:
        raise InfeasiblePlan(f"needs {layout.world_size} workers, max_workers is {max_workers}")
    if len(ranks) < layout.world_size:
        inside = f", {len(ranks)} of them in groups of {group} inside a node" if group > 1 else ""
        raise InfeasiblePlan(f"needs {layout.world_size} workers, there are {n_workers} on {len(nodes)} nodes{inside}")
    return tuple(ranks[: layout.world_size])


def _dp_speeds(layout: Layout, ranks: Sequence[WorkerId], rates: Mapping[WorkerId, float]) -> list[float]:
    """Speed of each data-parallel rank: that of its slowest worker."""
    inner, stage = layout.cp * layout.tp, layout.world_size // layout.pp
    return [
        min(rates[ranks[p * stage + d * inner + k]] for p in range(layout.pp) for k in range(inner)) for d in range(layout.dp)
    ]


def rate(site: Site) -> float:
    """FLOP/s that products reach there."""
    gpu = site.chip.gpu
    return gpu.peak(site.chip.dtype) * (gpu.reached or 1.0) * site.kernels.matmul


def site_of(job: Mapping[str, Any], gpu: HardwareProfile, per_node: int, world: int = 0) -> Site:
    """What the job's layouts run on: `elastic`'s own worker, in the job's precision. `world`: workers of the layout, all of
    which compute on this machine's cores where the profile says what that costs."""
    dtype = "float8" if job.get("float8") else str(job.get("precision") or "float32")
    gpu = nominal.among(gpu, max(per_node, world))
    if gpu.crowded_passes:
        return Site(Chip(gpu, MEASURED, dtype), max(per_node, world))
    return Site(Chip(gpu, generation("fsdp2", gpu.arch, bool(job.get("compile"))), dtype), per_node)


def _guessed(layout: Layout) -> float:
    """Of collectives, where the model is not known: 15 % for each doubling of tp, 2 % for each of the data-parallel ranks."""
    tp_doublings, dp_doublings = (layout.tp * layout.cp).bit_length() - 1, layout.dp.bit_length() - 1
    return (1 + 0.15 * tp_doublings) * (1 + 0.02 * dp_doublings)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}"


def _why(n_workers: int, rejected: Sequence[str]) -> str:
    shown = list(dict.fromkeys(rejected))
    more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"no layout fits {n_workers} workers: " + ("; ".join(shown[:SHOWN]) or "there are none") + more
