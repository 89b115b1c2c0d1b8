"""The one search: layouts on given nodes, ranked. `elastic plan` shows the first ones, a run enters
the first.

Ranked by the predicted seconds of a step. A layout counts as PER_OPTION slower for each axis and
option that it has more (predictions are no better), and as IDLE slower where it leaves workers idle
that others could use: the first is the simplest of those that are about as fast as the fastest.
Where hardware or model are not known, a predicted second says little: of as many workers those come
first that cut the model and its sequences least (tp x pp x cp), and each option counts
PER_GUESSED_OPTION.

A tp x cp group never leaves its node, nor a replica its zone. On GPUs that are about equal a layout
is costed as it is; on heterogeneous ones shares and stages are assigned to it first
(hetero_assign.py). What cannot be among the best, by its computation alone, is left out early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import groupby, islice
from typing import Any, Protocol

from elastic.errors import InfeasiblePlan
from elastic.planner import dollars, explain
from elastic.planner.cost import memory
from elastic.planner.cost.memory import Step
from elastic.planner.cost.step_cost import Cost, Site, bubble
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.hetero_assign import COMPUTED, HeteroAssignment, guessed_cost
from elastic.planner.layout_space import Space, cut, n_options
from elastic.planner.node_sets import NodeSet, SearchedNodes
from elastic.planner.step_split import check_axes, share_out, step_of
from elastic.text import gib
from elastic.types import Job, Layout
from elastic.types.replacing import replace

PER_OPTION = 0.01  # that a layout must be faster for each axis or option that it has more
PER_GUESSED_OPTION = 0.05
IDLE = 0.05  # that a step must be shorter where workers are left idle for it
# of a step, that heterogeneous GPUs may wait before layouts that cut more are looked at
WAITING = 0.1
N_BEST = 5  # that are looked for at least, so that the first one depends on nothing else
MOST_FEWER, MOST_CUTS, MOST_REPLICAS = 8, 4, 4  # how many of each are looked at
MOST_ASSIGNED = 24  # layouts of one cut whose shares among heterogeneous GPUs are worked out
FEWER_MOST = 64  # smaller numbers of workers that are tried where all of them have no layout
ROUNDED = 1e-9  # of a bound that is as good as what is known
INF = float("inf")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout on some of the nodes, costed. `assigned`: on heterogeneous GPUs."""

    there: NodeSet
    layout: Layout
    step: Step
    cost: Cost
    assigned: HeteroAssignment | None = None

    @cached_property
    def n_options(self) -> int:
        """Plain sharding has none; and each layout has a microbatch size."""
        layout = self.layout
        return n_options(layout) - (layout.dp_shard != 1) - (layout.microbatch_size != 0)


class Ranking(Protocol):
    """What is to be small."""

    def value(self, found: Candidate) -> float: ...

    def limit_s(self, there: NodeSet, worst: float) -> float:
        """A step on these nodes that takes longer has a larger value than `worst`."""
        ...


@dataclass(frozen=True)
class Fastest:
    """`n_workers`: that can be used at most; `per_option`: as PER_OPTION."""

    n_workers: int
    per_option: float = PER_OPTION

    def value(self, found: Candidate) -> float:
        idle = 1 + IDLE * (found.layout.world_size < self.n_workers)
        return found.cost.step_s * (1 + self.per_option * found.n_options) * idle

    def limit_s(self, there: NodeSet, worst: float) -> float:
        return worst / (1 + IDLE * (there.most < self.n_workers))


@dataclass(eq=False)
class LayoutSearch:
    """`kept`: the best of each shape and set of nodes; `families`: the best of each family of
    layouts; `rejected`: what does not fit, and why, in the order of looking."""

    every: SearchedNodes
    job: Job
    ranking: Ranking
    n_best: int = N_BEST
    kept: dict[tuple[Any, ...], Candidate] = field(default_factory=dict)
    families: dict[str, Candidate] = field(default_factory=dict)
    rejected: list[tuple[Layout, str]] = field(default_factory=list)
    simplest: Candidate | None = None  # of those on all nodes
    n_looked_at: int = 0
    _values: dict[Any, tuple[float, int]] = field(default_factory=dict)
    _pending: list[tuple[tuple[float, int], int, Candidate]] = field(default_factory=list)
    _worst: float = INF  # value of the last of the best
    _checked: set[tuple[int, ...]] = field(default_factory=set)  # axes that can be had
    # of them, tp and cp, and stages: what is asked of one is asked whatever the others are
    _inner: set[tuple[int, int]] = field(default_factory=set)
    _stages: set[int] = field(default_factory=set)
    # data-parallel ranks among which a step cannot be cut into microbatches of that size, and why
    _unfed: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work, self.cache = self.every.work, self.every.cache
        self.model, self.known = self.every.work.model, self.every.known
        infeasible = self.every.limits.infeasible or {}
        self.too_large = {layout: self._needs(layout) for layout in infeasible}
        self.n_best = max(self.n_best, N_BEST)

    def ranked(self) -> list[Candidate]:
        """The best first; [] = nothing fits."""
        for n, there in enumerate(self.every.sets()):
            if self.known and there.least_s() > self.limit_s(there):
                continue
            for world in self._worlds(there, whole=n == 0):
                if self._too_few(there, world) or self.size(there, world):
                    break
            if n == 0:
                self._fewer(there)
        return sorted(self.kept.values(), key=self.value)

    def value(self, found: Candidate) -> tuple[float, int]:
        return self.ranking.value(found), cut(found.layout)

    def limit_s(self, there: NodeSet) -> float:
        return self.ranking.limit_s(there, self._worst) * (1 + ROUNDED)

    # ------------------------------------------------------------------------------------- numbers

    def _worlds(self, there: NodeSet, whole: bool) -> Iterator[int]:
        """All workers; where those have no layout, fewer: whole nodes less, or single workers, then
        one for each sample of a step, and halves."""
        yield there.most
        if whole:
            less = there.per_node if there.most > FEWER_MOST else 1
            lowest = max(0, there.most - less * (FEWER_MOST + 1))
            yield from range(there.most - less, lowest, -less)
            halves = {lowest >> k for k in range(lowest.bit_length())}
            yield from (
                n for n in sorted({*halves, self.job.global_batch}, reverse=True) if n <= lowest
            )

    def _too_few(self, there: NodeSet, world: int) -> bool:
        """Would the state alone, cut into equal parts for all of them, be too large for them?"""
        least = 0 if self.job.offload else int(self.work.state_bytes) // world
        room = there.mean_memory_bytes
        if room and least > room:
            why = explain.too_large(least, memory.USABLE * room, room)
            self._reject(Layout(dp_shard=world), f"the state alone {why}")
        return bool(room) and least > room

    def _fewer(self, there: NodeSet) -> None:
        """Of some workers less, the layouts that need not cut so far: 13 workers may have to."""
        first = min(self.kept.values(), key=self.value, default=None)
        if first is None or cut(first.layout) == 1 or there.zones:
            return
        fit = {key[1:] for key in self.kept}
        world, least = first.layout.world_size, max(1, self.job.min_workers)
        many = world > 4 * MOST_FEWER
        if many and there.uneven:
            return
        less = there.per_node if many else 1
        lowest = max(least, -(-3 * world // 4), world - MOST_FEWER * less)

        def cuts_less(shape: Layout) -> bool:
            return cut(shape) < cut(first.layout) and (shape.tp, shape.pp, shape.cp) not in fit

        for fewer in range(world - less, lowest - 1, -less):
            self.size(there, fewer, cuts_less)

    # -------------------------------------------------------------------------------------- shapes

    def size(
        self, there: NodeSet, world: int, only: Callable[[Layout], bool] | None = None
    ) -> bool:
        """Looks at all layouts of that many workers; does one fit, or would it not be among the
        best anyway?"""
        fits = False
        for space in self._spaces(there, world):
            n_cuts = 0
            for _, shapes in groupby(space.shapes(world), cut):
                some = [shape for shape in shapes if only is None or only(shape)]
                found = [self._shape(there, space, shape) for shape in some]
                fits, n_cuts = fits or any(found), n_cuts + any(found)
                if self.known and n_cuts > 1:
                    continue  # the most promising of all of them are assigned first
                waits = self._settle(there)
                if not self.known and n_cuts and (not waits or n_cuts == MOST_CUTS):
                    break
            self._settle(there)
        return fits

    def _spaces(self, there: NodeSet, world: int) -> Iterator[Space]:
        """Where replicas must lie within a zone each, one for each number of them that goes, the
        fewest first."""
        room, tight = bool(there.memory_bytes), bool(there.memory_bytes or self.too_large)
        space = Space.of(self.model, self.job, there.sizes, roomy=room, tight=tight)
        if not there.zones:
            yield space
            return
        in_zones: Counter[str] = Counter()
        for node in there.nodes:
            in_zones[there.zones[node.node_id]] += node.gpus
        wanted = int(space.pins.get("dp_replicate", 0))
        fitting = (
            n
            for n in unequal_shares.divisors(world)
            if sum(gpus // (world // n) for gpus in in_zones.values()) >= n and wanted in (0, n)
        )
        for n in islice(fitting, MOST_REPLICAS):
            yield replace(space, pins={**space.pins, "dp_replicate": n})

    def _shape(self, there: NodeSet, space: Space, shape: Layout) -> bool:
        """All kinds of a shape."""
        if shape.tp * shape.cp > there.sizes[-1]:
            self._reject(shape, explain.leaves_node(shape, there.sizes[-1]))
            return False
        eps = self._eps(space, shape)
        limit_s = self.limit_s(there) if self.known else INF
        if limit_s < INF and self._bound_s(there, replace(shape, ep=eps[-1])) > limit_s:
            self._reject(shape, "its computation alone takes longer than the offers shown")
            return True
        why = self._unfed.get((shape.dp, shape.microbatch_size)) if space.one_size else None
        if why and self._can_have(shape):
            self._reject(space.leanest(shape), why)
            return False
        found = False
        for kind in space.kinds(shape):
            if self._fitting(there, space.leanest(kind)) is None:
                if (kind is shape or kind == shape) and "schedule" not in space.pins:
                    break  # the other kinds ask for more
                continue
            for ep in self._eps(space, kind):
                found = self._variants(there, space, replace(kind, ep=ep)) or found
        return found

    def _eps(self, space: Space, shape: Layout) -> tuple[int, ...]:
        """Over how many ranks experts may be shared out, the most last: data-parallel ones, with
        equally many experts each; of replicas none, where the job does not say so."""
        wanted, ranks = int(space.pins.get("ep", 0)), shape.dp_shard * shape.cp
        if not self.model.n_experts or self.model.no_ep or wanted or shape.dp_replicate > 1:
            return (wanted or 1,)
        return tuple(n for n in unequal_shares.divisors(ranks) if self.model.n_experts % n == 0)

    def _bound_s(self, there: NodeSet, shape: Layout) -> float:
        """Of a step the computation at best, without recomputation and waiting."""
        if there.uneven:
            return there.least_s(shape.world_size)
        rows = max(1, self.job.global_batch // shape.dp)
        one = self.cache.floor_s(self._site(there, shape.world_size), shape, rows)
        even = one * self.job.global_batch / shape.dp * self.work.n_blocks / shape.pp
        return even * min(1.0, there.slower)

    def _site(self, there: NodeSet, world: int) -> Site:
        return there.site(world)

    def _variants(self, there: NodeSet, space: Space, kind: Layout) -> bool:
        """Microbatch sizes and checkpointing of a kind of layout. Where the largest microbatch
        fits, nothing needs to be computed again."""
        sizes, fits = space.sizes(kind), False
        for mode in space.modes(kind):
            some = [replace(kind, activation_checkpointing=mode, microbatch_size=n) for n in sizes]
            found = [self._one(there, layout) for layout in some]
            fits = fits or any(found)
            if found[0]:
                break
        return fits

    # ------------------------------------------------------------------------------------ a layout

    def _one(self, there: NodeSet, layout: Layout) -> bool:
        """Costs a layout; does it fit, or would it not be among the best anyway?"""
        try:
            step = self._step(there, layout)
            slow = there.uneven and self.known  # these costs take longest to compute
            if slow and self._computed_s(there, layout, step) > self.limit_s(there):
                return True
            self._check(there, layout, step)
        except InfeasiblePlan as error:
            self._reject(layout, str(error))
            return False
        self.n_looked_at += 1
        if there.uneven:
            least = Candidate(there, layout, step, Cost({"": there.assigner.floor(layout, step)}))
            if self.ranking.value(least) <= self._worst * (1 + ROUNDED):
                self._pending.append((self.value(least), len(self._pending), least))
        else:
            self.take(Candidate(there, layout, step, self.even_cost(there, layout, step)))
        return True

    def _settle(self, there: NodeSet) -> bool:
        """Assigns shares and stages to what waits for them, the most promising first. Do
        heterogeneous GPUs wait for each other in what is best so far?"""
        pending, self._pending, n_assigned = sorted(self._pending), [], 0
        for value, _, least in pending:
            if value[0] > self._worst * (1 + ROUNDED) or n_assigned == MOST_ASSIGNED:
                break
            if value > self._values.get(_key(least), (INF, 0)):
                continue
            layout, step, least_s = least.layout, least.step, least.cost.step_s
            try:
                found = there.assigner.assign(layout, step, least_s=least_s)
            except InfeasiblePlan as error:
                self._reject(layout, str(error))
                continue
            n_assigned += 1
            self.take(Candidate(there, layout, step, found.cost, found))
        best = self.kept[min(self.kept, key=self._values.__getitem__)] if self.kept else None
        return best is not None and best.assigned is not None and best.assigned.idle >= WAITING

    def even_cost(self, there: NodeSet, layout: Layout, step: Step) -> Cost:
        """On equal GPUs."""
        if not self.every.timed:
            uneven = step.largest_share * layout.dp / max(1, step.global_batch)
            parts = {"busy": uneven, "bubble": uneven * bubble(layout, step.n_microbatches)}
            total = layout.world_size * there.reference / there.unit
            return guessed_cost(layout, parts, total)
        site = self._site(there, layout.world_size)
        found = self.cache.step_cost(site, layout, step)
        if there.slower == 1.0:
            return found
        scaled = {k: s * there.slower if k in COMPUTED else s for k, s in found.parts.items()}
        return Cost(scaled, found.flop)

    def take(self, found: Candidate) -> None:
        layout, value = found.layout, self.value(found)
        key = _key(found)
        if key not in self.kept or value < self._values[key]:
            self.kept[key], self._values[key] = found, value
            if len(self.kept) >= self.n_best and value[0] < self._worst:
                values = (self._values[key][0] for key in self.kept)
                self._worst = nsmallest(self.n_best, values)[-1]
        for name in explain.families(layout):
            if name not in self.families or value < self._values[name]:
                self.families[name], self._values[name] = found, value
        plain = self.simplest
        if plain is None or (
            found.there is plain.there
            and (cut(layout), found.n_options) < (cut(plain.layout), plain.n_options)
        ):
            self.simplest = found

    # ------------------------------------------------------------------------------------ what fits

    def _fitting(self, there: NodeSet, layout: Layout) -> Step | None:
        try:
            return self.fitting(there, layout)
        except InfeasiblePlan as error:
            self._reject(layout, str(error))
            return None

    def fitting(self, there: NodeSet, layout: Layout, exact: bool = False) -> Step:
        """How a step is shared out. `exact`: the job names the layout; only what is certain counts.
        Raises InfeasiblePlan."""
        step = self._step(there, layout)
        self._check(there, layout, step, exact=exact)
        return step

    def _step(self, there: NodeSet, layout: Layout) -> Step:
        axes = layout.tp, layout.cp, layout.pp, layout.n_stages, layout.dp
        if axes not in self._checked:
            check_axes(self.model, self.job, layout)
            self._checked.add(axes)
            if layout.ep == 1:
                self._inner.add((layout.tp, layout.cp))
                self._stages.add(layout.n_stages)
        unit = self.model.together
        try:
            return share_out(self.job, layout, per_node=there.per_node, together=unit)
        except InfeasiblePlan as error:
            if layout.n_stages == layout.pp:
                self._unfed[layout.dp, layout.microbatch_size] = str(error)
            raise

    def _can_have(self, shape: Layout) -> bool:
        """Is it known that model and job can have its axes, as a layout of so many data-parallel
        ranks has been looked at?"""
        return (shape.tp, shape.cp) in self._inner and shape.pp in self._stages

    def _computed_s(self, there: NodeSet, layout: Layout, step: Step) -> float:
        """Of a step the blocks' computation, perfectly shared out, recomputation counted."""
        one = self.cache.block_s(there.site(), layout, step.n_rows).busy / step.n_rows
        total = there.assigner.most(layout.world_size) / there.reference
        inner = layout.tp * layout.cp
        return there.slower * one * step.global_batch * self.work.n_blocks * inner / total

    def _check(self, there: NodeSet, layout: Layout, step: Step, *, exact: bool = False) -> None:
        if not exact and step.n_microbatches < layout.pp:
            raise InfeasiblePlan(
                f"{step.n_microbatches} microbatches cannot fill {layout.pp} pipeline stages"
            )
        limits = self.every.limits
        if limits.unusable and (why := limits.unusable.get(str(layout))):
            raise InfeasiblePlan(why)
        if limits.infeasible and self._tried(there, layout):
            raise InfeasiblePlan(f"did not fit ({gib(limits.infeasible[layout])} measured)")
        if not there.holds(layout):
            next(there.place.arrangements(layout, self.job.max_workers or 0))
        self._check_memory(there, layout, step, exact=exact)
        if self.too_large and not exact:
            self._check_measured(there, layout, step)

    def _tried(self, there: NodeSet, layout: Layout) -> bool:
        """Was it found not to fit, on GPUs of no less memory?"""
        limits = self.every.limits
        room = (limits.infeasible_on or {}).get(layout, 0)
        return layout in (limits.infeasible or {}) and not 0 < room < there.memory_bytes

    def _check_memory(self, there: NodeSet, layout: Layout, step: Step, *, exact: bool) -> None:
        room = there.memory_bytes
        usable: float = room
        if exact:
            needs = float(memory.memory_bytes(self.work, layout, step.dtype))
        else:
            needs = float(self.needs(layout, step))
            usable = self.every.usable(room, layout)
            if room and there.uneven and needs > usable:  # who has least room may have less to do
                there.assigner.check_rows(layout, step)
                least = step.n_microbatches * max(1, self.model.together)
                step = replace(step, largest_share=least)
                needs = float(self.needs(layout, step))
        deepens = layout.pp > 1 and len(set(there.memory.values())) > 1
        if room and needs > usable and not deepens:
            raise InfeasiblePlan(explain.too_large(needs, usable, room))
        if layout.offload:
            self._check_host(there, layout)

    def _check_host(self, there: NodeSet, layout: Layout) -> None:
        host = self.every.limits.host_memory or {}
        for gpus, room in {(x.gpus, host.get(x.node_id, 0)) for x in there.nodes}:
            needs = dollars.host_bytes(gpus, self.work, layout)
            if 0 < room < needs:
                raise InfeasiblePlan(explain.too_large_for_host(needs, room))

    def _check_measured(self, there: NodeSet, layout: Layout, step: Step) -> None:
        needs = self.needs(layout, step)
        smaller = (tried for tried, most in self.too_large.items() if most <= needs)
        least = next((tried for tried in smaller if self._tried(there, tried)), None)
        if least is not None:
            raise InfeasiblePlan(f"needs at least as much memory as {least}, which did not fit")

    def needs(self, layout: Layout, step: Step) -> int:
        """Bytes of a worker."""
        state = int(self.cache.state_bytes(layout, step.dtype))
        return state + memory.activation_bytes(self.work, layout, step)

    def _needs(self, layout: Layout) -> int:
        per_node = min((node.gpus for node in self.every.nodes), default=1)
        return self.needs(layout, step_of(self.model, self.job, layout, per_node=per_node))

    def _reject(self, layout: Layout, why: str) -> None:
        self.rejected.append((layout, why))


def _key(found: Candidate) -> tuple[Any, ...]:
    """Its shape and nodes."""
    return id(found.there), found.layout.tp, found.layout.pp, found.layout.cp
