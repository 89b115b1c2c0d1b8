"""Memory and time of a rank: one formula per function. Good enough to rank layouts, not to promise seconds.

What a sample asks of the model (`ModelProfile.sample`) may not be known: activations then count as nothing, and communication
as shares that were guessed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from elastic.types import DTYPE_BYTES, Layout, ModelProfile, SampleProfile, TensorSpec

WHOLE_SHARE = 10 / 34  # of a block's activations, which tp without sequence parallelism leaves whole
RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1 / 3}  # of the FLOPs of forward and backward pass, done twice


@dataclass(frozen=True)
class Step:
    """How a step is shared out. `n_gpus`: of the smallest node; `dtype`: in which forward and backward pass are computed."""

    n_microbatches: int
    largest_share: int  # samples of a step that one data-parallel rank has
    global_batch: int
    n_gpus: int = 8
    dtype: str = "float32"

    @property
    def n_rows(self) -> int:
        """Samples that a rank computes at once."""
        return ceil(self.largest_share / self.n_microbatches)


@dataclass(frozen=True)
class Machine:
    """What ranks layouts where nothing is measured: an H100 node by NVIDIA's data sheet, at rates that training reaches (40 %
    of the FLOPs in bfloat16, 80 % of NVLink and of 400 Gbit/s per GPU)."""

    flop_per_s: float = 4e14
    node_bytes_per_s: float = 3.6e11
    net_bytes_per_s: float = 4e10
    hop_s: float = 5e-6


NOMINAL = Machine()

# ------------------------------------------------------------------------------------------ memory


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


def state_bytes(model: ModelProfile) -> int:
    """Of parameters, gradients and optimizer entries."""
    return parameter_bytes(model) + trained_bytes(model)


def gradient_bytes(model: ModelProfile) -> int:
    """Of the gradients of all parameters that are trained."""
    sizes = _parameters(model)
    return sum(n_bytes for spec, n_bytes in sizes if spec.trainable) if sizes else model.n_params * 4


def zero_stage(layout: Layout) -> int:
    """Torch's pipeline schedules keep parameters and gradients whole until the last microbatch, whatever is asked for."""
    return 1 if layout.pp > 1 else layout.zero_stage


def memory_bytes(model: ModelProfile, layout: Layout, dtype: str = "float32") -> int:
    """Bytes of a rank without activations: its shard of parameters, gradients and optimizer entries (with `offload` in host
    memory: not counted); where they are sharded, also what is gathered, as in ZeRO (Rajbhandari et al. 2020, section 3): at
    stage 3 one block twice (the running one and the prefetched one), at stage 2 all parameters, at stage 1 all gradients too.
    Parameters are gathered in `dtype`."""
    parameters, gradients = parameter_bytes(model), gradient_bytes(model)
    low = DTYPE_BYTES[dtype] / 4
    cut = layout.tp * layout.pp
    sharded = layout.dp_shard * layout.cp > 1 or layout.offload
    two_blocks = 2 * parameters * low / max(1, model.n_blocks) / layout.tp
    gathered = {3: two_blocks, 2: parameters * low / cut, 1: (parameters * low + gradients) / cut}[zero_stage(layout)]
    own = 0.0 if layout.offload else state_bytes(model) / (cut * layout.dp_shard * layout.cp)
    return int(own + (gathered if sharded else 0))


def kept_bytes(sample: SampleProfile, layout: Layout, mode: str) -> float:
    """Of one sample in one block. cp divides all of it (Llama 3: Grattafiori et al. 2024, section 3.3.2); tp with sequence
    parallelism too, without it 24 parts of 34 (Korthikanti et al. 2022, sections 4.2.1 and 4.2.2), and of `full`, which keeps
    the block's input, nothing."""
    whole = 0.0 if sample.sequence_parallel or layout.tp == 1 else 1.0 if mode == "full" else WHOLE_SHARE
    return dict(sample.kept_bytes)[mode] / layout.cp * (whole + (1 - whole) / layout.tp)


def in_flight(layout: Layout, n_microbatches: int) -> float:
    """Microbatches whose activations the first stage keeps at once, in stages of 1/pp of the blocks: all under GPipe, pp under
    1F1B (Narayanan et al. 2021, section 2.2.1), pp + (pp - 1)/v under the interleaved one (Korthikanti et al. 2022, 4.2.3)."""
    if layout.pp == 1:
        return 1.0
    if layout.schedule == "gpipe" or n_microbatches < layout.pp:
        return float(n_microbatches)
    more = (layout.pp - 1) * layout.pp / layout.n_stages if layout.n_stages > layout.pp else 0.0
    return min(float(n_microbatches), layout.pp + more)


def ends_bytes(sample: SampleProfile, layout: Layout) -> float:
    """Of one sample outside of the blocks, logits above all: cp divides them; tp does where they stay cut for the loss."""
    return sample.ends_bytes / layout.cp / (layout.tp if sample.loss_parallel else 1)


def activation_bytes(model: ModelProfile, layout: Layout, step: Step) -> int:
    """Of the pipeline stage that keeps most: the first has most microbatches in flight, the last has the logits. Where blocks
    are computed again, one of them has all of its activations for that time (Chen et al. 2016, section 3)."""
    sample, mode = model.sample, layout.activation_checkpointing
    if sample is None:
        return 0
    kept, none = kept_bytes(sample, layout, mode), kept_bytes(sample, layout, "none")
    blocks = ceil(model.n_blocks / layout.pp) * kept
    first = blocks * in_flight(layout, step.n_microbatches)
    last = blocks + ends_bytes(sample, layout)
    return int(step.n_rows * (max(first, last) + max(0.0, none - kept)))


# ------------------------------------------------------------------------------------------ time


def bubble(layout: Layout, n_microbatches: int) -> float:
    """Idle part of a pipeline, as a share of the useful time: (pp - 1) / (v m) for v stages per rank (Narayanan et al. 2021,
    section 2.2)."""
    return (layout.pp - 1) / max(1, n_microbatches) * layout.pp / layout.n_stages


def ring_s(n_bytes: float, n_ranks: int, bytes_per_s: float) -> float:
    """Seconds of an all-gather or reduce-scatter of `n_bytes` in all over a ring (Thakur et al. 2005, section 4.1)."""
    return (n_ranks - 1) * (NOMINAL.hop_s + n_bytes / n_ranks / bytes_per_s)


def tp_s(model: ModelProfile, sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a rank's step in tp: two all-reduces of a block's hidden state forward and two backward, each a
    reduce-scatter and an all-gather (Shoeybi et al. 2019, section 3; with sequence parallelism as many bytes, Korthikanti et
    al. 2022, section 4.2.2)."""
    times = 8 * model.n_blocks / layout.pp * step.n_microbatches
    return times * ring_s(step.n_rows * sample.hidden_bytes / layout.cp, layout.tp, NOMINAL.node_bytes_per_s)


def cp_s(model: ModelProfile, sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a rank's step in cp: keys and values of a block are gathered forward and backward, their gradients scattered
    in float32 (Grattafiori et al. 2024, section 3.3.2; elastic/models/attention.py)."""
    n_bytes = step.n_rows * sample.key_value_bytes / layout.tp
    times, rate = model.n_blocks / layout.pp * step.n_microbatches, NOMINAL.node_bytes_per_s
    scattered = ring_s(n_bytes * 4 / DTYPE_BYTES[step.dtype], layout.cp, rate)
    return times * (2 * ring_s(n_bytes, layout.cp, rate) + scattered)


def pp_s(sample: SampleProfile, layout: Layout, step: Step) -> float:
    """Seconds of a rank's step in pp: a hidden state is sent forward and its gradient back at each end of each of its v stages
    (Narayanan et al. 2021, sections 2.2.2 and 3.2)."""
    if layout.pp == 1:
        return 0.0
    hidden = step.n_rows * sample.hidden_bytes / layout.cp / (layout.tp if sample.sequence_parallel else 1)
    times = 2 * layout.n_stages / layout.pp * step.n_microbatches
    return times * (NOMINAL.hop_s + hidden / NOMINAL.net_bytes_per_s)


def fsdp_s(model: ModelProfile, layout: Layout, step: Step) -> float:
    """Seconds of a rank's step in gathering parameters and scattering gradients, block by block, as often as the ZeRO stage
    says (docs/memory.md; Rajbhandari et al. 2020, section 7), and in adding up over replicas once. A ring that leaves its node
    goes through all of the node's network cards."""
    n, m = layout.dp_shard * layout.cp, step.n_microbatches
    cut = layout.tp * layout.pp * max(1, model.n_blocks / layout.pp)
    rate = NOMINAL.node_bytes_per_s
    if n * layout.tp > step.n_gpus:
        rate = min(rate, NOMINAL.net_bytes_per_s * max(1, step.n_gpus // layout.tp))
    stage = zero_stage(layout)
    gathers, scatters = {3: (2 * m, m), 2: (m, m), 1: (1, 1)}[stage]
    gathered = parameter_bytes(model) * DTYPE_BYTES[step.dtype] / 4 / cut
    scattered = gradient_bytes(model) / cut
    seconds = gathers * ring_s(gathered, n, rate) + scatters * ring_s(scattered, n, rate)
    replicas = 2 * ring_s(scattered / n, layout.dp_replicate, NOMINAL.net_bytes_per_s)
    return (seconds + replicas) * model.n_blocks / layout.pp


def time_parts(model: ModelProfile, layout: Layout, step: Step) -> dict[str, float]:
    """What a step takes beyond a perfect split of its FLOPs over the same ranks, in multiples of that. FSDP's collectives run
    under the computation (Zhao et al. 2023, section 3.3) and count where they are longer; those of tp, cp and pp are waited
    for."""
    sample, uneven = model.sample, step.largest_share * layout.dp / max(1, step.global_batch)
    parts = {"uneven": uneven - 1, "recomputed": uneven * RECOMPUTED[layout.activation_checkpointing]}
    idle = bubble(layout, step.n_microbatches)
    if sample is None or not sample.flop:
        parts["bubble"] = (1 + sum(parts.values())) * idle
        return parts | {"guessed": (1 + sum(parts.values())) * (_guessed(layout) - 1)}
    perfect_s = sample.flop * step.global_batch / layout.world_size / NOMINAL.flop_per_s
    busy_s = (1 + sum(parts.values())) * perfect_s
    parts["tp"] = tp_s(model, sample, layout, step) / perfect_s
    parts["cp"] = cp_s(model, sample, layout, step) / perfect_s
    parts["pp"] = pp_s(sample, layout, step) / perfect_s
    parts["bubble"] = (1 + sum(parts.values())) * idle
    return parts | {"fsdp": max(0.0, fsdp_s(model, layout, step) - busy_s) / perfect_s}


def _guessed(layout: Layout) -> float:
    """Of collectives: 15 % for each doubling of tp, 2 % for each doubling of the data-parallel ranks."""
    tp_doublings, dp_doublings = (layout.tp * layout.cp).bit_length() - 1, layout.dp.bit_length() - 1
    return (1 + 0.15 * tp_doublings) * (1 + 0.02 * dp_doublings)
