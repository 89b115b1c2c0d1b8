"""As tiny.py, with one sample whose loss is no number."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
BAD = 77


class OneBad:
    def __init__(self) -> None:
        self.good = BASE.dataset()

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.good[index] | {"weight": torch.tensor(float("nan") if index == BAD else 1.0)}


program = replace(
    BASE,
    dataset=OneBad,
    loss=lambda output, batch: BASE.loss(output, batch) * batch.get("weight", torch.ones(1)).mean(),
)
