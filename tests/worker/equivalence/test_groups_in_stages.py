"""Several groups of blocks in pipeline stages: exact wherever they are cut, and one line where they
cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from support.docs.pages import block
from support.places import PROGRAMS
from torch import Tensor, nn

from elastic.data.collate import collate
from elastic.errors import ProgramError
from elastic.program import Program, load_program
from elastic.types import ModelProfile
from elastic.worker.equivalence.stages.unit_flow import with_flow
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.parallel.stages.carried_values import MODEL_INPUT
from elastic.worker.program.model_profile import trace

TOWERS = load_program(PROGRAMS / "tiny_towers.py")
N_BLOCKS = 6


def cuts() -> Iterator[tuple[int, ...]]:
    """Every way into two stages, and into three."""
    for n in (1, 2):
        for at in combinations(range(1, N_BLOCKS), n):
            yield tuple(b - a for a, b in zip((0, *at), (*at, N_BLOCKS), strict=True))
    yield (1,) * N_BLOCKS


def through_stages(
    program: Program,
    profile: ModelProfile,
    model: nn.Module,
    *,
    layers: tuple[int, ...],
    batch: dict[str, Tensor],
) -> tuple[Any, dict[str, Tensor]]:
    """The output and the gradients of stages, one behind the other, each in an autograd graph of
    its own."""
    assert program.keywords is not None
    keywords = {**program.keywords(batch), MODEL_INPUT: batch["input"]}
    stages, given, passes = [], (batch["input"],), []
    for stage in range(len(layers)):
        part = cut_stage(copy.deepcopy(model), program, profile, layers=layers, stage=stage)
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in given)
        output = part(*leaves, **keywords)
        stages.append(part)
        passes.append((leaves, output))
        given = output if isinstance(output, tuple) else (output,)
    loss = program.loss(passes[-1][1], batch)
    loss.backward()
    for (leaves, _), (_, before) in zip(passes[:0:-1], passes[-2::-1], strict=True):
        torch.autograd.backward(list(before), [x.grad for x in leaves])
    gradients = {
        name: p.grad for part in stages for name, p in part.named_parameters() if p.grad is not None
    }
    return loss, gradients


def test_wherever_the_towers_are_cut_loss_and_gradients_are_those_of_the_whole_model() -> None:
    dataset: Any = TOWERS.dataset and TOWERS.dataset()
    batch = collate([dataset[i] for i in range(3)])
    torch.manual_seed(0)
    model, profile = TOWERS.model(), with_flow(TOWERS, trace(TOWERS), collate([dataset[0]]))
    whole = copy.deepcopy(model)
    wanted = TOWERS.loss(whole(batch["input"], batch["ids"]), batch)
    wanted.backward()
    for layers in cuts():
        loss, gradients = through_stages(TOWERS, profile, model, layers=layers, batch=batch)
        torch.testing.assert_close(loss, wanted)
        for name, p in whole.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, msg=f"{layers} {name}")


def test_what_a_later_stage_needs_is_handed_on_and_no_more() -> None:
    dataset: Any = TOWERS.dataset and TOWERS.dataset()
    profile = with_flow(TOWERS, trace(TOWERS), collate([dataset[0]]))
    assert profile.carried(1) == ("vision.patches", "vision.layers.0")
    assert profile.carried(3) == ("vision.norm", "text.embed")
    assert profile.carried(5) == ("vision.norm", "text.embed", "text.layers.0", "text.layers.1")
    assert {s.fqn: s.block for s in profile.specs}["text.embed.weight"] == 2


def test_the_page_names_the_groups_of_the_towers() -> None:
    names: dict[str, Any] = {}
    exec(block("models.md", "python", 2), names)
    assert tuple(names["blocks"]) == TOWERS.blocks


def test_stages_of_a_program_that_was_not_followed_are_refused() -> None:
    with pytest.raises(ProgramError, match="what pipeline stages of this program hand on is not"):
        cut_stage(TOWERS.model(), TOWERS, trace(TOWERS), layers=(3, 3), stage=1)


# ------------------------------------------------------------------------------------- bad input


class Two(nn.Module):
    """`how`: (model, input) -> output."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.a = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.middle = nn.Linear(4, 4)
        self.b = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def no_pp(how: Callable[[Any, Tensor], Any], **more: Any) -> str:
    program = Program(
        model=lambda: Two(how),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
        **{"blocks": ["a.*", "b.*"]} | more,
    )
    return structure_of(program, trace(program), {"input": torch.zeros(1, 4)}).no_pp


def through(m: Any, x: Tensor, *order: nn.Module) -> Any:
    for module in order:
        x = module(x)
    return m.head(x)


WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "plain": (lambda m, x: through(m, x, *m.a, m.middle, *m.b), ""),
    "residuals": (lambda m, x: m.head(x + m.b[1](m.b[0](m.middle(m.a[1](m.a[0](x)) + x)))), ""),
    "both begin anew": (lambda m, x: m.head(m.a[1](m.a[0](x)) + m.b[1](m.b[0](m.middle(x)))), ""),
    "interleaved, and apart": (
        lambda m, x: (lambda p, q: m.head(m.a[1](p) + m.b[1](q)))(m.a[0](x), m.b[0](m.middle(x))),
        "",
    ),
    "interleaved": (
        lambda m, x: through(m, x, m.a[0], m.b[0], m.a[1], m.middle, m.b[1]),
        "a.1 needs what b.0 gives, which comes behind it: list the patterns of `blocks` in "
        "the order in which they run",
    ),
    "a module too early": (
        lambda m, x: through(m, x, m.middle, *m.a, *m.b),
        "a.0 needs what middle gives, which comes behind it",
    ),
    "twice": (
        lambda m, x: through(m, x, *m.a, m.middle, m.middle, *m.b),
        "forward calls middle twice; a pipeline stage calls it once",
    ),
    "never": (
        lambda m, x: through(m, x, *m.a, m.middle, m.b[0]),
        "forward calls b.1 never; each block must be called once",
    ),
    "a weight": (
        lambda m, x: through(m, x * m.scale, *m.a, m.middle, *m.b),
        "a.0 is made from the weight scale, which `forward` uses outside of modules: put it into a "
        "module",
    ),
    "a dict": (
        lambda m, x: {"out": through(m, x, *m.a, m.middle, *m.b)},
        "the model gives a dict; pipeline stages give a tensor or a tuple of tensors",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_stages_cannot_hand_on_is_one_line(name: str) -> None:
    how, why = WAYS[name]
    found = no_pp(how)
    assert why in found and bool(found) == bool(why), found


def test_other_refusals() -> None:
    plain = WAYS["plain"][0]
    assert "the model's input is a list" in no_pp(
        lambda m, x: plain(m, x[0]), inputs=lambda batch: [batch["input"]]
    )
    # in one list: the same model may be cut anywhere
    assert not no_pp(WAYS["interleaved"][0], blocks=["a.0", "b.0", "a.1", "b.1"])


def test_a_block_that_gives_two_tensors_is_refused_where_another_stage_needs_them() -> None:
    class Pairs(Two):
        def __init__(self) -> None:
            super().__init__(lambda m, x: through(m, m.a[1](*m.a[0](x)[:1]), m.middle, *m.b))
            self.a[0] = Pair(4, 4)

    program = Program(
        model=Pairs,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
        blocks=["a.*", "b.*"],
    )
    found = structure_of(program, trace(program), {"input": torch.zeros(1, 4)}).no_pp
    assert found.startswith("a.0 gives no tensor, which a.1 needs on another stage")


def test_one_weight_before_and_between_the_groups_is_no_reason_against_dp() -> None:
    class Tied(Two):
        def __init__(self) -> None:
            super().__init__(lambda m, x: through(m, m.first(x), *m.a, m.middle, *m.b))
            self.first = nn.Linear(4, 4)
            self.middle.weight = self.first.weight

    program = replace(
        TOWERS, model=Tied, blocks=["a.*", "b.*"], keywords=None, tp={}, tp_limit=0,
        loss=lambda output, batch: output.sum(),
    )  # fmt: skip
    found = structure_of(program, trace(program), {"input": torch.zeros(1, 4)})
    assert not found.no_dp
    assert "middle.weight and first.weight are one weight, which two stages would hold" in (
        found.no_pp
    )
