"""What Program.model must give: a new module each time, whose tensors lie in memory of their
own."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.worker.parallel.parallelize import _check_shardable
from elastic.worker.program.model_profile import build_meta, trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.more()

    def more(self) -> None: ...

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embed(ids))
        return found


class Lookalike(Net):
    """Meant to be tied: two parameters in one memory."""

    def more(self) -> None:
        self.head.weight = nn.Parameter(self.embed.weight.data)


class Shadow(Net):
    def more(self) -> None:
        self.register_buffer("shadow", self.embed.weight.detach()[:3])


class Tied(Net):
    def more(self) -> None:
        self.head.weight = self.embed.weight


class Pieces(Net):
    """Parts of one tensor that do not overlap, and tables that are the same memory."""

    def more(self) -> None:
        whole = torch.zeros(8, 4)
        self.first, self.second = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
        table = torch.arange(6.0)
        self.register_buffer("table", table)
        self.register_buffer("short", table[:3])


def traced(model: Callable[[], nn.Module]) -> None:
    def optimizer(named: object) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)  # type: ignore[attr-defined]

    trace(Program(model=model, optimizer=optimizer, dataset=list, loss=lambda o, b: o.sum()))


ONE = Net()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Lookalike, r"embed.weight .* same memory.* make them one \(\S+ = \S+\), or take a copy"),
        (Shadow, "embed.weight and shadow lie in the same memory.*: take a copy"),
        (lambda: ONE, "returned the same Net a second time; it must build a new one"),
    ],
)
def test_memory_that_only_one_process_shares_is_named(
    model: Callable[[], nn.Module], says: str
) -> None:
    with pytest.raises(SpecError) as refused:
        for _ in range(2):
            traced(model)
    assert re.search(says, str(refused.value))


@pytest.mark.parametrize("model", [Net, Tied, Pieces])
def test_what_is_tied_or_lies_apart_is_taken(model: Callable[[], nn.Module]) -> None:
    traced(model)
    traced(model)


@pytest.mark.parametrize(
    ("gain", "says"),
    [
        (torch.ones(()), "gain is a scalar, which FSDP cannot shard; make it a tensor of one"),
        (torch.ones(2, dtype=torch.float64), "weight is float32 and gain float64"),
        (torch.ones(2, dtype=torch.complex64), "weight is float32 and gain complex64"),
    ],
)
def test_what_fsdp_does_not_take_is_named(gain: torch.Tensor, says: str) -> None:
    model = nn.Linear(2, 2)
    _check_shardable(model)
    model.register_parameter("gain", nn.Parameter(gain))
    with pytest.raises(ProgramError, match=re.sub(r"weight", r"\\w+", says)):
        _check_shardable(model)


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_weights_of_a_memory_format_lie_in_rows_when_they_are_cut() -> None:
    assert not ChannelsLast().conv.weight.is_contiguous()
    built = build_meta(Program(model=ChannelsLast, loss=lambda output, batch: output.sum()))
    assert built.conv.weight.is_contiguous()  # type: ignore[union-attr,operator]


class Compiled(Net):
    def more(self) -> None:
        self.part = torch.jit.script(nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_module_of_torch_jit_is_named() -> None:
    with pytest.raises(ProgramError, match="part is compiled by torch.jit, whose forward pass"):
        build_meta(Program(model=Compiled, loss=lambda output, batch: output.sum()))
