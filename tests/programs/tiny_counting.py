"""As tiny_nan.py, with buffers that each forward changes, and a large one that none does."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.llama import init_weights
from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny_nan.py"))


class Head(torch.nn.Linear):
    """Counts its calls in training and keeps a running mean of what comes in."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(self.in_features))
        self.register_buffer("table", torch.ones(600, 600))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        return super().forward(hidden)


def model() -> torch.nn.Module:
    made = BASE.model()
    made.head = Head(made.head.in_features, made.head.out_features, bias=False)
    return made


def init(made: torch.nn.Module) -> None:
    init_weights(made)
    for name, value in (("calls", 0), ("mean", 0.0), ("table", 1.0)):
        getattr(made.head, name).fill_(value)


program = replace(BASE, model=model, init=init)
