"""Seconds of a GPU's computation: products, attention, and what only moves bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil

from elastic.planner.cost.kernels import TILE, Kernels
from elastic.planner.cost.memory import WHOLE_SHARE
from elastic.planner.cost.model_cost import ModelCost
from elastic.types import DTYPE_BYTES, Attention, HardwareProfile, Layout, Matmul, SampleProfile

LOW = {"float8": 1.0, "float4": 0.5}  # bytes of an element


@dataclass(frozen=True)
class ComputeTarget:
    """What computes: a GPU kind and the software on it. `dtype`: of the products (float8, float4:
    bfloat16 elsewhere)."""

    gpu: HardwareProfile
    kernels: Kernels
    dtype: str = "bfloat16"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: profiles are long to hash, and each product is looked up by it."""
        return hash((self.gpu, self.kernels, self.dtype))

    @property
    def on_gpu(self) -> bool:
        return self.gpu.accelerator_type != "CPU"

    @property
    def around(self) -> str:
        """The dtype of everything but the products."""
        return "bfloat16" if self.dtype in LOW else self.dtype


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block, by what is done. `again`: computed a second time in the backward pass."""

    products: float
    attention: float
    moved: float
    forward: float
    backward: float
    again: float

    def loads(self, work: ModelCost) -> tuple[float, ...]:
        """What each block takes, in mean ones; () = all are alike."""
        return work.loads(self.products + self.attention, self.moved)

    @property
    def busy(self) -> float:
        return self.forward + self.backward + self.again


@cache
def matmul_s(chip: ComputeTarget, rows: int, k: int, *, n: int, dtype: str = "") -> float:
    """[rows, k] x [k, n]. Tiles fill the multiprocessors in waves, the last of which may be partly
    empty (NVIDIA, Matrix Multiplication Background, section 4: tile and wave quantization); never
    faster than its operands can be read."""
    gpu, kernels = chip.gpu, chip.kernels
    dtype = dtype or chip.dtype
    flop, size = 2.0 * rows * k * n, LOW.get(dtype) or DTYPE_BYTES[dtype]
    share = {"float8": kernels.low8, "float4": kernels.low4}.get(dtype, kernels.matmul)
    speed: float = gpu.peak(dtype) * (gpu.reached or 1.0) * share
    tiles = ceil(rows / TILE[0]) * ceil(n / TILE[1])
    padded = tiles * TILE[0] * TILE[1] / (rows * n) if gpu.units else 1.0
    waves = ceil(tiles / gpu.units) * gpu.units / tiles if gpu.units else 1.0
    lost: float = (padded * waves) ** kernels.tail
    read_s = 0.0
    if gpu.memory_bytes_per_s:
        read_s = size * (rows * k + k * n + rows * n) / (gpu.memory_bytes_per_s * kernels.bandwidth)
    return max(flop / speed * lost, read_s) + (gpu.launch_s or kernels.launch_s)


def product_s(
    chip: ComputeTarget, product: Matmul, layout: Layout, *, n_rows: float, dtype: str = ""
) -> float:
    """`n_rows` samples of a product under the layout: cp divides its rows, tp what it cuts, ep the
    experts. The rows of experts are spread evenly."""
    rows = max(1.0, product.rows * n_rows / layout.cp)
    k = max(1, product.k // layout.tp) if product.cut == "k" else product.k
    n = max(1, product.n // layout.tp) if product.cut == "n" else product.n
    if product.experts:
        each = max(1, round(rows / product.experts * layout.ep))
        mine = max(1, product.experts // layout.ep)
        one = matmul_s(chip, each, k, n=n, dtype=dtype)
        # one launch, tiles of all experts side by side
        grouped = matmul_s(chip, each * mine, k, n=n, dtype=dtype)
        return product.count * max(grouped, mine * (one - chip.kernels.launch_s) * 0.5)
    return product.count * matmul_s(chip, round(rows), k, n=n, dtype=dtype)


def attention_s(
    chip: ComputeTarget, a: Attention, layout: Layout, *, n_rows: float, backward: bool
) -> float:
    """Of `n_rows` samples. Fused: 2.5 times the products in the backward pass (Dao 2023, section
    2.3). Not fused: products of all scores, masked ones too, and their bytes (counted as moved)."""
    kernels, gpu = chip.kernels, chip.gpu
    masked_too = 2 if a.causal and not a.window and not kernels.fused_attention else 1
    flop = a.flop * masked_too * n_rows / (layout.tp * layout.cp)
    speed = gpu.peak(chip.around) * (gpu.reached or 1.0)
    if kernels.fused_attention:
        speed *= kernels.attend_backward if backward else kernels.attend_forward
        times = 2.5 if backward else 1.0
    else:
        speed *= kernels.attend_forward * (1.0 if a.head_dim % 8 == 0 else kernels.odd_heads)
        times = 2.0 if backward else 1.0
    return a.count * (flop * times / speed + (gpu.launch_s or kernels.launch_s))


def moved_s(chip: ComputeTarget, n_bytes: float, n_ops: float = 0.0) -> float:
    gpu, kernels = chip.gpu, chip.kernels
    rate = gpu.memory_bytes_per_s * kernels.bandwidth
    return (n_bytes * kernels.moved / rate if rate else 0.0) + n_ops * (
        gpu.launch_s or kernels.launch_s
    )


def block_s(
    chip: ComputeTarget, sample: SampleProfile, layout: Layout, *, n_rows: float, n_blocks: int
) -> BlockTimes:
    """One microbatch of `n_rows` samples through a mean block. Where no products are known, the
    model's FLOPs are spread evenly over its blocks. Whole passes that were measured count as they
    were: nothing is added for what is no product."""
    if chip.gpu.crowded_passes:
        return _measured_s(chip, sample, layout, n_rows=n_rows)
    products = sum(product_s(chip, product, layout, n_rows=n_rows) for product in sample.matmuls)
    if not sample.matmuls:
        flop = sample.flop / 3 / max(1, n_blocks) * n_rows / (layout.tp * layout.cp)
        products = flop / (
            chip.gpu.peak(chip.dtype) * (chip.gpu.reached or 1.0) * chip.kernels.matmul
        )
    ahead = sum(
        attention_s(chip, a, layout, n_rows=n_rows, backward=False) for a in sample.attentions
    )
    back = sum(
        attention_s(chip, a, layout, n_rows=n_rows, backward=True) for a in sample.attentions
    )
    whole = 0.0 if sample.sequence_parallel else WHOLE_SHARE
    share = (whole + (1 - whole) / layout.tp) / layout.cp
    n_bytes = sample.moved_bytes * n_rows * share
    if chip.dtype in LOW:
        n_bytes += (
            chip.kernels.casts
            * sum(p.count * p.rows * (p.k + p.n) for p in sample.matmuls)
            * n_rows
            * share
        )
    host = sample.n_ops * chip.kernels.host_s  # what the host takes to launch all of it
    own = moved_s(chip, n_bytes, sample.n_ops)
    moved = max(own, host - products - ahead)
    forward = products + ahead + moved
    backward = 2 * products + back + 2 * moved
    mode = layout.activation_checkpointing
    again = {"none": 0.0, "selective": 0.7 * own, "full": forward}[mode]
    return BlockTimes(products, ahead, moved, forward, backward, again)


def _measured_s(
    chip: ComputeTarget, sample: SampleProfile, layout: Layout, *, n_rows: float
) -> BlockTimes:
    rate = chip.gpu.crowded_passes[-1][1]
    flop = sum(p.count * p.flop for p in sample.matmuls)
    scores = sum(a.count * a.flop for a in sample.attentions)
    products, attention = (
        some * n_rows / (layout.tp * layout.cp) / rate for some in (flop, scores)
    )
    forward = products + attention
    again = {"none": 0.0, "selective": 0.1 * forward, "full": forward}[
        layout.activation_checkpointing
    ]
    return BlockTimes(products, attention, 0.0, forward, 2 * forward, again)


def ends_s(chip: ComputeTarget, sample: SampleProfile, layout: Layout, *, n_rows: float) -> float:
    """The head and the loss of a microbatch, forward and backward; products in 16 or 32 bits."""
    if chip.gpu.crowded_passes:
        flop = sum(p.count * p.flop / (layout.tp if p.cut else 1) for p in sample.ends_matmuls)
        return 3 * flop * n_rows / layout.cp / chip.gpu.crowded_passes[-1][1]
    products = sum(
        product_s(chip, product, layout, n_rows=n_rows, dtype=chip.around)
        for product in sample.ends_matmuls
    )
    cut = layout.cp * (layout.tp if sample.loss_parallel else 1)
    return 3 * products + moved_s(chip, 2 * sample.ends_moved_bytes * n_rows / cut)
