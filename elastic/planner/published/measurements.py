"""Published measurements: a row of a table -> what the cost formulas need to predict it.

A row says what a source prints; what it leaves out is filled by rules that hold for every row:
where gated and tied are not said, the decoder whose parameters come nearest; heads of 128; the
sequence of other rows of that model; checkpointing that is not said is the least that fits. The
software generation follows from what was used (precision, ZeRO, checkpointing, GPU architecture),
never from who measured it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from elastic import catalog
from elastic.errors import SpecError
from elastic.planner.cost import catalog_hardware
from elastic.planner.cost.compute import ComputeTarget
from elastic.planner.cost.kernels import LOGIT_BYTES, UNFUSED, Kernels, generation
from elastic.planner.cost.memory import Step, parts
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost, Site, step_cost
from elastic.planner.published.decoder import Decoder
from elastic.types import Layout

# without these a row says too little
COLUMNS = ("model", "params_b", "hidden", "gpu", "gpus", "tp", "pp")
STAGES = {"0": 0, "1": 1, "2": 2, "3": 3, "fsdp": 3, "fsdp2": 3, "": 1}
# containers of Megatron from this year and month on: CUDA graphs and fused experts
GRAPHED = (26, 6)
CONTEXT_BYTES = 1.5 * 2**30  # CUDA's own, which nvidia-smi counts and an allocator does not
# what an allocator keeps over what is in use (PyTorch: max_memory_reserved over
# max_memory_allocated)
RESERVED = 1.05
LONE_HEAD = 128
DEFAULT_SEQ = 4096
EXPERTS = re.compile(r"(\d+) experts top-(\d+)")
CONTAINER = re.compile(r"container (\d\d)\.(\d\d)")


@dataclass(frozen=True, eq=False)
class Case:
    """One measurement. Units: tokens per second of one GPU, bytes of the fullest GPU; 0 = not
    measured."""

    name: str
    source: str
    model: str
    gpu: str
    n_gpus: int
    software: str
    layout: Layout
    step: Step
    work: ModelCost
    site: Site
    tokens: int  # of a sample
    tokens_per_s: float
    memory_bytes: float
    fits: bool
    counted_bytes: float  # what the way of measuring counts besides the allocator's

    def cost(self, kernels: Kernels | None = None) -> Cost:
        site = (
            self.site
            if kernels is None
            else replace(self.site, chip=replace(self.site.chip, kernels=kernels))
        )
        return step_cost(site, self.work, self.layout, step=self.step)

    def predicted_tokens_per_s(self, kernels: Kernels | None = None) -> float:
        return self.step.global_batch * self.tokens / self.cost(kernels).step_s / self.n_gpus

    def allocated_bytes(self) -> float:
        return sum(parts(self.work, self.layout, self.step).values())

    def predicted_bytes(self) -> float:
        """As it was measured."""
        return RESERVED * self.allocated_bytes() + self.counted_bytes


def cases(rows: Iterable[Mapping[str, str]]) -> list[Case]:
    """Rows that say enough. Raises SpecError with the row and the column where a number is none."""
    rows = list(rows)
    seqs = {row["model"]: _int(row, "seq_len") for row in rows if row.get("seq_len")}
    return [_case(row, seqs) for row in rows if all(row.get(column) for column in COLUMNS)]


def _case(row: Mapping[str, str], seqs: Mapping[str, int]) -> Case:
    chip = catalog.find_chip(row["gpu"])
    dtype = precision(row.get("precision", ""))
    software = software_of(row, chip.arch)
    seq = _int(row, "seq_len") or seqs.get(row["model"], DEFAULT_SEQ)
    decoder = decoder_of(row, seq, dtype, software=software)
    layout = layout_of(row)
    batch, m = _batch(row, layout)
    per_node = catalog_hardware.together(chip, _int(row, "gpus_per_node") or 8)
    step = Step(m, m * layout.microbatch_size, batch, per_node, dtype)
    profile = decoder.profile()
    if software in UNFUSED and profile.sample is not None:
        profile = replace(profile, sample=replace(profile.sample, sequence_parallel=False))
    work = ModelCost.of(profile)
    layout = (
        _checkpointed(work, layout, step, room_bytes=chip.memory_bytes)
        if not row.get("activation_ckpt")
        else layout
    )
    return Case(
        name=row.get("id", ""),
        source=row.get("source", ""),
        model=row["model"],
        gpu=row["gpu"],
        n_gpus=_int(row, "gpus"),
        software=software,
        layout=layout,
        step=step,
        work=work,
        site=Site(
            ComputeTarget(catalog_hardware.profile(chip), generation(software, chip.arch), dtype),
            per_node,
        ),
        tokens=seq,
        tokens_per_s=_float(row, "tokens_per_s_per_gpu"),
        memory_bytes=_float(row, "mem_gib_per_gpu") * 2**30,
        fits=row.get("fits", "1") != "0",
        counted_bytes=CONTEXT_BYTES if "nvidia-smi" in row.get("notes", "") else 0.0,
    )


def _checkpointed(work: ModelCost, layout: Layout, step: Step, *, room_bytes: int) -> Layout:
    """With the first way of checkpointing under which it fits; with none where it never does."""
    for mode in ("none", "selective", "full"):
        tried = replace(layout, activation_checkpointing=mode)
        if sum(parts(work, tried, step).values()) <= room_bytes:
            return tried
    return layout


def precision(text: str) -> str:
    """The dtype of products: `fp8-cs`, `bf16+float8-linear` -> float8."""
    text = text.lower()
    if "fp4" in text:
        return "float4"
    if "fp8" in text or "float8" in text:
        return "float8"
    return "float16" if text.startswith("fp16") else "bfloat16"


def software_of(row: Mapping[str, str], arch: str) -> str:
    """Volta and Turing have no fused attention in training; on Ampere it is absent where everything
    is computed again under tensor or pipeline parallelism, as before it was there; ZeRO 3 by number
    is FSDP's first form; `fsdp2` its second."""
    cut = _int(row, "tp") * _int(row, "pp") > 1
    if arch in ("Volta", "Turing") or (
        arch == "Ampere" and cut and row.get("activation_ckpt") == "full"
    ):
        return "megatron-2022"
    if row.get("zero_stage") == "3":
        return "fsdp1"
    if row.get("zero_stage") == "fsdp2":
        return "fsdp2-compiled" if row.get("compile") == "1" else "fsdp2"
    said = CONTAINER.search(row.get("notes", ""))
    return "megatron-2026" if said and (int(said[1]), int(said[2])) >= GRAPHED else "megatron-2024"


def layout_of(row: Mapping[str, str]) -> Layout:
    """Data-parallel ranks are what is left; without ZeRO 3, replicas and shards are one axis. A
    printed layout that needs more GPUs than there were has fewer stages."""
    tp, cp, n = _int(row, "tp") or 1, _int(row, "cp") or 1, _int(row, "gpus")
    pp = min(_int(row, "pp") or 1, max(1, n // (tp * cp)))
    dp, stage = max(1, n // (tp * cp * pp)), STAGES.get(row.get("zero_stage", ""), 1)
    replicas, shards, v = _int(row, "dp_replicate") or 1, _int(row, "dp_shard"), _int(row, "vpp")
    if replicas * shards != dp or stage < 2:
        replicas, shards = 1, dp
    interleaved = pp > 1 and v > 1
    mode = row.get("activation_ckpt", "")
    return Layout(
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shards,
        cp=cp,
        tp=tp,
        ep=_int(row, "ep") or 1,
        microbatch_size=_int(row, "micro_batch") or 1,
        schedule="interleaved1f1b" if interleaved else "1f1b",
        virtual_stages=v if interleaved else 0,
        zero_stage=stage,
        activation_checkpointing="selective"
        if mode.startswith("selective")
        else mode
        if mode == "full"
        else "none",
    )


def _batch(row: Mapping[str, str], layout: Layout) -> tuple[int, int]:
    """Samples of a step and microbatches; whole microbatches on every rank."""
    each = layout.microbatch_size * layout.dp
    m = max(1, round((_int(row, "global_batch") or each) / each))
    return m * each, m


def decoder_of(row: Mapping[str, str], seq: int, dtype: str, *, software: str) -> Decoder:
    """Of the forms that the dimensions leave open, the one whose parameters come nearest to what is
    printed."""
    hidden, layers, vocab = _int(row, "hidden"), _int(row, "layers"), _int(row, "vocab") or 32000
    wanted = _float(row, "params_b") * 1e9
    heads = _int(row, "heads") or _heads(hidden)
    said = EXPERTS.search(row.get("notes", ""))
    experts, active = (int(said[1]), int(said[2])) if said else (0, 0)
    pure = row.get("precision", "").endswith("-true")
    plain = Decoder(
        layers or round((wanted - vocab * hidden) / (12 * hidden * hidden)), hidden, heads,
        _int(row, "kv_heads") or heads, _int(row, "ffn") or 4 * hidden, vocab, seq, experts=experts,
        active=active, fused=software not in UNFUSED, logit_bytes=LOGIT_BYTES[software],
        dtype="bfloat16" if pure else "float32",
        compute="float16" if dtype == "float16" else "bfloat16",
    )  # fmt: skip
    widths = (0, 64, LONE_HEAD) if experts else (0,)
    forms = [
        replace(plain, gated=gated, tied=tied, head_dim=width)
        for gated, tied, width in product((True, False), (False, True), widths)
    ]
    return min(forms, key=lambda form: abs(form.n_params - wanted))


def _heads(hidden: int) -> int:
    """As many of LONE_HEAD as fit, a divisor."""
    return next(n for n in range(max(1, hidden // LONE_HEAD), 0, -1) if hidden % n == 0)


def _int(row: Mapping[str, str], column: str) -> int:
    return int(_float(row, column))


def _float(row: Mapping[str, str], column: str) -> float:
    text = (row.get(column) or "").strip()
    try:
        return float(text) if text else 0.0
    except ValueError:
        raise SpecError(
            f"row {row.get('id') or '?'}: {column} must be a number, not '{text}'"
        ) from None
