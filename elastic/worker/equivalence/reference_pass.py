"""What one process makes of a batch: loss, gradients, and what each module releases on the way.

Ranks of a layout are compared with it, and the first module that releases something else is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.models.attention import over
from elastic.program import Program
from elastic.worker.equivalence.forward_trace import Batch
from elastic.worker.parallel.context_parallel import before_cut
from elastic.worker.parallel.pipeline import PassThrough
from elastic.worker.parallel.stages.carried_values import AbsentModule
from elastic.worker.program.calls import call_model, loss_of, tensors_in


class Outputs:
    """What each module releases in forward passes of a batch, by name, in the order in which they
    are done."""

    def __init__(self, models: Sequence[nn.Module], n_rows: int) -> None:
        self.models, self.n_rows = models, n_rows
        self.found: dict[str, list[Tensor]] = {}
        self.hooks: list[Any] = []

    def __enter__(self) -> Outputs:
        for model in self.models:
            for name, module in model.named_modules():
                if name and not isinstance(module, PassThrough | AbsentModule):
                    self.hooks.append(module.register_forward_hook(self._note(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(tensors_in(output), None)
            # what is called inside of torch.func.vmap or grad has no values outside of it
            inside = first is not None and torch.func.debug_unwrap(first) is not first
            if first is not None and not inside and not isinstance(first, DTensor):
                self.found.setdefault(name, []).append(first.detach().clone())

        return hook

    def first_difference(self, whole: Outputs, rows: slice, take: Any) -> str:
        """The first module whose output is another than in the whole model; '' = none that can be
        compared."""
        for name in whole.found:
            expected, mine = _joined(whole.found[name]), _joined(self.found.get(name, []))
            if (
                expected is None
                or mine is None
                or expected.ndim < 1
                or expected.shape[0] != whole.n_rows
            ):
                continue
            expected = expected[rows]
            # a pipeline stage is called once before, with made-up values
            mine = mine[-expected.shape[0] :]
            if take is not None and expected.ndim > 1 and expected.shape != mine.shape:
                expected = take(expected) if expected.shape[1] % (2 * 2) == 0 else expected
            if expected.shape == mine.shape and not torch.allclose(
                mine, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())
            ):
                return name
        return ""


def _joined(calls: list[Tensor]) -> Tensor | None:
    """Of several microbatches; None where they do not go together."""
    if not calls or any(
        x.shape[1:] != calls[0].shape[1:] or not x.ndim or not x.is_floating_point() for x in calls
    ):
        return None
    return torch.cat(calls)


@dataclass(frozen=True)
class Pass:
    """What one process makes of a batch."""

    loss: float
    gradients: dict[str, Tensor]
    outputs: Outputs  # of the modules


def one_pass(program: Program, model: nn.Module, batch: Batch, *, cp: int) -> Pass:
    """Forward and backward of the model, which keeps the gradients. With cp > 1 as a rank has it
    before sequences are cut."""
    given = before_cut(program, batch) if cp > 1 else batch
    with (
        over(None) if cp > 1 else nullcontext(),
        Outputs([model], len(next(iter(batch.values())))) as outputs,
    ):
        output = call_model(program, model, given)
    loss = loss_of(program, output, given)
    loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    gradients = {
        name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in named.items()
    }
    return Pass(float(loss.detach()), gradients, outputs)
