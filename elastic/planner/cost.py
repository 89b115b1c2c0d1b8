"""Rough memory and time of a rank: one formula per function. Good enough to rank layouts, not to promise seconds."""

from __future__ import annotations

from math import prod

from elastic.types import DTYPE_BYTES, Layout, ModelProfile, TensorSpec


def parameter_bytes(model: ModelProfile) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(n_bytes for _, n_bytes in _parameters(model)) or model.n_params * 4


def trained_bytes(model: ModelProfile) -> int:
    """Of the gradients, and of the optimizer entries of the parameter's shape, of all parameters that are trained."""
    sizes = _parameters(model)
    if not sizes:
        return model.n_params * 4 * (1 + max((len(kept.entries) for kept in model.optimizers), default=0))
    return sum(n_bytes * (1 + len(model.kept_of(spec).entries)) for spec, n_bytes in sizes if spec.trainable)


def _parameters(model: ModelProfile) -> list[tuple[TensorSpec, int]]:
    """Bytes of each, tied ones once."""
    every = (spec for spec in model.specs if spec.tied_to is None and not spec.buffer)
    return [(spec, prod(spec.shape) * DTYPE_BYTES.get(spec.dtype, 4)) for spec in every]


def memory_bytes(model: ModelProfile, layout: Layout) -> int:
    """Bytes that a rank holds: its shard of parameters, gradients and optimizer entries (with `offload` in host memory: not
    counted); where they are sharded, also what is gathered, as in ZeRO (Rajbhandari et al. 2020, section 3): at stage 3 one
    block twice (the running one and the prefetched one), at stage 2 all parameters, at stage 1 all gradients too. Activations
    are not known here."""
    parameters = parameter_bytes(model)
    cut = layout.tp * layout.pp
    states = parameters + trained_bytes(model)
    sharded = layout.dp_shard * layout.cp > 1 or layout.offload
    two_blocks = 2 * parameters / max(1, model.n_blocks) / layout.tp
    gathered = {3: two_blocks, 2: parameters / cut, 1: 2 * parameters / cut}[layout.zero_stage] if sharded else 0
    return int((0 if layout.offload else states / (cut * layout.dp_shard * layout.cp)) + gathered)


def bubble(layout: Layout, n_microbatches: int) -> float:
    """Idle part of a pipeline, as a share of the useful time: (pp - 1) / (v m) for v stages per rank (Narayanan et al. 2021,
    section 2.2)."""
    return (layout.pp - 1) / max(1, n_microbatches) * layout.pp / layout.n_stages


def relative_time(layout: Layout, n_microbatches: int, largest_share: int, global_batch: int) -> float:
    """Time of a step as a multiple of a perfect split over the same ranks: the largest share, the bubble, 15 % for each
    doubling of tp and 2 % for each doubling of the data-parallel ranks (exposed collectives)."""
    uneven = largest_share * layout.dp / max(1, global_batch)
    tp_doublings, dp_doublings = (layout.tp * layout.cp).bit_length() - 1, layout.dp.bit_length() - 1
    return uneven * (1 + bubble(layout, n_microbatches)) * (1 + 0.15 * tp_doublings) * (1 + 0.02 * dp_doublings)
