"""Blocks that are computed again in the backward pass (activation checkpointing): do they give the
gradients that they give where their values are kept, behind the forward pass of another micro-batch
too, as on a pipeline stage?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from elastic.user_frames import told
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.passes.kept_by_passes import (
    AGREE,
    MOST_FLOP,
    ROWS,
    SMALL,
    ModelPasses,
    flop_of,
    rows_of,
)
from elastic.worker.equivalence.small_copy import SmallCopy
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.program.model_profile import block_names

Gradients = Mapping[str, Tensor]


def recomputed_blocks(small: SmallCopy, batch: Batch) -> str:
    """Are the gradients of two micro-batches of other samples others where a stage computes their
    blocks again? '' = no, or it cannot be told; else what is said of it.

    Where they are others right behind the own forward pass as well, nothing is: flex_attention on
    a CPU is so."""
    names = block_names(small.model, small.program.blocks)
    if not names or flop_of(small, batch) * 8 > MOST_FLOP:
        return ""
    try:
        kept = _gradients(small, batch, "none", together=False)
    except Exception:  # noqa: BLE001 - the user's model: the layouts tell what it raises
        return ""
    found = _difference(small, batch, kept, together=True)
    if not found or _difference(small, batch, kept, together=False):
        return ""
    return (
        f"{found} where blocks are computed again after the forward pass of another micro-batch, "
        "as on a pipeline stage: a block reads something besides its arguments that is of the "
        "newest one (a mask on an object that all blocks share); give it to the block as an "
        "argument"
    )


def _gradients(small: SmallCopy, batch: Batch, mode: str, *, together: bool) -> Gradients:
    """`together`: both forward passes come before the backward passes."""
    model = small.anew(small.dtype).train(not small.program.batch_dependent)
    trial = ModelPasses(small, model)
    names = block_names(model, small.program.blocks)
    checkpoint_blocks([model.get_submodule(name) for name in names], mode)
    left: list[Tensor] = []
    with Still(), python_random(0.999):
        for i in range(2):
            left.append(trial.loss(rows_of(batch, ROWS * i, ROWS * (i + 1))))
            if not together:
                left.pop().backward()
        if left:
            sum(left, torch.zeros(())).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _difference(small: SmallCopy, batch: Batch, kept: Gradients, *, together: bool) -> str:
    """What is said of gradients that are not those of `kept`."""
    try:
        again = _gradients(small, batch, "full", together=together)
    except Exception as error:  # noqa: BLE001 - see above
        return f"it raises {told(error)}"
    most = max((float(g.abs().max()) for g in kept.values() if g.numel()), default=0.0)
    for name in {**kept, **again}:
        one, other = (g.get(name) for g in (kept, again))
        if one is None or other is None:
            return f"only some of the passes give {name} a gradient"
        size = max(float(one.abs().max()) if one.numel() else 0.0, SMALL / AGREE * most, 1e-30)
        off = float((one - other).abs().max()) / size if one.numel() else 0.0
        if off > AGREE:
            return f"the gradient of {name} differs by {off:.1%} of its largest element"
    return ""
