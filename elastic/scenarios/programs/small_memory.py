"""The paced program on machines whose allocator gives out at more than twelve samples."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from elastic.scenarios.programs.paced import loss as paced_loss
from elastic.scenarios.programs.paced import program as paced

SAMPLES_MOST = 12


def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if output.shape[0] > SAMPLES_MOST:
        raise torch.OutOfMemoryError(f"injected: {output.shape[0]} samples")
    return paced_loss(output, batch)


program = replace(paced, loss=loss)
