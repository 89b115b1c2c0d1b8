"""Patterns of module names, and what a plan for tp may name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.worker.program.loop_program import LoopProgram, no_loss
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


@pytest.mark.parametrize("of", [Program, LoopProgram])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
def test_what_torch_cannot_cut_closes_tp_by_name(kind: type[nn.Module], of: type[Program]) -> None:
    model = nn.ModuleDict({"up": nn.Conv2d(4, 8, 1) if kind is nn.Conv2d else nn.Linear(4, 8)})
    program = of(
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
            f"{'Program.' if of is Program else 'elastic.loop: '}tp names up, a Conv2d; 'colwise' "
            "cuts nn.Linear and nn.Embedding only",
            1,
        )


def test_a_pattern_of_a_loop_is_told_as_its_own() -> None:
    given = {
        "model": lambda: nn.ModuleDict({"up": nn.Linear(4, 8)}),
        "optimizer": lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        "loss": no_loss,
    }
    with pytest.raises(ProgramError, match=r"^elastic.loop: tp\['down'\]: no module is named like"):
        trace(LoopProgram(tp={"down": "colwise"}, **given))
    with pytest.raises(SpecError, match=r"^elastic.loop: tp\['up'\] is 'sideways'; it must be"):
        LoopProgram(tp={"up": "sideways"}, **given)


def test_what_the_model_raises_is_told_with_its_line() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, -4))

    program = Program(
        model=model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
    )
    line = model.__code__.co_firstlineno + 1
    with pytest.raises(SpecError) as raised:
        trace(program)
    said = str(raised.value)
    assert said.startswith(f"{__file__}:{line}: Program.model() raised RuntimeError: "), said


class Towers(nn.Module):
    """The second one is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.text = tower()
        self.vision = tower()
        self.bridge = nn.Linear(2, 2)


def tower() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embed": nn.Linear(2, 2),
            "layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)),
            "norm": nn.LayerNorm(2),
        }
    )


def places(*blocks: str) -> dict[str, int | None]:
    program = Program(
        model=Towers,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
        blocks=list(blocks),
    )
    return {s.fqn.removesuffix(".weight"): s.block for s in trace(program).specs}


def test_what_stands_beside_several_groups_belongs_to_a_block_of_its_tower() -> None:
    found = places("vision.layers.*", "text.layers.*")
    assert found["vision.layers.1"] == 1 and found["text.layers.0"] == 2
    assert (found["scale"], found["vision.embed"], found["vision.norm"]) == (1, -1, 1)
    # behind the last group: the last stage's; registered behind the first tower: with its last block
    assert (found["text.embed"], found["text.norm"], found["bridge"]) == (1, 4, 1)
    other = places("text.layers.*", "vision.layers.*")
    assert (other["scale"], other["vision.embed"], other["bridge"]) == (-1, 1, 4)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        (
            ("vision.layers.*", "txt.layers.*"),
            "Program.blocks='txt.layers.*': no module is named like this; near it: text.layers.*",
        ),
        (("text.layers.*", "text.layers.[01]"), "matches text.layers.0 by two patterns"),
        (("vision", "vision.layers.*"), "matches both vision and vision.layers.0 inside of it"),
    ],
)
def test_groups_that_are_none_are_told_in_one_line(blocks: tuple[str, ...], why: str) -> None:
    with pytest.raises(ProgramError) as raised:
        places(*blocks)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([], r"Program.blocks is \[\]; it must be a pattern of module names, or a list of them"),
        ([3], r"Program.blocks is \[3\]"),
        (["a.*", "a.*"], "Program.blocks names 'a.*' twice"),
    ],
)
def test_blocks_are_a_pattern_or_a_list_of_them(blocks: list[Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        Program(loss=lambda output, batch: output.sum(), model=Towers, blocks=blocks)
