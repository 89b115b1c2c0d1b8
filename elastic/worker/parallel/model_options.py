"""How a model is held and computed in one generation: what the job and its layout say besides the
axes.

One meaning in every layout: parameters, gradients and optimizer state have the program's dtype
(float32); forward and backward pass run in `precision`; gradients are added up over ranks and
microbatches in `reduce_dtype`; the model's output, and so the loss, is float32 again. FSDP2 does
the casts, also where nothing is sharded: the axis fsdp then has one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from elastic.types import Job, Layout
from elastic.types.grid import coordinates
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.parallel.compiled import compile_blocks
from elastic.worker.parallel.float8 import use_float8


def needs_fsdp(job: Job, layout: Layout) -> bool:
    """Must the modules be FSDP2's, even if there is nothing to shard over?"""
    return layout.offload or (job.precision, job.reduce_dtype) != ("float32", "float32")


@dataclass(frozen=True)
class ModelOptions:
    """`compute`: dtype of forward and backward pass, None = that of the parameters. `gives_output`:
    does the rank compute the model's output?"""

    activation_checkpointing: str = "none"
    zero_stage: int = 3
    offload: bool = False
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    gives_output: bool = True
    compile: bool = False
    float8: bool = False

    @classmethod
    def of(cls, job: Job, layout: Layout, rank: int) -> ModelOptions:
        plain = not needs_fsdp(job, layout)
        return cls(
            layout.activation_checkpointing,
            layout.zero_stage,
            layout.offload,
            getattr(torch, job.precision) if job.precision != "float32" else None,
            None if plain else getattr(torch, job.reduce_dtype),
            coordinates(layout, rank).pp == layout.pp - 1,  # of the last of its stages
            job.compile,
            job.float8,
        )

    def wrap(self, blocks: Sequence[nn.Module]) -> None:
        """The blocks' forward passes, after tensor parallelism and before FSDP2."""
        if self.float8:
            use_float8(blocks)
        checkpoint_blocks(blocks, self.activation_checkpointing)
        if self.compile:
            compile_blocks(blocks)

    def of_block(self) -> dict[str, Any]:
        """Arguments of fully_shard for a block."""
        return {"reshard_after_forward": self.zero_stage == 3} | self._policies(None)

    def of_experts(self) -> dict[str, Any]:
        """Of a module of experts inside of one: the router's weights stay what they are."""
        found = self.of_block()
        if policy := found.get("mp_policy"):
            found["mp_policy"] = replace(policy, cast_forward_inputs=False)
        return found

    def of_root(self) -> dict[str, Any]:
        """Arguments of fully_shard for the whole model: what is in no block."""
        return self._policies(torch.float32 if self.compute and self.gives_output else None)

    def _policies(self, output: torch.dtype | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.compute or self.reduce:
            found["mp_policy"] = MixedPrecisionPolicy(self.compute, self.reduce, output)
        if self.offload:
            found["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return found


def to_empty(model: nn.Module, device: torch.device, offload: bool) -> None:
    """Memory for a module of the meta device: on `device`; with `offload` only buffers are there,
    parameters in host memory."""
    model.to_empty(device="cpu" if offload else device)
    if offload and device.type != "cpu":
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer, device=device))


def begin_microbatch(model: nn.Module, layout: Layout, number: int, *, of: int) -> None:
    """Before the forward pass of microbatch `number` of so many, from 1. Replicas add up their
    gradients in the last one only; with ZeRO stage 1 the shards do too, and parameters stay
    gathered until then. FSDP2 walks through all modules to be told so: only where it changes."""
    if of == 1 or number not in (1, of) or not isinstance(model, FSDPModule):
        return
    if layout.zero_stage == 1:
        model.set_requires_gradient_sync(number == of)
        model.set_reshard_after_backward(number == of)
    elif layout.dp_replicate > 1:
        model.set_requires_all_reduce(number == of)
