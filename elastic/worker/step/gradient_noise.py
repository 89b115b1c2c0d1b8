"""Square norms of the gradients of single ranks and microbatches, before they are added up: for the
gradient noise scale.

McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1: gradients of two
batch sizes give unbiased estimates of the trace of the per-sample covariance and of the square norm
of the true gradient; their ratio is the simple noise scale, the batch size beyond which a larger
batch gains little. Here the small batch is what one data-parallel rank has in one microbatch.
FSDP2's parameters are whole tensors of the rank while a forward pass is recorded, and their hooks
see the gradient of the rank alone, before it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.types import ModelProfile, Plan
from elastic.types.grid import each_microbatches
from elastic.worker.program.calls import cut_rows

MARK = "_elastic_watched"


def parts_of(samples: Sequence[int], n_microbatches: Sequence[int], together: int = 1) -> list[int]:
    """Sizes of the single microbatches of all data-parallel ranks; of each rank how many."""
    unit = max(1, together)
    each = zip(samples, n_microbatches, strict=True)
    return [len(rows) for n, pieces in each for rows in cut_rows(n, pieces, unit)]


def noise(small: float, big: float, parts: Sequence[int]) -> tuple[float, float]:
    """(trace of the covariance, square norm of the true gradient), both of one sample's gradient.
    `small`: sum of the square norms of the parts' gradients, `big`: square norm of their sum;
    gradients are sums over samples."""
    n, squares = sum(parts), sum(part * part for part in parts)
    trace = (small - big * squares / n**2) / (n - squares / n)
    return trace, (big - small) / (n**2 - squares)


def cannot(plan: Plan, profile: ModelProfile, script: bool) -> str:
    """Why this layout gives no estimate; '' = it does."""
    layout = plan.layout
    if script:
        return "a script computes the gradients"
    if layout.tp > 1 or layout.cp > 1:
        return "with tp or cp no rank has a gradient of its own"
    if layout.ep > 1:
        return "with ep a rank has gradients of other ranks' samples"
    if layout.pp > 1 and any(spec.tied_to for spec in profile.specs):
        return "a tied tensor stands on two stages"
    samples, unit = plan.samples, profile.together
    each = each_microbatches(layout, samples, plan.n_microbatches, together=unit)
    if sum(part > 0 for part in parts_of(samples, each, unit)) < 2:
        return "one rank with one microbatch has only one batch size"
    return ""


class LocalGradients:
    """Adds up the square norms of every gradient that reaches a parameter of `models` (a rank's
    stages) while it is `on`."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.on = False
        self._sums: list[torch.Tensor] = []
        for module in (module for model in models for module in model.modules()):
            module.register_forward_pre_hook(self._before)

    def begin(self) -> None:
        self.on = True
        self._sums = []

    def end(self) -> torch.Tensor | float:
        """The sum since `begin`: a float64 scalar on the gradients' device; 0 where there were
        none."""
        self.on = False
        found, self._sums = self._sums, []
        return torch.stack(found).double().sum() if found else 0.0

    def _before(self, module: nn.Module, args: Any) -> None:
        if self.on:
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and getattr(parameter, MARK, None) is not self:
                    setattr(parameter, MARK, self)
                    parameter.register_hook(self._seen)

    def _seen(self, gradient: torch.Tensor) -> None:
        if self.on:
            self._sums.append(gradient.detach().float().square().sum())
