"""Prepare in the shadow: one forward and backward pass on one sample, so that kernels and imports are warm before the cut."""

from __future__ import annotations

import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from elastic.data.loader import collate
from elastic.worker.generation import Workplace
from elastic.worker.step import inputs_of


def rehearse(place: Workplace) -> None:
    """Runs the program once on the CPU or GPU of this worker. Raises what the program raises."""
    torch.manual_seed(0)
    model = place.program.model().to(place.device)
    if place.program.init is not None:
        place.program.init(model)
    batch = {k: v.to(place.device) for k, v in collate([place.dataset[0]]).items()}
    place.program.loss(model(inputs_of(place.program, batch)), batch).backward()
