"""What is judged of a layout without starting processes: equal numbers are numbers, and what a
pipeline asks of a model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.program import Program
from elastic.types import Box, Layout, ModelProfile, TensorSpec
from elastic.worker.equivalence import compare_values
from elastic.worker.equivalence.blocks_in_stages import one_weight
from elastic.worker.equivalence.small_copy import ROWS
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.program.model_profile import trace

TP = Layout(tp=2)


def judged(loss: float, off: float) -> compare_values.Compared:
    answers = [
        {"whole": 4.0, "loss": loss, "differ": {"head": off}, "first": ""},
        {"whole": 4.0, "loss": 0.0, "differ": {}, "first": ""},
    ]
    return compare_values._judged(TP, answers, compare_values.Words(), seconds=1.0, times={})


@pytest.mark.parametrize(
    ("loss", "off", "says"),
    [
        (4.0, 0.5, ""),
        (4.0001, 0.5, ""),
        (4.1, 0.5, f"the loss of {ROWS} samples is 4.1, in one process it is 4"),
        (math.nan, 0.5, "it computes another function"),
        (4.0, 1.5, "other gradients than one process: that of head"),
        (4.0, math.inf, "other gradients than one process: that of head"),
    ],
)
def test_only_numbers_that_are_equal_are_equal(loss: float, off: float, says: str) -> None:
    found = judged(loss, off).problem
    assert says in found and bool(found) == bool(says)


def test_a_gradient_that_is_no_number_is_not_equal() -> None:
    box = Box("model.head", (0,), (2,), "float32")
    parameter = nn.Parameter(torch.zeros(2))
    state: Any = SimpleNamespace(
        local={"head": parameter}, tensors={"model.head": (box, parameter)}
    )
    whole = {"head": torch.tensor([1.0, 2.0])}
    for own, equal in (([1.0, 2.0], True), ([1.0, 2.1], False), ([1.0, math.nan], False)):
        off = compare_values._differ(state, {"head": torch.tensor(own)}, whole)["head"]
        assert (off <= 1.0) == equal


# ---------------------------------------------------------------------------------------- structure


class Net(nn.Module):
    """`calls`: which blocks forward calls, in which order; `shared`: one weight in two blocks."""

    def __init__(self, calls: tuple[int, ...], shared: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 16)
        self.calls = calls
        if shared:
            self.layers[2].weight = self.layers[0].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in self.calls:
            x = self.layers[i](x)
        found: torch.Tensor = self.head(x)
        return found


def refusals(*calls: int, shared: bool = False) -> tuple[str, str]:
    """Why not dp, why not pp."""
    program = Program(
        model=lambda: Net(calls, shared),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
    )
    found = structure_of(program, trace(program), {"input": torch.zeros(1, 4, dtype=torch.int64)})
    return found.no_dp, found.no_pp


def test_each_block_of_a_pipeline_is_called_once_and_in_order() -> None:
    assert refusals(0, 1, 2) == ("", "")
    assert "forward calls layers.1 never; each block must be called once" in refusals(0, 2)[1]
    assert "forward calls layers.1 twice" in refusals(0, 1, 1, 2)[1]
    assert "blocks are called in their order" in refusals(0, 2, 1)[1]


def test_a_weight_of_two_blocks_is_refused_where_blocks_are_sharded_or_spread() -> None:
    no_dp, no_pp = refusals(0, 1, 2, shared=True)
    assert (
        "layers.0.weight and layers.2.weight are one weight in two blocks" in no_dp
        and "which two stages would hold" in no_pp
    )


class Autocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class Half(nn.Linear):
    """Its own weights of 16 bits, float32 in and out."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__(n, m, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half()).float()


class Mask(nn.Linear):
    """A bfloat16 tensor that nothing of the samples is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found * torch.ones(8, dtype=torch.bfloat16).float()


@pytest.mark.parametrize(
    ("kind", "dtype", "found"),
    [
        (nn.Linear, torch.float32, ""),
        (nn.Linear, torch.float64, ""),
        (Mask, torch.float32, ""),
        (nn.Linear, torch.bfloat16, "bfloat16"),
        (Autocast, torch.float32, "bfloat16"),
        (Half, torch.float32, "float16"),
    ],
)
def test_the_type_of_fewest_bits_that_a_model_computes_in(
    kind: type[nn.Linear], dtype: torch.dtype, found: str
) -> None:
    def model() -> nn.Module:
        net = Net((0, 1, 2)).to(dtype)
        net.layers[1] = kind(8, 8) if dtype is torch.float32 else kind(8, 8).to(dtype)
        return net

    program = Program(
        model=model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
    )
    profile = trace(program)
    structure = structure_of(program, profile, {"input": torch.zeros(1, 4, dtype=torch.int64)})
    assert (structure.computes_in, structure.close(profile).computes_in) == (found, found)


def test_a_tied_head_is_kept_in_every_layout() -> None:
    specs = (
        TensorSpec("embed", (4,), "float32", block=-1),
        TensorSpec("head", (4,), "float32", block=2, tied_to="embed"),
    )
    assert one_weight(ModelProfile(2, 0, specs)) is None


class Named(nn.Module):
    """Blocks that do not stand where the default of Program.blocks looks for them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(n))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for block in self.h:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("n", "keys", "said"), [(3, {}, True), (1, {}, False), (3, {"blocks": "h.*"}, False)]
)
def test_blocks_that_the_default_misses_are_told(n: int, keys: dict[str, str], said: bool) -> None:
    program = Program(
        model=lambda: Named(n),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        loss=lambda output, batch: output.sum(),
        **keys,  # type: ignore[arg-type]
    )
    found = structure_of(program, trace(program), {"input": torch.zeros(1, 4, dtype=torch.int64)})
    told = [note for note in found.notes if "sharded as one piece" in note]
    assert bool(told) == said
    assert not said or "blocks='h.*' names its 3 Sequential" in told[0]
