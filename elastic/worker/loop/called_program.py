"""A script's program as one with inputs and a loss: those of a call that its loop makes of its
model, and a number that every value of what the model gives counts in.

The loss of a loop is its own, and nobody but its body can compute it. Whether a layout computes
what one process does is told by what the model gives, and by the gradients that come from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.worker.program.calls import Arguments, Batch, ModelCall, mapped, tensors_in
from elastic.worker.program.loop_program import LoopProgram

LOW = (torch.float16, torch.bfloat16)
GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, are spread evenly
MOST_ROWS = 4  # of a call
LEFT_OUT = ("dataset", "validation", "metrics", "log", "evaluate", "sample", "lr_factor", "files")


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of the call stands. `whole`: not by sample."""

    key: str
    whole: bool


def called_program(program: LoopProgram, call: ModelCall) -> tuple[Program, Batch]:
    """The program, and the batch that it is called with as the script called it, in the mode that
    it was called in. Raises SpecError where the call has nothing that could be compared."""
    batch: Batch = {}
    n = min(call.n, MOST_ROWS)

    def keep(x: Tensor) -> _Slot:
        slot = _Slot(str(len(batch)), not (x.ndim and len(x) == call.n))
        # as the weights that it meets
        x = x.detach().to(torch.float32 if x.dtype in LOW else x.dtype, copy=True)
        # a batch is cut by rows
        batch[slot.key] = x.expand(n, *x.shape) if slot.whole else x[:n]
        return slot

    arguments, keywords = mapped((Arguments(call.args), dict(call.kwargs)), keep)
    if not batch:
        raise SpecError("run.model(...) is called without tensors: give it those of the batch")

    def filled(value: Any, given: Mapping[str, Tensor]) -> Any:
        return mapped(value, lambda s: given[s.key][0] if s.whole else given[s.key], _Slot)

    values = {f.name: getattr(program, f.name) for f in fields(Program) if f.name not in LEFT_OUT}
    values |= {
        "loss": weighed, "count": lambda given: n, "extra_state": {},
        "inputs": lambda given: filled(arguments, given),
        "keywords": lambda given: filled(keywords, given), "buffers": _Buffers(program),
        "batch_dependent": program.batch_dependent or call.evaluates,
    }  # fmt: skip
    return Program(**values), batch


class _Buffers:
    """Fills a cut model's buffers from the whole one of the script, where they are alike."""

    def __init__(self, program: LoopProgram) -> None:
        self.program = program

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> bool:
        own = dict(self.program.model().named_buffers())
        for name, buffer in model.named_buffers():
            if name not in own or own[name].shape != buffer.shape:
                return False
            buffer.copy_(own[name])
        return True


def weighed(output: Any, batch: Any) -> Tensor:
    """The sum of x + x^2 / 2 over all that the model gives, each with a weight of its own: no two
    may change places, none its sign. Raises ProgramError where it gives no numbers."""
    found = [*tensors_in(output)] or [*tensors_in(getattr(output, "__dict__", ()))]
    terms = []
    for x in found:
        x = x.full_tensor() if isinstance(x, DTensor) else x
        x = torch.view_as_real(x) if x.is_complex() else x
        if x.is_floating_point() and x.numel():
            at = torch.arange(x.numel(), dtype=torch.float64, device=x.device).view(x.shape)
            x = x.double()  # many add up
            terms.append(((at * GOLDEN).frac().add(0.5) * (x + x.square() / 2)).sum())
    if not terms:
        kind = type(output).__name__
        raise ProgramError(
            f"run.model(...) gives no numbers that are found (a {kind}): let it give tensors, also "
            "in lists, dicts or a dataclass"
        )
    return torch.stack(terms).sum()
