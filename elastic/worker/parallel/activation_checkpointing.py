"""Activation checkpointing: what a block's forward pass leaves in memory for its backward pass, and
what is computed again.

none: everything stays. full: only the block's inputs stay. selective: outputs of matrix products
and of attention stay as well, so that only cheap element-wise work is done twice. Random numbers
(dropout) are the same in both passes. The numbers of a step do not change: it may differ from
layout to layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# kept by `selective`; names that this torch does not have are left out
KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: str) -> None:
    """Each block's forward pass is wrapped in place; names of modules and parameters stay as they
    were.

    The wrapping lies inside of the hooks that gather a block's parameters, so that both passes find
    them gathered.
    """
    if mode == "none":
        return
    kept = kept_ops()
    how: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, how)


def _recomputed(forward: Callable[..., Any], how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, **how, **kwargs)


def _policy(kept: frozenset[Any], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def kept_ops() -> frozenset[Any]:
    """Operators whose outputs `selective` keeps."""
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in KEPT if hasattr(aten, name))
