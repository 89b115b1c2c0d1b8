"""Bytes of a GPU: one formula per function. What a sample asks may not be known: activations then
count as none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from elastic.planner.cost.model_cost import ModelCost
from elastic.reshard.communicators import CONTEXT_BYTES, running_bytes
from elastic.types import DTYPE_BYTES, Layout, SampleProfile

USABLE = 0.92  # of a GPU's memory: the rest is CUDA's, NCCL's, and lies between allocations
# of a block's activations, which tp without sequence parallelism leaves whole
WHOLE_SHARE = 10 / 34


@dataclass(frozen=True)
class Step:
    """How a step is shared out. `n_gpus`: of the smallest node; `dtype`: in which forward and
    backward pass are computed."""

    n_microbatches: int
    largest_share: int  # samples of a step that one data-parallel rank has
    global_batch: int
    n_gpus: int = 8
    dtype: str = "float32"

    @property
    def n_rows(self) -> int:
        """Samples that a rank computes at once."""
        return ceil(self.largest_share / self.n_microbatches)

    @property
    def compute_bytes(self) -> int:
        return 2 if self.dtype in ("float8", "float4") else DTYPE_BYTES[self.dtype]


def usable_bytes(memory_bytes: int, layout: Layout, on_gpus: bool = True) -> float:
    """Of a GPU, for what torch allocates: less than USABLE of a small one, where NCCL's
    communicators and CUDA's context need more than the rest."""
    beside = CONTEXT_BYTES + running_bytes(layout, layout.world_size) if on_gpus else 0
    return min(USABLE * memory_bytes, max(0, memory_bytes - beside))


def zero_stage(layout: Layout) -> int:
    """Torch's pipeline schedules keep parameters and gradients whole until the last microbatch,
    whatever is asked for."""
    return min(1, layout.zero_stage) if layout.pp > 1 else layout.zero_stage


@dataclass(frozen=True)
class HeldBytes:
    """Parameter bytes (as stored) of one stage of a rank before dp cuts them: dense ones, and
    experts, which ep has cut."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def gathered(self, ranks: ShardRanks) -> float:
        """From all ranks."""
        return self.dense + self.experts * ranks.padding


@dataclass(frozen=True)
class ShardRanks:
    """Of a stage over the ranks of dp_shard and cp. `dense`: of how many each has an equal part;
    `experts`: as many, by the rank that has most; `padding`: by how much longer gathered experts
    are than without what fills up the last parts. FSDP2 cuts stacked experts between two, and of
    fewer than there are ranks the last ones have none."""

    dense: int
    experts: float
    padding: float

    @classmethod
    def of(cls, work: ModelCost, layout: Layout) -> ShardRanks:
        n, mine = layout.dp_shard * layout.cp, work.model.n_experts // layout.ep
        there = max(1, n // layout.ep)
        experts = mine / ceil(mine / there) if mine else there
        return cls(n, experts, there / experts)

    def shard(self, held: HeldBytes) -> float:
        """The largest one."""
        return held.dense / self.dense + held.experts / self.experts


def held(work: ModelCost, layout: Layout, depth: int | None = None) -> HeldBytes:
    """Of the stage that has most: the first or the last one. `depth`: blocks of a stage, None = of
    an even one."""
    blocks = ceil(work.n_blocks / layout.pp) if depth is None else depth
    one = of_block(work, layout)
    first, last, tied = (part.on(layout.tp) for part in (work.first, work.last, work.tied))
    ends = first + last - tied if layout.pp == 1 else max(first, last)
    return HeldBytes(blocks * one.dense + ends, blocks * one.experts)


def of_block(work: ModelCost, layout: Layout) -> HeldBytes:
    """Of a mean one. Experts are not cut by tp where ep cuts them."""
    experts = work.experts.total / layout.ep if layout.ep > 1 else work.experts.on(layout.tp)
    return HeldBytes(work.block.on(layout.tp), experts)


def state_parts(
    work: ModelCost, layout: Layout, low: float, *, depth: int | None = None
) -> dict[str, float]:
    """Bytes of a rank without activations. Its shard of parameters, gradients and optimizer entries
    (in host memory under `offload`: not counted); where they are sharded, also what is gathered, in
    the dtype of the computation (`low` of the stored one), as in ZeRO (Rajbhandari et al. 2020,
    section 3): at stage 3 one block twice (the running one and the prefetched one) and what is
    outside of the blocks, at stage 2 all parameters, at stage 1 all gradients too. What is outside
    of the blocks is one unit of FSDP2, from the first of the forward pass to the last of the
    backward one: the head's gradient waits there for that of the embedding. Stage 0: nothing is
    sharded. One layer of 4 bits is unpacked at a time. `depth`: as in `held`."""
    ranks, stage = ShardRanks.of(work, layout), zero_stage(layout)
    mine, block = held(work, layout, depth), of_block(work, layout)
    own = ranks.shard(mine) if stage else mine.total
    parts = {
        "parameters": own,
        "gradients": own * work.trained,
        "optimizer": own * work.trained * work.entries,
    }
    if layout.offload:
        parts = dict.fromkeys(parts, 0.0)
    sharded, whole = ranks.dense > 1 or layout.offload, mine.gathered(ranks) * low
    first, last, tied = (part.on(layout.tp) for part in (work.first, work.last, work.tied))
    head = last * work.trained * low  # its gradient
    gathered = {
        0: 0.0,
        1: whole + mine.total * work.trained,
        2: whole + head,
        3: (2 * block.gathered(ranks) + first + last - tied) * low + head,
    }[stage]
    if not sharded:  # what is computed with, beside the stored ones
        gathered = 0.0 if low >= 1 else gathered if stage == 3 else whole
    return parts | {"gathered": gathered + work.unpacked_bytes / layout.tp}


def kept_bytes(sample: SampleProfile, layout: Layout, mode: str) -> float:
    """Of one sample in one block. cp divides all of it (Llama 3: Grattafiori et al. 2024, section
    3.3.2); tp with sequence parallelism too, without it 24 parts of 34 (Korthikanti et al. 2022,
    sections 4.2.1 and 4.2.2), and of `full`, which keeps the block's input, nothing."""
    whole = (
        0.0
        if sample.sequence_parallel or layout.tp == 1
        else 1.0
        if mode == "full"
        else WHOLE_SHARE
    )
    return dict(sample.kept_bytes)[mode] / layout.cp * (whole + (1 - whole) / layout.tp)


def all_at_once(layout: Layout, n_microbatches: int) -> bool:
    """Do all forward passes come before the first backward pass, as under GPipe?"""
    few = n_microbatches < layout.pp and layout.n_stages == layout.pp
    return layout.pp > 1 and (layout.schedule == "gpipe" or few)


def in_flight(layout: Layout, n_microbatches: int, *, last: bool = False) -> float:
    """Microbatches whose activations the first rank of a pipeline (`last`: the last one) keeps at
    once, in stages of 1/pp of the blocks: all under GPipe, pp (1) under 1F1B (Narayanan et al.
    2021, section 2.2.1), pp + (pp - 1)/v (pp - (pp - 1)/v) under the interleaved one (Korthikanti
    et al. 2022, 4.2.3)."""
    if layout.pp == 1:
        return 1.0
    if all_at_once(layout, n_microbatches):
        return float(n_microbatches)
    more = (layout.pp - 1) * layout.pp / layout.n_stages
    if last:
        more = -more
    elif layout.n_stages == layout.pp:
        more = 0.0
    return min(float(n_microbatches), layout.pp + more)


def ends_bytes(sample: SampleProfile, layout: Layout) -> float:
    """Of one sample outside of the blocks, logits above all: cp divides them; tp does where they
    stay cut for the loss."""
    return sample.ends_bytes / layout.cp / (layout.tp if sample.loss_parallel else 1)


def activation_parts(
    work: ModelCost, layout: Layout, step: Step, *, depth: int | None = None
) -> dict[str, float]:
    """Of the pipeline stage that keeps most: the first has most microbatches in flight, the last
    has the logits, of all microbatches where none goes backward before. Where blocks are computed
    again, one of them has all of its activations for that time (Chen et al. 2016, section 3); by
    then the logits of its microbatch are gone. `depth`: as in `held`."""
    sample, mode = work.sample, layout.activation_checkpointing
    if sample is None:
        return {"activations": 0.0, "logits": 0.0, "again": 0.0}
    kept, none = kept_bytes(sample, layout, mode), kept_bytes(sample, layout, "none")
    blocks = (ceil(work.n_blocks / layout.pp) if depth is None else depth) * kept
    m, ends = step.n_microbatches, ends_bytes(sample, layout)
    first, last = (blocks * in_flight(layout, m, last=end) for end in (False, True))
    others = (m - 1) * ends if all_at_once(layout, m) else 0.0
    rows, again = step.n_rows, max(0.0, none - kept)
    if layout.pp > 1 and first >= last + others + ends:
        return {"activations": rows * first, "logits": 0.0, "again": rows * again}
    return {
        "activations": rows * last,
        "logits": rows * (others + max(0.0, ends - again)),
        "again": rows * again,
    }


def parts(work: ModelCost, layout: Layout, step: Step) -> Mapping[str, float]:
    """Bytes of a GPU by what they are for."""
    low = work.computed(step.compute_bytes)
    return state_parts(work, layout, low) | activation_parts(work, layout, step)


def memory_bytes(work: ModelCost, layout: Layout, dtype: str = "float32") -> int:
    """Of a rank without activations."""
    return int(state_bytes(work, layout, dtype))


def state_bytes(work: ModelCost, layout: Layout, dtype: str, *, depth: int | None = None) -> float:
    """Of a rank without activations, where its stage has so many blocks (None = an even one)."""
    low = work.computed(Step(1, 1, 1, dtype=dtype).compute_bytes)
    return sum(state_parts(work, layout, low, depth=depth).values())


def activation_bytes(work: ModelCost, layout: Layout, step: Step) -> int:
    return int(sum(activation_parts(work, layout, step).values()))


def stage_bytes(work: ModelCost, layout: Layout, step: Step, *, n_blocks: int) -> int:
    """Of a rank that has so many blocks, and the larger one of what is before and what is behind
    them; as many microbatches in flight as at the first stage."""
    active = sum(activation_parts(work, layout, step, depth=n_blocks).values())
    return int(state_bytes(work, layout, step.dtype, depth=n_blocks) + active)
