"""The tiny program with dropout, and with a buffer that each forward pass changes and that the next
one depends on."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from elastic.models.llama import Llama, init_weights
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")


class Head(nn.Linear):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(self.dropout(hidden)) * (1 + self.calls / 256)


def model() -> Llama:
    made = tiny.model()
    made.head = Head(made.head.in_features, made.head.out_features, bias=False)
    return made


def init(made: Llama) -> None:
    init_weights(made)
    made.head.calls.fill_(0)


program = replace(tiny, model=model, init=init)
