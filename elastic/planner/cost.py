"""Rough memory and time of a rank: one formula per function. Good enough to rank layouts, not to promise seconds."""

from __future__ import annotations

from math import prod

from elastic.types import DTYPE_BYTES, Layout, ModelProfile


def parameter_bytes(model: ModelProfile) -> int:
    """Bytes of all parameters, tied ones once."""
    found = sum(
        prod(spec.shape) * DTYPE_BYTES.get(spec.dtype, 4) for spec in model.specs if spec.tied_to is None and not spec.buffer
    )
    return found or model.n_params * 4


def memory_bytes(model: ModelProfile, layout: Layout) -> int:
    """Bytes that a rank holds: its shard of parameters, gradients and optimizer entries; where they are sharded, also one
    gathered block twice (the running one and the prefetched one), as in ZeRO (Rajbhandari et al. 2020, section 3). Activations
    are not known here."""
    parameters = parameter_bytes(model)
    cut = layout.tp * layout.pp
    states = parameters * (2 + len(model.optimizer_entries))
    sharded = layout.dp_shard * layout.cp > 1
    gathered = 2 * parameters / max(1, model.n_blocks) / layout.tp if sharded else 0
    return int(states / (cut * layout.dp_shard * layout.cp) + gathered)


def bubble(layout: Layout, n_microbatches: int) -> float:
    """Idle part of a pipeline, as a share of the useful time: (pp - 1) / m (Narayanan et al. 2021, section 2.2)."""
    return (layout.pp - 1) / max(1, n_microbatches)


def relative_time(layout: Layout, n_microbatches: int, largest_share: int, global_batch: int) -> float:
    """Time of a step as a multiple of a perfect split over the same ranks: the largest share, the bubble, 15 % for each
    doubling of tp and 2 % for each doubling of the data-parallel ranks (exposed collectives)."""
    uneven = largest_share * layout.dp / max(1, global_batch)
    tp_doublings, dp_doublings = (layout.tp * layout.cp).bit_length() - 1, layout.dp.bit_length() - 1
    return uneven * (1 + bubble(layout, n_microbatches)) * (1 + 0.15 * tp_doublings) * (1 + 0.02 * dp_doublings)
