"""Layouts over GPUs of several kinds: unequal batch shares of a step, or pipeline stages of unequal
depth, so that all end at once.

Every data-parallel rank lies within one kind under unequal batch shares (the same number of
microbatches everywhere, of unequal size); under unequal stages each stage does. Collectives over
all of them run at the pace of the slowest links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from elastic.errors import InfeasiblePlan
from elastic.planner.cost import compute, memory
from elastic.planner.cost import step_cost as cost
from elastic.planner.cost.block_cost_cache import BlockCostCache
from elastic.planner.cost.memory import Step
from elastic.planner.cost.step_cost import Cost, Site, step_cost
from elastic.planner.hetero import hetero_shares
from elastic.planner.layout_search import site_of
from elastic.planner.layout_space import Space
from elastic.planner.offers import NodeGroup, OfferPart
from elastic.planner.step_split import step_of
from elastic.types import HardwareProfile, Job, Layout

MODES = ("none", "selective", "full")
MOST_MICROBATCHES = 10  # numbers of them that are tried


@dataclass(frozen=True)
class HeteroOffer:
    """A layout over several kinds, costed."""

    layout: Layout
    step: Step
    cost: Cost
    memory: Mapping[str, float]
    parts: tuple[OfferPart, ...]
    lone_s: float
    room_bytes: int


@dataclass(frozen=True)
class Kind:
    """All GPUs of one kind in a pool."""

    site: Site
    groups: tuple[NodeGroup, ...]

    @property
    def n_gpus(self) -> int:
        return sum(group.n_gpus for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        return self.site.chip.gpu.memory_bytes

    def room(self, layout: Layout) -> float:
        chip = self.site.chip
        return (
            memory.usable_bytes(chip.gpu.memory_bytes, layout, chip.on_gpu)
            if chip.gpu.memory_bytes
            else float("inf")
        )


def kinds_of(job: Job, pool: Sequence[NodeGroup]) -> tuple[Kind, ...]:
    """The fastest first; all with the links of the slowest between nodes."""
    slowest = min(group.hardware.link_bytes_per_s for group in pool)
    found: dict[HardwareProfile, list[NodeGroup]] = {}
    for group in pool:
        found.setdefault(group.hardware, []).append(group)
    made = [
        Kind(
            site_of(
                job, replace(gpu, link_bytes_per_s=slowest), min(g.gpus_per_node for g in groups)
            ),
            tuple(groups),
        )
        for gpu, groups in found.items()
    ]
    return tuple(sorted(made, key=lambda kind: -kind.site.chip.gpu.peak(kind.site.chip.dtype)))


def taken(pool: Sequence[NodeGroup], n_gpus: int) -> Iterator[tuple[NodeGroup, int]]:
    """How many GPUs of each group are used, in order."""
    for group in pool:
        n = min(group.n_gpus, n_gpus)
        n_gpus -= n
        if n:
            yield group, n


def peak_of(pool: Sequence[NodeGroup], name: str, job: Job) -> float:
    """FLOP/s of a GPU of that group in the job's precision."""
    group = next(group for group in pool if group.pool == name)
    return site_of(job, group.hardware, group.gpus_per_node).chip.gpu.peak(job.precision)


def layouts(
    cache: BlockCostCache, job: Job, pool: Sequence[NodeGroup], *, worst: Callable[[], float]
) -> Iterator[HeteroOffer]:
    """`worst`: a step that takes longer than these seconds is of no interest (any more)."""
    kinds = kinds_of(job, pool)
    sizes = tuple(sorted({group.gpus_per_node for group in pool}))
    space = Space.on(cache.work.model, job, sizes)
    for tp in space.tps():
        for cp in space.cps(tp):
            if any(tp * cp > kind.site.per_node for kind in kinds):
                continue
            for pp in space.pps(min(kind.n_gpus for kind in kinds) // (tp * cp)):
                shape = Layout(**{**space.pins, "tp": tp, "cp": cp, "pp": pp})
                yield from _shared(cache, job, kinds, shape=shape, worst=worst)
            if cache.work.model.pipeline and not cache.work.model.no_pp and "pp" not in space.pins:
                yield from _staged(
                    cache,
                    job,
                    kinds,
                    shape=Layout(**{**space.pins, "tp": tp, "cp": cp}),
                    worst=worst,
                )


# ------------------------------------------------------------------------------------------ unequal
# batch shares


def _shared(
    cache: BlockCostCache,
    job: Job,
    kinds: tuple[Kind, ...],
    *,
    shape: Layout,
    worst: Callable[[], float],
) -> Iterator[HeteroOffer]:
    inner, batch = shape.tp * shape.cp * shape.pp, job.global_batch
    ranks = [kind.n_gpus // inner for kind in kinds]
    if not all(ranks) or sum(ranks) > batch:
        return
    shape = replace(shape, dp_shard=sum(ranks))
    if not _allowed(cache, job, shape, kinds=kinds):
        return
    for mode in _modes(job):
        if (
            _least_s(
                cache,
                kinds,
                [n * shape.pp for n in ranks],
                layout=replace(shape, activation_checkpointing=mode),
                batch=batch,
            )
            > worst()
        ):
            continue
        for m in _numbers(batch, shape):
            found = _shares(
                cache,
                kinds,
                ranks,
                layout=replace(shape, activation_checkpointing=mode),
                split=(m, batch),
                worst_s=worst(),
            )
            if found is not None:
                yield found


def _shares(
    cache: BlockCostCache,
    kinds: tuple[Kind, ...],
    ranks: list[int],
    *,
    layout: Layout,
    split: tuple[int, int],
    worst_s: float,
) -> HeteroOffer | None:
    """None where it does not fit, or where the blocks' computation alone takes longer than
    `worst_s`."""
    m, batch = split
    even = max(1, batch // m // sum(ranks))
    speeds = []
    for kind in kinds:
        one = cache.block_s(kind.site, layout, even)
        speeds.append(even / one.busy)
    rows = rows_of(batch // m, ranks, speeds)
    passes = [cache.block_s(kind.site, layout, n_rows) for kind, n_rows in zip(kinds, rows)]
    if max(one.busy for one in passes) * m * cache.work.n_blocks / layout.pp > worst_s:
        return None
    worst: tuple[Cost, Step, Mapping[str, float], Kind] | None = None
    layout = replace(layout, microbatch_size=max(rows))
    steps = []
    for kind, n_rows, of in zip(kinds, rows, passes):
        step = Step(m, n_rows * m, batch, kind.site.per_node, kind.site.chip.dtype)
        held = memory.parts(cache.work, layout, step)
        if sum(held.values()) > kind.room(layout):
            return None
        found = step_cost(kind.site, cache.work, layout, step=step, passes=of)
        steps.append(found.step_s)
        if worst is None or found.step_s > worst[0].step_s:
            worst = found, step, held, kind
    assert worst is not None
    inner = layout.tp * layout.cp * layout.pp
    parts = tuple(
        OfferPart(group.pool, n, n_rows * m, (cache.work.n_blocks,), step_s / worst[0].step_s)
        for kind, n_ranks, n_rows, step_s in zip(kinds, ranks, rows, steps)
        for group, n in taken(kind.groups, n_ranks * inner)
    )
    return HeteroOffer(
        layout,
        worst[1],
        worst[0],
        worst[2],
        parts,
        _lone_s(cache, kinds, ranks, inner=inner, step=worst[1]),
        worst[3].memory_bytes,
    )


def rows_of(n_rows: int, ranks: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """The most rows that a rank of each kind has, where `n_rows` are dealt out over all ranks in
    proportion to their speeds, each further one where it is done first."""
    total = sum(n * speed for n, speed in zip(ranks, speeds))
    least = [max(1, int(n_rows * speed / total)) for speed in speeds]
    left = n_rows - sum(n * rows for n, rows in zip(ranks, least))
    most = list(least)
    for _, k in sorted(
        ((rows + 1) / speed, k) for k, (rows, speed) in enumerate(zip(least, speeds))
    ):
        if left <= 0:
            break
        most[k] += 1
        left -= ranks[k]
    return most


# ------------------------------------------------------------------------------------------ unequal
# stages


def _staged(
    cache: BlockCostCache,
    job: Job,
    kinds: tuple[Kind, ...],
    *,
    shape: Layout,
    worst: Callable[[], float],
) -> Iterator[HeteroOffer]:
    """Every pipeline goes through all kinds; the fastest one has the last stages, which also have
    the head."""
    inner, batch = shape.tp * shape.cp, job.global_batch
    if any(kind.n_gpus % inner for kind in kinds):
        return
    most = gcd(*(kind.n_gpus // inner for kind in kinds))
    for dp in (n for n in hetero_shares.divisors(most) if n <= batch):
        stages = [kind.n_gpus // inner // dp for kind in reversed(kinds)]
        if sum(stages) > cache.work.n_blocks:
            continue
        layout = replace(shape, pp=sum(stages), dp_shard=dp, zero_stage=1)
        if not _allowed(cache, job, layout, kinds=kinds):
            continue
        for mode in _modes(job):
            ranks = [n * dp for n in reversed(stages)]
            if (
                _least_s(
                    cache,
                    kinds,
                    ranks,
                    layout=replace(layout, activation_checkpointing=mode),
                    batch=batch,
                )
                > worst()
            ):
                continue
            for m in _numbers(batch, layout):
                if m < layout.pp:
                    continue
                chosen = replace(
                    layout, activation_checkpointing=mode, microbatch_size=-(-batch // m // dp)
                )
                found = _stages(
                    cache,
                    tuple(reversed(kinds)),
                    stages,
                    layout=chosen,
                    step=Step(m, -(-batch // m // dp) * m, batch),
                )
                if found is not None:
                    yield found


def _stages(
    cache: BlockCostCache, kinds: tuple[Kind, ...], stages: list[int], *, layout: Layout, step: Step
) -> HeteroOffer | None:
    work, m = cache.work, step.n_microbatches
    assert work.sample is not None
    step = replace(step, dtype=kinds[0].site.chip.dtype)
    ones = [_block_s(cache, kind.site, layout, step=step) for kind in kinds]
    speeds = [1 / one for one, n in zip(ones, stages) for _ in range(n)]
    layers = hetero_shares.shares(work.n_blocks, speeds)
    ends = compute.ends_s(kinds[-1].site.chip, work.sample, layout, n_rows=step.n_rows)
    seconds = [n / speed for n, speed in zip(layers, speeds)]
    seconds[-1] += ends
    slowest, at = max(seconds), 0
    parts: list[OfferPart] = []
    fullest: tuple[float, Mapping[str, float], Kind] = (0.0, {}, kinds[0])
    for kind, n in zip(kinds, stages):
        mine = tuple(layers[at : at + n])
        # stages as deep as its deepest
        virtual = replace(layout, pp=max(1, round(work.n_blocks / max(mine))))
        needs = (
            memory.parts(work, virtual, step)
            if work.n_blocks > max(mine)
            else memory.parts(work, layout, step)
        )
        room = kind.room(layout)
        if sum(needs.values()) > room:
            return None
        if (share := sum(needs.values()) / room) >= fullest[0]:
            fullest = share, needs, kind
        share = max(seconds[at : at + n]) / slowest
        n_gpus = n * layout.tp * layout.cp * layout.dp
        parts += [
            OfferPart(group.pool, k, step.largest_share, mine, share)
            for group, k in taken(kind.groups, n_gpus)
        ]
        at += n
    base = step_cost(
        kinds[0].site,
        work,
        layout,
        step=step,
        passes=cache.block_s(kinds[0].site, layout, step.n_rows),
    )
    mean = sum(seconds) / len(seconds)
    waits = ("pp", "fsdp", "replicas", "optimizer", "offload")
    busy = {
        name: s
        for name, s in base.parts.items()
        if name not in (*waits, "uneven", "bubble", "jitter")
    }
    took = {name: base.parts[name] for name in waits} | {
        "uneven": m * (slowest - mean),
        "bubble": sum(seconds) - slowest,
    }
    took |= {name: s / sum(busy.values()) * m * mean for name, s in busy.items()}
    took["jitter"] = base.parts["jitter"] / base.step_s * sum(took.values())
    ranks = [n * layout.dp for n in stages]
    lone = _lone_s(cache, kinds, ranks, inner=layout.tp * layout.cp, step=step)
    return HeteroOffer(
        layout, step, Cost(took, base.flop), fullest[1], tuple(parts), lone, fullest[2].memory_bytes
    )


def _block_s(cache: BlockCostCache, site: Site, layout: Layout, *, step: Step) -> float:
    sample, one = cache.work.sample, cache.block_s(site, layout, step.n_rows)
    assert sample is not None
    waits = cost.tp_s(site, sample, layout, step) + cost.cp_s(site, sample, layout, step)
    return one.busy + waits


# ------------------------------------------------------------------------------------------ both


def _modes(job: Job) -> tuple[str, ...]:
    return (job.activation_checkpointing,) if job.activation_checkpointing else MODES


def _numbers(batch: int, layout: Layout) -> list[int]:
    """Of microbatches: divisors of the batch that leave every rank a sample, the fewest first."""
    fitting = [
        m for m in hetero_shares.divisors(batch) if batch // m >= layout.dp and m >= layout.pp
    ]
    if layout.microbatch_size:
        fitting = [m for m in fitting if -(-(batch // m) // layout.dp) <= layout.microbatch_size][
            :1
        ]
    return fitting[:MOST_MICROBATCHES]


def _allowed(cache: BlockCostCache, job: Job, layout: Layout, *, kinds: tuple[Kind, ...]) -> bool:
    try:
        step_of(
            cache.work.model,
            job,
            replace(layout, microbatch_size=0),
            per_node=min(kind.site.per_node for kind in kinds),
        )
    except InfeasiblePlan:
        return False
    return True


def _least_s(
    cache: BlockCostCache,
    kinds: Sequence[Kind],
    ranks: Sequence[int],
    *,
    layout: Layout,
    batch: int,
) -> float:
    """Of a step, the computation of the blocks alone, perfectly shared out over tp x cp groups,
    `ranks` of each kind."""
    rows, rate = max(1, batch // layout.dp), 0.0
    for kind, n in zip(kinds, ranks):
        one = cache.block_s(kind.site, layout, rows)
        rate += n * rows / one.busy
    return batch * cache.work.n_blocks / rate


def _lone_s(
    cache: BlockCostCache, kinds: Sequence[Kind], ranks: Sequence[int], *, inner: int, step: Step
) -> float:
    """Of a step where each GPU alone does as much of it as it can."""
    rates = sum(n * inner / cache.lone_s(kind.site, step, 1) for kind, n in zip(kinds, ranks))
    return 1 / rates if rates else 0.0
