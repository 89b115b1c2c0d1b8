"""As tiny.py, with one sample whose loss is no number and one whose loss is far too large."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program

BASE = load_program(Path(__file__).with_name("tiny.py"))
WEIGHTS = {77: float("nan"), 78: 1e4}


class TwoBad:
    def __init__(self) -> None:
        self.good = BASE.dataset()

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.good[index] | {"weight": torch.tensor(WEIGHTS.get(index, 1.0))}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = [
        BASE.loss(o[None], {"target": t[None]})
        for o, t in zip(output, batch["target"], strict=True)
    ]
    weights = batch.get("weight", torch.ones(len(rows)))
    return sum((w * row for w, row in zip(weights, rows, strict=True)), torch.zeros(()))


program = replace(BASE, dataset=TwoBad, loss=loss)
