"""Bytes that a rank sends in a step, axis by axis: what step_cost.py counts seconds of. Of
collectives over a ring of n ranks each rank sends (n - 1) / n of the bytes (Thakur et al. 2005,
section 4.1), twice that where all add up and all get the sum."""

from __future__ import annotations

from elastic.planner.cost.collectives import COMMIT_BYTES
from elastic.planner.cost.memory import ShardRanks, Step, held, zero_stage
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import GRADIENT_BYTES, exchanges_of, routed_bytes
from elastic.types import Layout, SampleProfile


def axis_bytes(work: ModelCost, layout: Layout, step: Step) -> dict[str, float]:
    """By the names of Cost.parts; what an axis does not send is not there. Activations count as
    none where nobody knows what a sample asks."""
    sample, blocks = work.sample, step.n_microbatches * work.n_blocks / layout.pp
    found = {
        "fsdp": shard_bytes(work, layout, step),
        "replicas": replica_bytes(work, layout),
        "commit": 2 * COMMIT_BYTES * _passed(layout.world_size),
    }
    if sample is not None:
        found |= {
            "tp": blocks * tp_bytes(sample, layout, step),
            "cp": blocks * cp_bytes(sample, layout, step),
            "ep": blocks
            * exchanges_of(layout)
            * routed_bytes(sample, layout, step)
            * _passed(layout.ep),
            "pp": step.n_microbatches * pp_bytes(sample, layout, step),
        }
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes > 0}


def _passed(n: int) -> float:
    return (n - 1) / n


def tp_bytes(sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Of a microbatch in one block: the all-reduces of step_cost.tp_s."""
    times = 6 if layout.activation_checkpointing == "full" else 4
    hidden = step.n_rows * sample.hidden_bytes / layout.cp
    return times * 2 * hidden * _passed(layout.tp)


def cp_bytes(sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Of a microbatch in one block: keys and values twice, their gradients in float32."""
    n_bytes = step.n_rows * sample.key_value_bytes / layout.tp
    return (2 + GRADIENT_BYTES / step.compute_bytes) * n_bytes * _passed(layout.cp)


def pp_bytes(sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Of a microbatch, of a rank in the middle: hidden states forward, their gradients back."""
    if layout.pp == 1:
        return 0.0
    cut = layout.cp * (layout.tp if sample.sequence_parallel else 1)
    return 2 * layout.n_stages / layout.pp * step.n_rows * sample.hidden_bytes / cut


def shard_bytes(work: ModelCost, layout: Layout, step: Step) -> float:
    """Parameters are gathered in the computation's dtype, gradients scattered in float32, as often
    as the ZeRO stage says (docs/memory.md)."""
    n, stage, m = layout.dp_shard * layout.cp, zero_stage(layout), step.n_microbatches
    if n == 1:
        return 0.0
    whole = held(work, layout).gathered(ShardRanks.of(work, layout))
    each = max(1.0, work.element_bytes)
    low = whole * work.computed(step.compute_bytes)
    wide = whole * work.trained * GRADIENT_BYTES / each
    gathers, scatters = {3: (2 * m, m), 2: (m, m), 1: (1, 1), 0: (0, 2)}[stage]
    return (gathers * low + scatters * wide) * _passed(n)


def replica_bytes(work: ModelCost, layout: Layout) -> float:
    """Replicas add up their shards of the gradients once a step."""
    wide = GRADIENT_BYTES / max(1.0, work.element_bytes) * work.trained
    own = ShardRanks.of(work, layout).shard(held(work, layout)) * wide
    return 2 * own * _passed(layout.dp_replicate)
