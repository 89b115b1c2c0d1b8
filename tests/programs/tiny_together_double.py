"""tiny_together.py in float64, Muon's polynomial as well, which torch computes in bfloat16."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.optim import _muon

sys.path.insert(0, str(Path(__file__).parent))
from tiny_together import Together
from tiny_together import program as together
from tiny_towers import Pictures

rounded = _muon._zeropower_via_newtonschulz


def orthogonalized(gradient, coefficients, steps, eps):
    """As torch's own, which rounds to bfloat16 first; that is left to other programs of the same
    process."""
    if gradient.dtype != torch.float64:
        return rounded(gradient, coefficients, steps, eps)
    a, b, c = coefficients
    tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class DoublePictures(Pictures):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "input": sample["input"].double()}


_muon._zeropower_via_newtonschulz = orthogonalized
program = replace(together, model=lambda: Together().double(), dataset=lambda: DoublePictures(240))
