"""The tiny program with an object beside the model: how often the loss was computed, which is once
a step on each rank."""

from dataclasses import replace
from pathlib import Path

import torch

from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")


class Counted:
    def __init__(self) -> None:
        self.n, self.last = 0, torch.zeros(3)

    def state_dict(self) -> dict:
        return {"n": self.n, "last": self.last}

    def load_state_dict(self, state: dict) -> None:
        self.n, self.last = state["n"], state["last"]


counted = Counted()


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if torch.is_grad_enabled():
        counted.n += 1
        counted.last = counted.last.roll(1)
        counted.last[0] = counted.n
    return tiny.loss(output, batch)


program = replace(tiny, loss=loss, extra_state={"counted": counted})
