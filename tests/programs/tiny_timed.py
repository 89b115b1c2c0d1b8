"""The tiny program with steps and transitions whose length is waiting, as a GPU's are to its host:
what else the machine does hardly changes them."""

import time
from dataclasses import replace
from pathlib import Path

import torch

from elastic.models.llama import Llama
from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
SAMPLE_S, BUILD_S = 0.1, 1.0


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    time.sleep(SAMPLE_S * len(output))
    return tiny.loss(output, batch)


def model() -> Llama:
    time.sleep(BUILD_S)
    return tiny.model()


program = replace(tiny, loss=loss, model=model)
