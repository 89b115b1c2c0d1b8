"""The tiny program on a machine whose allocator gives out at more than four samples."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if output.shape[0] > 4:
        raise torch.OutOfMemoryError(f"injected: {output.shape[0]} samples")
    return tiny.loss(output, batch)


program = replace(tiny, loss=loss)
