"""What a pipeline stage keeps of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.types import ModelProfile, TensorSpec
from elastic.worker.parallel.pipeline import PassThrough, cut_stage


class Table(nn.Module):
    """Of no class of torch.nn: every stage calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((), 0.5)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.squash, self.table = nn.Linear(3, 4), nn.Tanh(), Table()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(3))
        self.more = nn.ModuleList()
        self.ends = nn.ModuleDict(
            {"gelu": nn.GELU(), "head": nn.Linear(4, 2), "soft": nn.LogSoftmax(-1)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squash(self.embed(x))
        for layer in self.layers:
            x = layer(x) * self.table(x) if not isinstance(layer, PassThrough) else x
        for name in ("gelu", "head", "soft"):
            x = self.ends[name](x)
        return x


def profile() -> ModelProfile:
    blocks = {"embed": -1, "ends": 3} | {f"layers.{i}": i for i in range(3)}
    specs = []
    for fqn, parameter in Small().named_parameters():
        block = next(number for name, number in blocks.items() if fqn.startswith(name + "."))
        specs.append(TensorSpec(fqn, tuple(parameter.shape), "float32", block=block))
    return ModelProfile(3, 1, tuple(specs))


@pytest.mark.parametrize("layers", [(2, 1), (1, 1, 1)])
def test_stages_one_after_the_other_are_the_whole_model(layers: tuple[int, ...]) -> None:
    model, x = Small(), torch.randn(5, 3)
    program: Any = SimpleNamespace(blocks="layers.*", stage=None)
    out = x
    for stage in range(len(layers)):
        part = Small()
        part.load_state_dict(model.state_dict())
        out = cut_stage(part, program, profile(), layers=layers, stage=stage)(out)
    assert torch.equal(out, model(x))


def test_a_program_with_stages_of_its_own_keeps_what_has_no_parameters() -> None:
    program: Any = SimpleNamespace(blocks="layers.*", stage=lambda module, index, n: module)
    part = cut_stage(Small(), program, profile(), layers=(2, 1), stage=1)
    assert isinstance(part.squash, nn.Tanh) and isinstance(part.embed, PassThrough)
