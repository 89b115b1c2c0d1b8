"""As tiny_low.py; some samples weigh so much that their gradients overflow float16."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.llama import loss_sum
from elastic.program import load_program

LOW = load_program(Path(__file__).with_name("tiny_low.py"))
HEAVY = range(0, 512, 40)


class Weighed:
    def __init__(self, base) -> None:
        self.base = base

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.base[index] | {"weight": torch.tensor(1e6 if index in HEAVY else 1.0)}


def loss(output, batch):
    if output.dtype != torch.float32:
        raise TypeError(f"the output is {output.dtype}")
    rows = [
        loss_sum(output[i : i + 1], {"target": batch["target"][i : i + 1]}) * weight
        for i, weight in enumerate(batch["weight"])
    ]
    return torch.stack(rows).sum()


program = replace(LOW, dataset=lambda: Weighed(LOW.dataset()), validation=None, loss=loss)
