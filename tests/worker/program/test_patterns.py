"""Patterns of module names, and what a plan for tp may name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.worker.program.model_profile import block_names, trace


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layer[1-3]", ["layer1", "layer2", "layer3"]),
        ("layer[13]", ["layer1", "layer3"]),
        ("layer[!13]", ["layer2", "layer4"]),
        ("layer*", ["layer1", "layer2", "layer3", "layer4"]),
        ("odd-name", ["odd-name"]),
        ("layer-", []),
    ],
)
def test_brackets_as_in_file_names(pattern: str, names: list[str]) -> None:
    model = nn.ModuleDict(
        {name: nn.Identity() for name in ("layer1", "layer2", "layer3", "layer4", "odd-name")}
    )
    assert block_names(model, pattern) == names


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
def test_what_torch_cannot_cut_closes_tp_by_name(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"up": nn.Conv2d(4, 8, 1) if kind is nn.Conv2d else nn.Linear(4, 8)})
    program = Program(
        model=lambda: model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
        tp={"up": "colwise"},
    )
    found = trace(program)
    if kind is nn.Linear:
        assert (found.no_tp, found.tp_limit > 1) == ("", True)
    else:
        assert (found.no_tp, found.tp_limit) == (
            "Program.tp names up, a Conv2d; 'colwise' cuts nn.Linear and nn.Embedding only", 1
        )  # fmt: skip


def test_what_the_model_raises_is_told_with_its_line() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, -4))

    program = Program(
        model=model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
    )
    line = model.__code__.co_firstlineno + 1
    with pytest.raises(ProgramError) as raised:
        trace(program)
    said = str(raised.value)
    assert said.startswith(f"{__file__}:{line}: Program.model() raised RuntimeError: "), said
