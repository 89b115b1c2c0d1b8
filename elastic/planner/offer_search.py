"""What `elastic plan` answers: the ranked layouts on given nodes (layout_search.py), each with what
it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.errors import InfeasiblePlan
from elastic.planner import dollars, explain
from elastic.planner.cost import default_hardware, memory
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.hetero_assign import HeteroAssignment
from elastic.planner.layout_choice import Ranked, ranked_layouts
from elastic.planner.layout_search import PER_OPTION, Candidate, Ranking
from elastic.planner.node_sets import LayoutLimits, NodeSet
from elastic.planner.offers import Aim, NodeGroup, Offer, OfferPart, Offers
from elastic.types import Job, ModelProfile, Node, grid
from elastic.types.nouns import named_after_auto

LATE = 1e12  # USD per hour that make an offer behind the deadline worse than any other
INF = float("inf")


def find_offers(
    model: ModelProfile, job: Job, groups: Sequence[NodeGroup], *, aim: Aim | None = None
) -> Offers:
    """The best `aim.n_best` of different shapes; the first one is what a run enters there, unless
    the aim is dollars. `job`: global_batch, precision and what it pins. Raises InfeasiblePlan in
    one line, with the least pool that would hold the model."""
    if model.sample is None:
        unknown = "what a sample asks of this model is not known"
        raise InfeasiblePlan(f"{unknown}, so that no step time can be predicted")
    priced = _Priced(ModelCost.of(model), job, tuple(g for g in groups if g.n_gpus), aim or Aim())
    if not priced.groups:
        raise InfeasiblePlan(explain.nowhere(priced.work, groups, {}))
    ranked = priced.ranked(model, job)
    if not ranked.best:
        closed = {f"no {axis}": why for axis, why in model.closed.items()}
        nowhere = explain.nowhere(priced.work, groups, closed | _reasons(ranked))
        raise InfeasiblePlan(f"{nowhere}{priced.offloaded(model)}")
    return priced.offers(ranked)


def _reasons(ranked: Ranked) -> dict[str, str]:
    """Family of layouts -> why the leanest of it does not fit."""
    return {explain.family(layout): why for layout, why in ranked.search.rejected}


def nodes_of(groups: Sequence[NodeGroup]) -> dict[str, NodeGroup]:
    """Node -> the group that it is of, in their order."""
    return {f"{n}/{i}": group for n, group in enumerate(groups) for i in range(group.n_nodes)}


def limits_of(groups: Mapping[str, NodeGroup]) -> LayoutLimits:
    """What is known of these nodes, as a run knows it of its own."""
    every = {id(group): group for group in groups.values()}.values()
    memory_bytes = [group.hardware.memory_bytes for group in every]
    guess = default_hardware.GUESSED_CPU
    guessed = any(replace(group.hardware, memory_bytes=0) == guess for group in every)
    return LayoutLimits(
        memory={name: group.hardware.memory_bytes for name, group in groups.items()}
        if all(memory_bytes)
        else None,
        hardware=None if guessed else {name: group.hardware for name, group in groups.items()},
        zones={name: group.zone for name, group in groups.items() if group.zone},
        on_gpus=any(group.hardware.accelerator_type != "CPU" for group in every),
        host_memory={name: group.host_memory_bytes for name, group in groups.items()},
    )


@dataclass(eq=False)
class _Priced:
    """One question. `of`: nodes -> their group; `_there`: sets of nodes -> what is paid there."""

    work: ModelCost
    job: Job
    groups: tuple[NodeGroup, ...]
    aim: Aim
    _there: dict[int, tuple[NodeGroup, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of = nodes_of(self.groups)
        self.batch = self.job.global_batch

    def ranked(self, model: ModelProfile, job: Job) -> Ranked:
        nodes = [Node(name, group.pool, group.gpus_per_node) for name, group in self.of.items()]
        ranking: Ranking | None = None if self.aim.purpose == "fastest" else _Cheapest(self)
        return ranked_layouts(
            model, job, nodes, limits=limits_of(self.of), ranking=ranking, n_best=self.aim.n_best
        )

    def offloaded(self, model: ModelProfile) -> str:
        """What would be with the state in host memory, which nothing but the job chooses."""
        said = self.job.offload or "offload" in named_after_auto(self.job.layout)
        if said or not limits_of(self.of).on_gpus:
            return ""
        found = self.ranked(model, replace(self.job, offload=True)).best
        if not found:
            return ""
        seconds = f"{found[0].cost.step_s:.3g} s a step"
        return f"; the job may ask for offload: {found[0].layout} takes {seconds}"

    def there(self, nodes: NodeSet) -> tuple[NodeGroup, ...]:
        """What is paid for these nodes."""
        if id(nodes) not in self._there:
            count = Counter(id(self.of[node.node_id]) for node in nodes.nodes)
            some = [replace(g, n_nodes=count[id(g)]) for g in self.groups if count[id(g)]]
            self._there[id(nodes)] = tuple(some)
        return self._there[id(nodes)]

    # ------------------------------------------------------------------------------------ numbers

    def lasting_s(self, found: Candidate) -> float:
        """Of a step, with the share of what lost nodes cost."""
        step_s = found.cost.step_s
        lost = dollars.loss(self.there(found.there), self.work, found.layout, step_s=step_s)
        return step_s / lost.goodput

    def hours(self, step_s: float) -> float:
        """To the aim's tokens, with the job's validations."""
        sample = self.work.sample
        tokens = self.batch * max(1, sample.tokens if sample else 1)
        whole_s = step_s * (1 + dollars.validating(self.job))
        return self.aim.tokens / tokens * whole_s / 3600

    def usd_per_h(self, found: Candidate, step_s: float) -> float:
        there = self.there(found.there)
        nodes = sum(group.usd_per_h for group in there)
        moved = dollars.moved_usd_per_h(there, self.work, step_s=step_s)
        stored = dollars.stored_usd_per_h(self.work) if nodes else 0.0
        return nodes + moved + stored + self.job.head_usd_per_h

    # ------------------------------------------------------------------------------------- offers

    def offers(self, ranked: Ranked) -> Offers:
        search, first = ranked.search, ranked.best[0]
        best = tuple(self.offer(one, first) for one in ranked.best[: self.aim.n_best])
        shown = {explain.family(offer.layout) for offer in best}
        slower = {
            name: explain.slower(found.cost, first.cost)
            for name, found in search.families.items()
            if name not in shown and found is not first
        }
        reasons = _reasons(ranked)
        left = {name: why for name, why in reasons.items() if name not in search.families}
        written = {"as it is written": ranked.as_written} if ranked.as_written else {}
        return Offers(best, written | slower | left, search.n_looked_at)

    def offer(self, found: Candidate, best: Candidate) -> Offer:
        sample, step_s, there = self.work.sample, found.cost.step_s, self.there(found.there)
        assert sample is not None
        layout, parts = found.layout, _parts(found, self.of)
        copies = dollars.copying(there, self.work, layout, step_s=step_s)
        lasting_s = self.lasting_s(found)
        per_step = found.step.global_batch * max(1, sample.tokens)
        usd_per_h, hours = self.usd_per_h(found, lasting_s), self.hours(lasting_s)
        held, room = _fullest(found)
        n_gpus = sum(group.n_gpus for group in there)
        use = explain.MemoryUse(sum(held.values()), found.there.every.usable(room, layout))
        return Offer(
            layout=layout,
            parts=parts,
            step=_largest(found),
            step_s=step_s,
            seconds=found.cost.parts,
            memory=held,
            room_bytes=room,
            host_bytes=max(dollars.host_bytes(g.gpus_per_node, self.work, layout) for g in there),
            tokens_per_s=per_step / step_s,
            mfu=_mfu(found, parts, self.groups),
            usd_per_h=usd_per_h,
            usd_per_mtoken=usd_per_h * lasting_s / 3600 / per_step * 1e6,
            efficiency=min(1.0, _lone_s(found) / step_s),
            goodput=step_s / lasting_s,
            state_bytes=copies.state_bytes,
            copy_stall_s=copies.stall_s,
            copy_write_s=copies.write_s,
            lost_node_s=copies.lost_node_s,
            moved_s=copies.moved_s,
            hours=hours,
            usd=hours * usd_per_h,
            why=explain.why(found.cost, best.cost),
            warnings=explain.warnings(layout, found.cost, use, n_gpus=n_gpus, batch=self.batch),
            nodes=_by_pool(there),
        )


@dataclass(frozen=True)
class _Cheapest:
    """Dollars of a step; behind a deadline anything else first. As in `Fastest`, each axis and
    option counts."""

    priced: _Priced

    def value(self, found: Candidate) -> float:
        step_s = self.priced.lasting_s(found) * (1 + PER_OPTION * found.n_options)
        usd = self.priced.usd_per_h(found, step_s) * step_s
        return (usd + (LATE * step_s if self._late(step_s) else 0.0)) or step_s

    def limit_s(self, there: NodeSet, worst: float) -> float:
        if worst == INF:
            return INF
        groups = self.priced.there(there)
        paid = sum(group.usd_per_h for group in groups) + self.priced.job.head_usd_per_h
        if not paid and len({group.zone for group in groups}) > 1:
            return INF
        limit = worst / (paid or 1.0)
        if self._late(limit):
            aim = self.priced.aim
            limit = max(aim.deadline_h / self.priced.hours(1.0), worst / (paid + LATE))
        return limit

    def _late(self, step_s: float) -> bool:
        aim = self.priced.aim
        return aim.purpose == "deadline" and self.priced.hours(step_s) > aim.deadline_h > 0


# ----------------------------------------------------------------------------------------- an offer


def _by_pool(there: Sequence[NodeGroup]) -> Mapping[str, int]:
    found = Counter[str]()
    for group in there:
        found[group.pool] += group.n_nodes
    return dict(found)


def _parts(found: Candidate, of: Mapping[str, NodeGroup]) -> tuple[OfferPart, ...]:
    if found.assigned is not None:
        return tuple(_assigned_parts(found, found.assigned, of))
    left, taken = found.layout.world_size, dict[int, int]()
    for node in found.there.nodes:
        n = min(left, node.gpus)
        taken[id(of[node.node_id])] = taken.get(id(of[node.node_id]), 0) + n
        left -= n
    pools = {id(group): group.pool for group in of.values()}
    busy = 1 - found.cost.parts["bubble"] / found.cost.step_s
    layers = (found.there.every.work.n_blocks,)
    return tuple(
        OfferPart(pools[key], n, found.step.largest_share, layers, busy)
        for key, n in taken.items()
        if n
    )


def _assigned_parts(
    found: Candidate, assigned: HeteroAssignment, of: Mapping[str, NodeGroup]
) -> list[OfferPart]:
    layout, place = found.layout, found.there.place
    ranks: dict[int, list[int]] = {}
    busy: list[float] = []
    blocks, places = (
        unequal_shares.blocks_at(layout, assigned.layers),
        grid.stages_and_shares(layout),
    )
    for rank, (worker, (pp, dp)) in enumerate(zip(assigned.ranks, places, strict=True)):
        busy.append(assigned.samples[dp] * max(1, blocks[pp]) / place.rates[worker])
        ranks.setdefault(id(of[worker.node_id]), []).append(rank)
    pools, parts = {id(group): group.pool for group in of.values()}, []
    for key, mine in ranks.items():
        there = {places[rank] for rank in mine}
        stages = sorted({stage for pp, _ in there for stage in grid.stages_at(layout, pp)})
        whole = len(stages) == layout.n_stages
        layers = (
            (found.there.every.work.n_blocks,)
            if whole
            else tuple(assigned.layers[stage] for stage in stages)
        )
        samples = max(assigned.samples[dp] for _, dp in there)
        share = max(busy[rank] for rank in mine) / max(busy)
        parts.append(OfferPart(pools[key], len(mine), samples, layers, share))
    return parts


def _largest(found: Candidate) -> Step:
    if found.assigned is None:
        return found.step
    return replace(found.step, largest_share=max(found.assigned.samples))


def _fullest(found: Candidate) -> tuple[Mapping[str, float], int]:
    """Bytes of the GPU that needs most of what there is on it, by what they are for; and what there
    is."""
    layout, step, work = found.layout, found.step, found.there.every.work
    assigned = found.assigned
    if assigned is None:
        return memory.parts(work, layout, step), found.there.memory_bytes
    asked = set()
    blocks_at = unequal_shares.blocks_at(layout, assigned.layers)
    for worker, (pp, dp) in zip(assigned.ranks, grid.stages_and_shares(layout), strict=True):
        room = found.there.memory.get(worker.node_id, 0)
        asked.add((room, assigned.samples[dp], blocks_at[pp]))
    even = -(-work.n_blocks // layout.pp)

    def held(share: int, blocks: int) -> Mapping[str, float]:
        deep = replace(work, n_blocks=blocks * layout.pp) if blocks > even else work
        return memory.parts(deep, layout, replace(step, largest_share=share))

    found_parts = [(held(share, blocks), room) for room, share, blocks in asked]
    return max(found_parts, key=lambda one: sum(one[0].values()) / (one[1] or INF))


def _lone_s(found: Candidate) -> float:
    """Of a step where each GPU alone does as much of it as it can."""
    there, step = found.there, _largest(found)
    if found.assigned is None:
        site = there.site(found.layout.world_size)
        return there.every.cache.lone_s(site, step, found.layout.world_size)
    count = Counter(there.every.kind_of[worker.node_id] for worker in found.assigned.ranks)
    lone = {kind: there.every.cache.lone_s(there.site(kind=kind), step, 1) for kind in count}
    return 1 / sum(n / lone[kind] for kind, n in count.items())


def _mfu(found: Candidate, parts: Sequence[OfferPart], groups: Sequence[NodeGroup]) -> float:
    job = found.there.every.job
    peaks = {group.pool: group.hardware.peak(job.precision) for group in groups}
    flop_per_s = sum(peaks[part.pool] * part.n_gpus for part in parts)
    return found.cost.flop / found.cost.step_s / flop_per_s if flop_per_s else 0.0
