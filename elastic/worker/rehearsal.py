"""Prepare in the shadow: one forward and backward pass on one sample, so that kernels and imports are warm before the cut."""

from __future__ import annotations

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch import nn

from elastic.data.loader import collate
from elastic.errors import ProgramError
from elastic.worker.generation import Workplace
from elastic.worker.step import inputs_of, loss_of


def rehearse(place: Workplace) -> None:
    """Runs the program once on the CPU or GPU of this worker. Raises what the program raises."""
    torch.manual_seed(0)
    model = place.program.model().to(place.device)
    if place.program.init is not None:
        place.program.init(model)
    _loss(place, model, 1).backward()
    _refuse_a_mean(place, model)


def _loss(place: Workplace, model: nn.Module, times: int) -> torch.Tensor:
    """Of the first sample, `times` over."""
    batch = {k: v.to(place.device) for k, v in collate([place.dataset[0]] * times).items()}
    return loss_of(place.program, model(inputs_of(place.program, batch)), batch)


def _refuse_a_mean(place: Workplace, model: nn.Module) -> None:
    """The same sample twice must double the loss. Raises ProgramError for a mean: its scale would change with the layout."""
    model.eval()
    with torch.no_grad():
        once, twice = float(_loss(place, model, 1)), float(_loss(place, model, 2))
    if once and abs(twice - once) < 1e-3 * abs(once):
        raise ProgramError(
            f"Program.loss returned {once:.4f} for one sample and {twice:.4f} for the same sample twice: a mean, it seems; "
            "it must return the sum over the batch (reduction='sum'), which elastic divides by the global count of the step"
        )
