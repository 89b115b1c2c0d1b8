"""The tiny program with dropout behind each block and a buffer that each forward pass in training mode changes."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from elastic.models.llama import Llama
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")


class WithDropout(Llama):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.zeros(()))
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        torch.rand(3)
        return self.dropout(super().forward(ids))


program = replace(tiny, model=lambda: WithDropout(tiny.model().config))
