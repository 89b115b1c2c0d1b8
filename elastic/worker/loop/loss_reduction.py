"""Is the loss that a loop gives a mean where a sum is asked for? Read from how it was computed, not
from its value."""

from __future__ import annotations

from typing import Any

import torch

MEAN = 1  # torch's number of reduction="mean"
# the scale stays
SAME = ("ToCopy", "View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias", "Neg")
MOST_NODES = 32


def is_mean(loss: torch.Tensor, count: int) -> bool:
    """Whether the last thing done to the loss was to average it: by a reduction of torch,
    `.mean()`, or a division by `count`, the samples or tokens of the batch. What cannot be seen (a
    compiled function, another scale) counts as a sum."""
    return count > 1 and loss.grad_fn is not None and _averages(loss.grad_fn, count, MOST_NODES)


def _averages(node: Any, count: int, left: int) -> bool:
    kind = node.name().removesuffix("Backward0").removesuffix("Backward1")
    below = [further for further, _ in node.next_functions if further is not None]
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        return bool(reduction == MEAN)
    if kind == "Mean":
        return True
    if kind == "Div":
        other = getattr(node, "_saved_other", None)
        return isinstance(other, torch.Tensor) and other.numel() == 1 and float(other) == count
    if left and (kind in SAME and len(below) == 1 or kind in ("Add", "Sub") and below):
        return all(_averages(further, count, left - 1) for further in below)
    return False
