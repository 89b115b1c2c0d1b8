"""Seconds of an optimizer step, part by part: one formula per function, each with its source.

The parts add up to the step. Collectives that run under computation count where they are longer,
and by what the two cost each other (Kernels.crowd); what is waited for counts wholly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2

from elastic.planner.cost import compute
from elastic.planner.cost.collectives import (
    Links,
    RankGroup,
    commit_s,
    exchange_s,
    gather_s,
    reduce_s,
    send_s,
    under,
)
from elastic.planner.cost.compute import BlockTimes, ComputeTarget
from elastic.planner.cost.kernels import Kernels
from elastic.planner.cost.memory import ShardRanks, Step, held, of_block, zero_stage
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.stage_balance import balanced, loads_at
from elastic.reshard.owner_exchange import BUCKET_BYTES
from elastic.types import Layout, SampleProfile

GRADIENT_BYTES = 4  # of an element, as gradients are summed
HOST_LINK_BYTES_PER_S = 2.5e10  # PCIe 4 x16, where nothing else is known
# of a host's memory, two sockets with eight channels of DDR4 at half of their peak
HOST_BYTES_PER_S = 2e11


@dataclass(frozen=True, eq=False)
class Site:
    """What a layout runs on: equal GPUs in equal nodes."""

    chip: ComputeTarget
    per_node: int

    @property
    def kernels(self) -> Kernels:
        return self.chip.kernels

    @cached_property
    def links(self) -> Links:
        return Links.of(self.chip.gpu, self.chip.kernels, self.per_node)


def bubble(layout: Layout, n_microbatches: int) -> float:
    """Idle part of a pipeline, as a share of the useful time: (pp - 1) / (v m) for v stages per
    rank (Narayanan et al. 2021, section 2.2)."""
    return (layout.pp - 1) / max(1, n_microbatches) * layout.pp / layout.n_stages


def tp_s(site: Site, sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a microbatch's tp in one block: two all-reduces of the hidden state forward and
    two backward (Shoeybi et al. 2019, section 3; with sequence parallelism as many bytes,
    Korthikanti et al. 2022, section 4.2.2); two more where the block is computed again."""
    if layout.tp == 1:
        return 0.0
    times = 6 if layout.activation_checkpointing == "full" else 4
    n_bytes = step.n_rows * sample.hidden_bytes / layout.cp
    waits = (
        times * reduce_s(site.links, n_bytes, RankGroup(layout.tp)) * (1 - site.kernels.tp_hidden)
    )
    return waits + _dispatch_s(site, sample)


def _dispatch_s(site: Site, sample: SampleProfile) -> float:
    """Of a block's passes under tp: what DTensor's dispatch adds to each operation on the host,
    where nothing hides it: on a CPU, slowed as computation is by the other processes."""
    crowded = site.chip.gpu.crowded_passes
    if not crowded:
        return 0.0
    n_ops = sample.n_ops + len(sample.matmuls) + len(sample.attentions)
    return 3 * n_ops * site.kernels.dispatch_s * crowded[0][1] / crowded[-1][1]


def cp_s(site: Site, sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a microbatch's cp in one block: keys and values are gathered forward and backward,
    their gradients scattered in float32 (Grattafiori et al. 2024, section 3.3.2;
    elastic/models/attention.py)."""
    if layout.cp == 1:
        return 0.0
    n_bytes, group = (
        step.n_rows * sample.key_value_bytes / layout.tp,
        RankGroup(layout.cp, layout.tp),
    )
    return 2 * gather_s(site.links, n_bytes, group) + gather_s(
        site.links, n_bytes * 4 / step.compute_bytes, group
    )


def ep_s(site: Site, sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a microbatch's experts in one block: tokens go to their experts and back, forward
    and backward (Lepikhin et al. 2020, section 3.2)."""
    n_bytes = routed_bytes(sample, layout, step)
    if not n_bytes:
        return 0.0
    group = RankGroup(layout.ep, layout.tp)
    return exchanges_of(layout) * exchange_s(site.links, n_bytes, group)


def exchanges_of(layout: Layout) -> int:
    """Of a microbatch's tokens in one block: a forward pass that is done again sends again."""
    return 6 if layout.activation_checkpointing == "full" else 4


def routed_bytes(sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Of the tokens of a microbatch that go to experts in one block, each as often as it does; 0
    where all experts are on each rank."""
    routed = [product for product in sample.matmuls if product.experts]
    if layout.ep == 1 or not routed:
        return 0.0
    return routed[0].rows * routed[0].k * step.compute_bytes * step.n_rows / layout.cp / layout.tp


def pp_s(site: Site, sample: SampleProfile, layout: Layout, *, step: Step) -> float:
    """Seconds of a microbatch in pp: a hidden state is sent forward and its gradient back at each
    end of each of a rank's v stages (Narayanan et al. 2021, sections 2.2.2 and 3.2)."""
    if layout.pp == 1:
        return 0.0
    hidden = (
        step.n_rows
        * sample.hidden_bytes
        / layout.cp
        / (layout.tp if sample.sequence_parallel else 1)
    )
    stride = layout.world_size // layout.pp
    return 2 * layout.n_stages / layout.pp * send_s(site.links, hidden, stride)


@dataclass(frozen=True)
class Shards:
    """Seconds of sharded data parallelism: of one block's gather and of its scatter, of the sum
    over replicas per step."""

    gather: float
    scatter: float
    replicas: float


def shards(site: Site, work: ModelCost, layout: Layout, *, step: Step) -> Shards:
    """What is gathered (in the computation's dtype) and scattered (in float32) of one block;
    replicas add up their shards once a step."""
    low, links = work.computed(step.compute_bytes), site.links
    wide = GRADIENT_BYTES / max(1.0, work.element_bytes)
    n, ranks = layout.dp_shard * layout.cp, ShardRanks.of(work, layout)
    group = RankGroup(n, layout.tp)
    over = RankGroup(max(1, n // layout.ep), layout.tp * layout.ep)
    one, name = of_block(work, layout), "reduce_scatter"
    experts = one.experts * ranks.padding
    gather = gather_s(links, one.dense * low, group) + gather_s(links, experts * low, over)
    scatter = gather_s(links, one.dense * wide * work.trained, group, name=name) + gather_s(
        links, experts * wide * work.trained, over, name=name
    )
    replicated = RankGroup(layout.dp_replicate, layout.tp * n)
    own = ranks.shard(held(work, layout)) * wide * work.trained
    return Shards(gather, scatter, reduce_s(links, own, replicated))


def optimizer_s(site: Site, work: ModelCost, layout: Layout) -> float:
    """Parameters, gradients and entries are read, all but the gradients written, a low-precision
    copy written (Adam: 30 bytes a parameter)."""
    mine = held(work, layout)
    own = ShardRanks.of(work, layout).shard(mine) if zero_stage(layout) else mine.total
    own *= work.trained
    rate = site.chip.gpu.memory_bytes_per_s * site.kernels.bandwidth
    return own * (3.5 + 2 * work.entries) / rate if rate else 0.0


def owners_s(site: Site, work: ModelCost, layout: Layout) -> float:
    """What is stepped whole (elastic/worker/state/owner_update.py): a rank sends its piece of the
    gradients and values that owners of its replica gather, and gets the values of its shard; the
    busiest owner has its share of the FLOPs, or the largest tensor's. Of several buckets the first
    one's way there and the last one's way back are waited for; else the longer of the two counts,
    what is sent or what is computed."""
    if not work.whole:
        return 0.0
    n, stage = layout.world_size // layout.pp, work.whole / layout.pp
    group, shard = RankGroup(n), stage * layout.dp_replicate / n
    gathered = exchange_s(site.links, 2 * shard / layout.dp_replicate, group)
    gpu = site.chip.gpu
    rate = gpu.peak("float32") * (gpu.reached or 1.0) * site.kernels.matmul
    busiest = max(work.whole_flop / layout.pp / n, work.most_flop) / rate
    sent = gathered + exchange_s(site.links, shard, group)
    waited = sent / max(1, ceil(2 * stage / n / BUCKET_BYTES))
    return waited + max(busiest, sent - waited)


def slowest_stage(
    n_blocks: int, layout: Layout, ends: float, *, loads: tuple[float, ...] = ()
) -> float:
    """Blocks of the slowest rank of a pipeline, the head counted as `ends` blocks, where the last
    rank has fewer blocks for it; they are assigned whole, or in parts of a rank's v stages.
    `loads`: of each block, where they are not alike."""
    if loads:
        at = loads_at(layout, balanced(loads, layout.n_stages, ends), loads)
        return max(*at[:-1], at[-1] + ends)
    v, pp = layout.n_stages // layout.pp, layout.pp
    fewest, even = max(0, n_blocks // pp - ceil(ends)), n_blocks // pp
    return min(
        max(last + ends, ceil((n_blocks - last) / (pp - 1) / v) * v)
        for last in range(fewest, even + 1)
    )


def offload_s(site: Site, work: ModelCost, layout: Layout, *, m: int) -> float:
    """FSDP2's CPU offload: a rank's parameters go up for both passes of each microbatch, its
    gradients down once, and the optimizer runs at the bandwidth of the host's memory, which the
    node's GPUs share."""
    if not layout.offload:
        return 0.0
    shard = ShardRanks.of(work, layout).shard(held(work, layout))
    link = site.chip.gpu.host_bytes_per_s or HOST_LINK_BYTES_PER_S
    updated = shard * work.trained * (3.5 + 2 * work.entries) / (HOST_BYTES_PER_S / site.per_node)
    return shard * (2 * m + work.trained) / link + updated


def added_bytes(work: ModelCost, layout: Layout) -> float:
    """Gradients of each further microbatch are read in the computation's dtype and added to the
    sum, which stage 2 and 3 have cut already."""
    mine, cut = held(work, layout), 1 if zero_stage(layout) < 2 else layout.dp_shard * layout.cp
    return mine.total * work.trained / cut / max(1.0, work.element_bytes) * (2 + 2 * GRADIENT_BYTES)


def accumulate_s(site: Site, n_bytes: float, m: int) -> float:
    """`n_bytes` as added_bytes, for m microbatches."""
    rate = site.chip.gpu.memory_bytes_per_s * site.kernels.bandwidth
    return (m - 1) * n_bytes / rate if rate else 0.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a step by what they are for; `flop` is the model's own, nothing counted twice."""

    parts: Mapping[str, float]
    flop: float = 0.0

    @cached_property
    def step_s(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a microbatch in one block, whatever else the layout says: its passes, attention
    with what cp adds, tp, cp, ep; and of the head (`ends`)."""

    passes: BlockTimes
    attends: float
    tp: float
    cp: float
    ep: float
    ends: float

    @classmethod
    def of(
        cls, site: Site, work: ModelCost, layout: Layout, *, step: Step, passes: BlockTimes
    ) -> BlockCost:
        sample = work.sample
        assert sample is not None
        attends = passes.attention + passes.backward - 2 * (passes.products + passes.moved)
        cp = under(attends, cp_s(site, sample, layout, step), site.kernels.crowd) - attends
        tp, ep = tp_s(site, sample, layout, step), ep_s(site, sample, layout, step)
        ends = compute.ends_s(site.chip, sample, layout, n_rows=step.n_rows)
        return cls(passes, attends, tp, cp, ep, ends)


@dataclass(frozen=True)
class LayoutCost:
    """What of a step hangs neither on microbatches nor on activation checkpointing: seconds, and of
    gradients the bytes that are moved where those of one more microbatch are added."""

    shards: Shards
    commit: float
    optimizer: float
    added_bytes: float

    @classmethod
    def of(cls, site: Site, work: ModelCost, layout: Layout, *, step: Step) -> LayoutCost:
        return cls(
            shards(site, work, layout, step=step),
            commit_s(site.links, layout.world_size),
            owners_s(site, work, layout)
            + (0.0 if layout.offload else optimizer_s(site, work, layout)),
            added_bytes(work, layout),
        )


def step_cost(
    site: Site,
    work: ModelCost,
    layout: Layout,
    *,
    step: Step,
    block: BlockCost | None = None,
    whole: LayoutCost | None = None,
) -> Cost:
    """Of a model whose sample profile is known. The pipeline runs at the pace of its slowest stage,
    the last one with the head or one with a block more; the others wait. `block`, `whole`: where
    they are known already."""
    sample, m = work.sample, step.n_microbatches
    assert sample is not None
    if block is None:
        passes = compute.block_s(
            site.chip, sample, layout, n_rows=step.n_rows, n_blocks=work.n_blocks
        )
        block = BlockCost.of(site, work, layout, step=step, passes=passes)
    whole = whole or LayoutCost.of(site, work, layout, step=step)
    passes, ends, blocks = block.passes, block.ends, work.n_blocks / layout.pp
    one = passes.busy + block.tp + block.cp + block.ep
    mean = blocks * one + ends / layout.pp
    slowest = mean
    if layout.pp > 1:
        slowest = one * slowest_stage(work.n_blocks, layout, ends / one, loads=passes.loads(work))
    pp = pp_s(site, sample, layout, step=step) + (
        site.kernels.microbatch_s if layout.pp > 1 else 0.0
    )
    parts = {
        "products": m * (blocks * 3 * passes.products + ends / layout.pp),
        "attention": m * blocks * block.attends,
        "moved": m * blocks * 3 * passes.moved,
        "recomputed": m * blocks * passes.again,
        "tp": m * blocks * block.tp, "cp": m * blocks * block.cp, "ep": m * blocks * block.ep,
        "pp": m * pp,
        "uneven": m * (slowest - mean),
        "accumulate": accumulate_s(site, whole.added_bytes, m),
        "bubble": (layout.pp * mean - slowest + (layout.pp - 1) * pp) * layout.pp / layout.n_stages,
        "fsdp": _fsdp_s(site, layout, passes, m=m, blocks=blocks, of=whole.shards),
        "replicas": _replicas_s(site, work, layout, passes=passes, of=whole.shards),
        "commit": whole.commit,
        "optimizer": whole.optimizer,
        "offload": offload_s(site, work, layout, m=m),
    }  # fmt: skip
    nodes = max(1.0, layout.world_size / site.per_node)
    parts["jitter"] = sum(parts.values()) * site.kernels.jitter * log2(nodes)
    return Cost(parts, sample.flop * step.global_batch)


def _fsdp_s(
    site: Site, layout: Layout, passes: BlockTimes, *, m: int, blocks: float, of: Shards
) -> float:
    """What gathering and scattering add to the computation that they run under, block by block
    (Zhao et al. 2023, section 3.3); as often as the ZeRO stage says (docs/memory.md; Rajbhandari et
    al. 2020, section 7)."""
    if layout.dp_shard * layout.cp == 1:
        return 0.0
    crowd, stage = site.kernels.crowd, zero_stage(layout)
    ahead, back = passes.forward, passes.backward + passes.again
    gathered = under(ahead, of.gather, crowd) - ahead
    regathered = under(back, of.gather + of.scatter, crowd) - back
    scattered = under(back, of.scatter, crowd) - back
    first = of.gather + of.scatter  # of the first and last block nothing hides
    if stage == 3:
        return m * (blocks * (gathered + regathered) + first)
    if stage == 2:
        return m * (blocks * (gathered + scattered) + first)
    hidden = site.kernels.dp_hidden
    alone = blocks * (of.gather + of.scatter if stage else 2 * of.scatter)
    covered = min(alone, hidden * blocks * (ahead + back))
    return alone - covered + crowd * covered


def _replicas_s(
    site: Site, work: ModelCost, layout: Layout, *, passes: BlockTimes, of: Shards
) -> float:
    """What the sum over replicas adds to the last microbatch's backward pass."""
    if layout.dp_replicate == 1:
        return 0.0
    alone = of.replicas
    covered = min(alone, site.kernels.dp_hidden * work.n_blocks / layout.pp * passes.backward)
    return alone - covered + site.kernels.crowd * covered
