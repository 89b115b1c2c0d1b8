"""The unpaced program with steps long enough that ranks can come and go between them."""

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from elastic.models.llama import loss_sum
from elastic.scenarios.programs.unpaced import program as unpaced

PACE_S = 0.05


def loss(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Waits, so that a run continues for as long as the events take."""
    time.sleep(PACE_S)
    return loss_sum(output, batch)


program = replace(unpaced, loss=loss)
