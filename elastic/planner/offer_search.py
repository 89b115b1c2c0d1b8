"""The search of `elastic plan`: the best layouts on given nodes by predicted cost; what cannot win
is left out early.

A shape (tp, pp, cp and data-parallel ranks) is left out when its computation alone, with tiles that
always fill the GPU, would make it a worse offer than the last that is shown: all else only adds to
that. Equal GPUs are one kind: what is looked at grows with the divisors of their number, not with
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import combinations
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner import dollars, explain
from elastic.planner.cost import memory
from elastic.planner.cost.block_cost_cache import BlockCostCache
from elastic.planner.cost.memory import USABLE, usable_bytes
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Site, step_cost
from elastic.planner.hetero import hetero_offers, hetero_shares
from elastic.planner.layout_search import site_of
from elastic.planner.layout_space import Space, n_options
from elastic.planner.offers import Aim, Candidate, NodeGroup, Offer, OfferPart, Offers
from elastic.planner.step_split import step_of
from elastic.types import Job, Layout, ModelProfile

# that a layout must be better for each axis or option that it has more: predictions are no better
PER_OPTION = 0.01
FEWER_MOST = 64  # smaller numbers of GPUs that are tried where all of them have no layout
INF = float("inf")
ROUNDED = 1e-9  # of a bound that is as good as the offer
LATE = 1e12  # USD per hour that make an offer behind the deadline worse than any other
SMALLEST_SHARE = 8  # nodes are halved down to this part of them where fewer may be cheaper


def find_offers(
    model: ModelProfile, job: Job, groups: Sequence[NodeGroup], *, aim: Aim | None = None
) -> Offers:
    """The best `aim.n_best` of different shapes. `job`: global_batch, precision and what it pins.
    Raises InfeasiblePlan in one line, with the least pool that would hold the model."""
    if model.sample is None:
        raise InfeasiblePlan(
            "what a sample asks of this model is not known, so that no step time can be predicted"
        )
    finder = _Finder(model, job, aim or Aim())
    for pool in finder.pools([group for group in groups if group.n_gpus]):
        finder.look(pool)
    if not finder.kept:
        finder.reasons = {f"no {axis}": why for axis, why in model.closed.items()} | finder.reasons
        raise InfeasiblePlan(explain.nowhere(finder.work, groups, finder.reasons))
    return finder.offers()


@dataclass
class _Finder:
    """`kept`: the best candidate of each shape and pool; `families`: the best of each family of
    layouts; `reasons`: why a family has none."""

    model: ModelProfile
    job: Job
    aim: Aim
    kept: dict[tuple[Any, ...], Candidate] = field(default_factory=dict)
    families: dict[str, Candidate] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    n_looked_at: int = 0
    # of `kept` and of `families`, by their keys
    _values: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _worst: float = float("inf")  # value of the last offer that is shown

    def __post_init__(self) -> None:
        self.work = ModelCost.of(self.model)
        self.batch = self.job.global_batch
        self.cache = BlockCostCache(self.work)

    # -------------------------------------------------------------------------------------- pools

    def pools(self, groups: Sequence[NodeGroup]) -> Iterator[tuple[NodeGroup, ...]]:
        """All nodes; each kind without the others; a half, a quarter ... of the nodes: cheaper, and
        where the links are slow sometimes faster."""
        whole = tuple(groups)
        kinds = list(dict.fromkeys(group.hardware for group in whole))
        sets = [whole]
        for n in range(len(kinds) - 1, 0, -1):
            sets += [
                tuple(g for g in whole if g.hardware in some) for some in combinations(kinds, n)
            ]
        found = dict.fromkeys(sets)
        for n in (2**k for k in range(1, SMALLEST_SHARE.bit_length())):
            for pool in sets:
                found |= {
                    tuple(replace(g, n_nodes=g.n_nodes // n) for g in pool if g.n_nodes >= n): None
                }
        yield from (pool for pool in found if pool)

    def look(self, pool: tuple[NodeGroup, ...]) -> None:
        if self.least_s(pool) > self.limit_s(pool):
            return
        if len({group.hardware for group in pool}) == 1:
            self.equal(pool)
        else:
            for found in hetero_offers.layouts(
                self.cache, self.job, pool, worst=lambda: self.limit_s(pool)
            ):
                self.n_looked_at += 1
                self.take(
                    Candidate(
                        pool,
                        found.layout,
                        found.step,
                        found.cost,
                        found.memory,
                        found.parts,
                        found.lone_s,
                        found.room_bytes,
                    )
                )

    # -------------------------------------------------------------------------------------- equal
    # GPUs

    def equal(self, pool: tuple[NodeGroup, ...]) -> None:
        per_node = min(group.gpus_per_node for group in pool)
        n_gpus, gpu = sum(group.n_gpus for group in pool), pool[0].hardware
        for offload in (False, True):
            job = replace(self.job, offload=True) if offload else self.job
            for world in self.worlds(n_gpus, per_node):
                site = site_of(self.job, gpu, per_node, world=world)
                if self.size(pool, site, job, world=world):
                    return
                if not job.offload and self.work.state_bytes / world > USABLE * (
                    gpu.memory_bytes or INF
                ):
                    break  # fewer have less room still

    def worlds(self, n_gpus: int, per_node: int) -> Iterator[int]:
        """All GPUs; where those have no layout, fewer: whole nodes less, then single GPUs."""
        yield n_gpus
        less = per_node if n_gpus > FEWER_MOST else 1
        yield from range(n_gpus - less, max(0, n_gpus - less * FEWER_MOST), -less)

    def size(self, pool: tuple[NodeGroup, ...], site: Site, job: Job, *, world: int) -> bool:
        """Looks at all layouts of that many GPUs; was there one that fits, or would not have been
        shown anyway?"""
        space = Space.on(self.model, job, (site.per_node,))
        found = False
        for shape in space.shapes(world):
            if shape.tp * shape.cp > site.per_node:
                self.reasons.setdefault(
                    explain.family(shape), explain.leaves_node(shape, site.per_node)
                )
                continue
            eps = self.eps(shape, job)
            if self.bound(site, replace(shape, ep=eps[-1])) > self.limit_s(pool):
                self.reasons.setdefault(
                    explain.family(shape),
                    "its computation alone takes longer than the offers shown",
                )
                found = True
                continue
            for kind in space.kinds(shape):
                for ep in eps if kind.dp_replicate == 1 else (1,):
                    found = (
                        self.variants(pool, site, job, space=space, kind=replace(kind, ep=ep))
                        or found
                    )
        return found

    def eps(self, shape: Layout, job: Job) -> tuple[int, ...]:
        """Over how many ranks experts may be spread, the most last: data-parallel ones, with
        equally many experts each. Only where the job is none that elastic is to run, which has no
        ep."""
        sample = self.work.sample
        experts = max((product.experts for product in sample.matmuls), default=0) if sample else 0
        if not experts or not job.ep:
            return (1,)
        ranks = shape.dp_shard * shape.cp
        return tuple(n for n in hetero_shares.divisors(ranks) if experts % n == 0)

    def bound(self, site: Site, shape: Layout) -> float:
        """Seconds of a step's computation at best, without recomputation and waiting."""
        one = self.cache.floor_s(site, shape, max(1, self.batch // shape.dp))
        return one * self.batch / shape.dp * self.work.n_blocks / shape.pp

    def least_s(self, pool: tuple[NodeGroup, ...]) -> float:
        """The same, perfectly shared out over all GPUs of a pool."""
        rate = 0.0
        for group in pool:
            site = site_of(self.job, group.hardware, group.gpus_per_node)
            rate += group.n_gpus / self.cache.floor_s(site, Layout(), self.batch)
        return self.batch * self.work.n_blocks / rate

    def limit_s(self, pool: tuple[NodeGroup, ...]) -> float:
        """A step on this pool that takes longer is no offer that is shown: its value would be above
        the worst."""
        if self.aim.purpose == "fastest" or self._worst == INF:
            return self._worst * (1 + ROUNDED)
        paid = sum(group.usd_per_h for group in pool)
        if not paid and len({group.zone for group in pool}) > 1:
            return INF
        limit = self._worst / (paid or 1.0)
        if self.late(limit):
            limit = max(self.aim.deadline_h / self.hours(1.0), self._worst / (paid + LATE))
        return limit * (1 + ROUNDED)

    def variants(
        self, pool: tuple[NodeGroup, ...], site: Site, job: Job, *, space: Space, kind: Layout
    ) -> bool:
        """Microbatch sizes and checkpointing of a kind of layout. Where the largest microbatch
        fits, nothing needs to be computed again."""
        sizes, any_fits = space.sizes(kind), False
        for mode in space.modes():
            fits = [
                self.one(
                    pool,
                    site,
                    job,
                    layout=replace(kind, activation_checkpointing=mode, microbatch_size=size),
                )
                for size in sizes
            ]
            any_fits = any_fits or any(fits)
            if fits[0]:
                break
        return any_fits

    def one(self, pool: tuple[NodeGroup, ...], site: Site, job: Job, *, layout: Layout) -> bool:
        """Costs a layout; does it fit?"""
        try:
            step = step_of(self.model, job, layout, per_node=site.per_node)
        except InfeasiblePlan as error:
            self.reasons.setdefault(explain.family(layout), str(error))
            return False
        if step.n_microbatches < layout.pp:
            return False
        self.n_looked_at += 1
        held = memory.parts(self.work, layout, step)
        room = site.chip.gpu.memory_bytes
        usable = usable_bytes(room, layout, site.chip.on_gpu)
        if room and sum(held.values()) > usable:
            self.reasons[explain.family(layout)] = explain.too_large(
                sum(held.values()), usable, room
            )
            return False
        short = next(
            (g for g in pool if 0 < g.host_memory_bytes < dollars.host_bytes(g, self.work, layout)),
            None,
        )
        if layout.offload and short is not None:
            self.reasons[explain.family(layout)] = explain.too_large_for_host(
                dollars.host_bytes(short, self.work, layout), short
            )
            return False
        found = step_cost(
            site, self.work, layout, step=step, passes=self.cache.block_s(site, layout, step.n_rows)
        )
        parts = tuple(
            OfferPart(
                group.pool,
                n,
                step.largest_share,
                (self.work.n_blocks,),
                1 - found.parts["bubble"] / found.step_s,
            )
            for group, n in hetero_offers.taken(pool, layout.world_size)
        )
        self.take(
            Candidate(
                pool,
                layout,
                step,
                found,
                held,
                parts,
                self.cache.lone_s(site, step, layout.world_size),
                room,
            )
        )
        return True

    # -------------------------------------------------------------------------------------- the
    # best

    def take(self, found: Candidate) -> None:
        key, value = (
            (found.groups, found.layout.tp, found.layout.pp, found.layout.cp),
            self.value(found),
        )
        if key not in self.kept or value < self._values[key]:
            self.kept[key], self._values[key] = found, value
            if len(self.kept) >= self.aim.n_best and value[0] < self._worst:
                self._worst = nsmallest(
                    self.aim.n_best, (self._values[key][0] for key in self.kept)
                )[-1]
        for name in explain.families(found):
            if name not in self.families or value < self._values[name]:
                self.families[name], self._values[name] = found, value

    def value(self, found: Candidate) -> tuple[float, float]:
        """What is to be small, by the aim; of equally good ones the simpler. Never below what
        `limit_s` takes it for."""
        step_s = self.lasting_s(found) * (
            1 + PER_OPTION * n_options(replace(found.layout, microbatch_size=0))
        )
        cut = found.layout.tp * found.layout.pp * found.layout.cp
        if self.aim.purpose == "fastest":
            return step_s, cut
        usd = self.usd_per_h(found, step_s) * step_s
        return (usd + (LATE * step_s if self.late(step_s) else 0.0)) or step_s, cut

    def late(self, step_s: float) -> bool:
        return self.aim.purpose == "deadline" and self.hours(step_s) > self.aim.deadline_h > 0

    def lasting_s(self, found: Candidate) -> float:
        """Of a step, with the share of what lost nodes cost."""
        return (
            found.cost.step_s
            / dollars.loss(found.groups, self.work, found.layout, step_s=found.cost.step_s).goodput
        )

    def hours(self, step_s: float) -> float:
        sample = self.work.sample
        tokens = self.batch * max(1, sample.tokens if sample else 1)
        return self.aim.tokens / tokens * step_s / 3600

    def usd_per_h(self, found: Candidate, step_s: float) -> float:
        moved = dollars.moved_usd_per_h(found.groups, self.work, found.layout, step_s=step_s)
        return (
            found.usd_per_h
            + moved
            + (dollars.stored_usd_per_h(self.work) if found.usd_per_h else 0.0)
        )

    def offers(self) -> Offers:
        ranked = sorted(self.kept.values(), key=self.value)
        best = tuple(self.offer(found, ranked[0]) for found in ranked[: self.aim.n_best])
        shown = {explain.family(offer.layout) for offer in best}
        slower = {
            name: explain.slower(found.cost, ranked[0].cost)
            for name, found in self.families.items()
            if name not in shown and found is not ranked[0]
        }
        left = {name: why for name, why in self.reasons.items() if name not in self.families}
        return Offers(best, slower | left, self.n_looked_at)

    def offer(self, found: Candidate, best: Candidate) -> Offer:
        sample, step_s = self.work.sample, found.cost.step_s
        assert sample is not None
        lost = dollars.loss(found.groups, self.work, found.layout, step_s=step_s)
        copies = dollars.copying(found.groups, self.work, found.layout, step_s=step_s)
        lasting_s, per_step = self.lasting_s(found), found.step.global_batch * max(1, sample.tokens)
        usd_per_h, hours = self.usd_per_h(found, lasting_s), self.hours(lasting_s)
        flop_per_s = sum(
            hetero_offers.peak_of(found.groups, part.pool, self.job) * part.n_gpus
            for part in found.parts
        )
        return Offer(
            layout=found.layout,
            parts=found.parts,
            step=found.step,
            step_s=step_s,
            seconds=found.cost.parts,
            memory=found.memory,
            room_bytes=found.room_bytes,
            host_bytes=max(
                dollars.host_bytes(group, self.work, found.layout) for group in found.groups
            ),
            tokens_per_s=per_step / step_s,
            mfu=found.cost.flop / step_s / flop_per_s if flop_per_s else 0.0,
            usd_per_h=usd_per_h,
            usd_per_mtoken=usd_per_h * lasting_s / 3600 / per_step * 1e6,
            efficiency=min(1.0, found.lone_s / step_s),
            goodput=lost.goodput,
            state_bytes=copies.state_bytes,
            copy_stall_s=copies.stall_s,
            copy_write_s=copies.write_s,
            lost_node_s=copies.lost_node_s,
            moved_s=copies.moved_s,
            hours=hours,
            usd=hours * usd_per_h,
            why=explain.why(found, best),
            warnings=explain.warnings(found, self.batch),
        )
