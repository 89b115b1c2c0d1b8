"""Activation checkpointing: what a block's forward pass leaves in memory for its backward pass, and
what is computed again.

none: everything stays. full: only the block's inputs stay. selective: outputs of matrix products
and of attention stay as well, so that only cheap element-wise work is done twice. Random numbers
(dropout) are the same in both passes, and so are buffers that a pass writes (counts, running
means): they are written once. The numbers of a step do not change: it may differ from
layout to layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

Contexts = Callable[[], tuple[Any, Any]]

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
    contexts: Contexts | None = None
    if mode == "selective":
        policy = partial(_policy, kept_ops())
        contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in blocks:
        written = WrittenBuffers(block)
        block.forward = partial(_recomputed, block.forward, contexts, written)


def _recomputed(
    forward: Callable[..., Any],
    contexts: Contexts | None,
    written: WrittenBuffers,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if written.all and not torch.compiler.is_compiling():
        contexts = partial(written.contexts, contexts or noop_context_fn)
    how: dict[str, Any] = {"context_fn": contexts} if contexts else {}  # torch.compile refuses none
    return checkpoint(forward, *args, use_reentrant=False, **how, **kwargs)


@dataclass(frozen=True, eq=False)
class BufferPlace:
    """Where a module has a buffer."""

    module: nn.Module
    name: str

    @property
    def buffer(self) -> torch.Tensor:
        found = self.module._buffers[self.name]
        assert found is not None
        return found

    def put(self, buffer: torch.Tensor) -> None:
        self.module._buffers[self.name] = buffer


Before = dict[BufferPlace, torch.Tensor]


@dataclass(frozen=True, eq=False)
class BuffersNoted:
    """Buffers as they were. `held`: with their versions, and copies."""

    held: dict[BufferPlace, tuple[torch.Tensor, int, torch.Tensor]]

    def changed(self) -> Before:
        """Those that were written since, as they were."""
        return {
            at: copied
            for at, (buffer, version, copied) in self.held.items()
            if at.buffer is not buffer or buffer._version != version
        }

    @torch.no_grad()
    def put_back(self) -> None:
        for at, copied in self.changed().items():
            at.put(self.held[at][0].copy_(copied))


class WrittenBuffers:
    """Buffers of a block that its forward pass writes: the pass that is done again has them as the
    first one had them, and leaves nothing behind."""

    def __init__(self, block: nn.Module) -> None:
        self.all = [
            BufferPlace(module, name)
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def noted(self) -> BuffersNoted:
        held = {at: at.buffer for at in self.all}
        return BuffersNoted({at: (b, b._version, b.detach().clone()) for at, b in held.items()})

    def contexts(self, inside: Contexts) -> tuple[Any, Any]:
        """Of one pass, and of the same done again."""
        before: Before = {}
        first, again = inside()
        return self._noted(before, first), self._put(before, again)

    @contextmanager
    def _noted(self, before: Before, inside: Any) -> Iterator[None]:
        """Copies all, and keeps of what was written what it was before."""
        noted = self.noted()
        with inside:
            yield
        before.update(noted.changed())

    @contextmanager
    def _put(self, before: Before, inside: Any) -> Iterator[None]:
        """Other tensors in their places: what has been written since stays as it is."""
        now = {at: at.buffer for at in before}
        for at, value in before.items():
            at.put(value.clone())
        try:
            with inside:
                yield
        finally:
            for at, buffer in now.items():
                at.put(buffer)


def written_by(forward: Callable[..., Any]) -> WrittenBuffers | None:
    """Of a forward pass that is computed again, and has buffers."""
    if not isinstance(forward, partial) or forward.func is not _recomputed:
        return None
    written: WrittenBuffers = forward.args[2]
    return written if written.all else None


def _policy(kept: frozenset[Any], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def kept_ops() -> frozenset[Any]:
    """Operators whose outputs `selective` keeps."""
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in KEPT if hasattr(aten, name))
