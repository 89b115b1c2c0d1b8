"""How well software uses hardware: constants of kernels and of software generations, each with its
meaning.

A generation is named by what a training job uses, never by who measured it; no constant belongs to
a model or to a source. They were fitted by tests/bench/planner_fit.py to published measurements;
docs/planner-model.md says how well they hold on sources that they were not fitted to.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

TILE = (128, 128)  # rows and columns of a product that one multiprocessor computes at once


@dataclass(frozen=True)
class Kernels:
    """All shares are of what the hardware could do.

    `matmul`, `low8`, `low4`: of the speed that a large product reaches alone, what products reach
    within a step (clocks fall under load), in 16, 8 and 4 bits. `tail`: how much of the loss by
    padding and by a last wave that is not full counts (0 = split-k hides it). `fused_attention`:
    scores are never written. `attend_forward`, `attend_backward`: of a large product's speed, in
    attention. `odd_heads`: the same where scores are written and a head is no multiple of 8 wide,
    which tensor cores need. `moved`: of the bytes that eager operations read and write, those that
    are moved after fusion. `bandwidth`: of the memory's. `casts`: bytes per element that low
    precision reads and writes besides. `node`, `link`: of the links' peaks. `crowd`: of the shorter
    of two things that run at once (collectives and computation), what they cost each other.
    `tp_hidden`: of tp's collectives, run under products. `dp_hidden`: of the computation, what
    hides the gradients' sum where they are not sharded. `jitter`: of a step, for each doubling of
    the nodes that wait for each other. `launch_s`: of one operation on the GPU; `host_s`: on the
    host, which is waited for where it takes longer; `microbatch_s`: of a pipeline stage's host, for
    each microbatch; `dispatch_s`: of DTensor's host, for each operation under tp."""

    matmul: float = 0.82
    low8: float = 0.75
    low4: float = 0.6
    tail: float = 0.4
    fused_attention: bool = True
    attend_forward: float = 0.55
    attend_backward: float = 0.45
    odd_heads: float = 0.1
    moved: float = 0.8
    bandwidth: float = 0.8
    casts: float = 3.0
    node: float = 0.7
    link: float = 0.6
    crowd: float = 0.2
    tp_hidden: float = 0.0
    dp_hidden: float = 0.5
    jitter: float = 0.01
    launch_s: float = 5e-6
    host_s: float = 8e-6
    microbatch_s: float = 1e-3
    dispatch_s: float = 0.0


# Software generations. fsdp2: PyTorch's own (fused attention, eager; `fsdp2-compiled` with
# torch.compile), what elastic runs; fsdp1: PyTorch 2.0's; megatron-2022: Megatron-LM and DeepSpeed
# before fused attention; megatron-2024: with Transformer Engine; megatron-2026: with CUDA graphs
# and fused experts.
UNFUSED = ("megatron-2022",)
# Bytes of a logit at the end of the loss: fused losses write their gradient in place, others keep
# copies in float32.
LOGIT_BYTES = {
    "fsdp2": 14,
    "fsdp2-compiled": 12,
    "fsdp1": 6,
    "megatron-2022": 8,
    "megatron-2024": 6,
    "megatron-2026": 6,
}
# Whose constants an architecture takes that nobody has measured with this software.
LIKE = {
    "Ada": "Ampere",
    "Turing": "Ampere",
    "Volta": "Ampere",
    "Blackwell": "Hopper",
    "CDNA3": "Hopper",
    "Ampere": "Hopper",
}
PARENT = {"fsdp2-compiled": "fsdp2", "megatron-2026": "megatron-2024"}


# Whose profile was measured whole: every number is what software reaches already, and nothing is
# hidden under computation, since collectives run on the cores that compute.
MEASURED = Kernels(
    matmul=1.0, tail=0.0, moved=1.0, bandwidth=1.0, node=1.0, link=1.0, crowd=1.0, dp_hidden=0.0,
    jitter=0.0, launch_s=0.0, host_s=0.0, microbatch_s=0.0, dispatch_s=2.5e-4,
)  # fmt: skip


@cache
def generation(software: str, arch: str, compiled: bool = False) -> Kernels:
    """The constants of a software generation on a GPU architecture: those of all software, then of
    this one, then of this one on this architecture."""
    if compiled and software == "fsdp2":
        software = "fsdp2-compiled"
    table, made = _table(), Kernels(fused_attention=software not in UNFUSED)
    lines = [name for name in (PARENT.get(software, ""), software) if name]
    found = dict(table.get(("", ""), {}))
    for name in lines:
        found |= table.get((name, ""), {})
    for name in lines:
        kind = arch if (name, arch) in table else LIKE.get(arch, "")
        found |= table.get((name, kind), {})
    numbers: dict[str, Any] = {f.name: found[f.name] for f in fields(made) if f.name in found}
    return replace(made, **numbers)


@cache
def _table() -> Mapping[tuple[str, str], Mapping[str, float]]:
    """kernels.csv by software and architecture; empty = all of them."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with (files(__package__ or "elastic.planner.cost") / "kernels.csv").open(
        encoding="utf-8"
    ) as opened:
        for row in csv.DictReader(opened):
            found.setdefault((row["software"], row["arch"]), {})[row["constant"]] = float(
                row["value"]
            )
    return found
