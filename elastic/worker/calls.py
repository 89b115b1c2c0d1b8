"""How a Program's functions are called, with what they return checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.errors import ProgramError
from elastic.program import Program

Batch = dict[str, torch.Tensor]


def inputs_of(program: Program, batch: Batch) -> Any:
    """What the model is called with."""
    if program.inputs is not None:
        return program.inputs(batch)
    for key in ("input", "input_ids"):
        if key in batch:
            return batch[key]
    raise ProgramError(f"a sample has the keys {sorted(batch)}; name one of them 'input', or give Program.inputs")


def keywords_of(program: Program, batch: Batch) -> dict[str, Any]:
    """What it is called with besides, on every pipeline stage."""
    return dict(program.keywords(batch)) if program.keywords is not None else {}


def call_model(program: Program, model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch."""
    return model(inputs_of(program, batch), **keywords_of(program, batch))


def rows_of(output: Any, keep: torch.Tensor) -> Any:
    """These rows of each tensor of a model's output."""
    if isinstance(output, torch.Tensor):
        return output[keep] if output.ndim else output
    if isinstance(output, Mapping):
        return type(output)(**{key: rows_of(value, keep) for key, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)([rows_of(value, keep) for value in output])
    return output


def count_of(program: Program, batch: Batch) -> int:
    """Tokens (or samples) that the loss sums over."""
    if program.count is not None:
        return int(program.count(batch))
    if "target" in batch and not batch["target"].is_floating_point():
        return int((batch["target"] != -100).sum())
    return int(next(iter(batch.values())).shape[0])


def loss_of(program: Program, output: Any, batch: Batch) -> torch.Tensor:
    """The program's loss, a scalar. Raises ProgramError when it is none."""
    value = program.loss(output, batch)
    if isinstance(value, DTensor):  # of logits that are cut over tp: the same on each of these ranks
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor) or value.ndim:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ProgramError(f"Program.loss returned {found}; it must return the sum over the batch, a scalar tensor")
    return value
