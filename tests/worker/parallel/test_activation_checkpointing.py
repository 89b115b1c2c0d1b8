"""What is computed twice: the numbers stay, what the forward pass leaves in memory does not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.chain import check, job_of, pass_through
from support.worker.worker_pool import Pool
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.types import Layout
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.parallel.compiled import compile_blocks


class Block(nn.Module):
    """A matrix product, dropout and two element-wise functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x + scale * self.second(
            torch.nn.functional.dropout(self.first(x).sigmoid().exp(), 0.5)
        )


def kept_bytes(block: Block, mode: str) -> tuple[int, list[torch.Tensor], int]:
    """Bytes that the forward pass leaves for the backward pass, the gradients, and how often
    forward ran."""
    checkpoint_blocks([block], mode)
    kept: dict[int, int] = {}
    torch.manual_seed(3)
    x = torch.randn(64, 8, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, scale=0.5)
    y.square().sum().backward()
    return sum(kept.values()), [x.grad, *(p.grad for p in block.parameters())], block.calls


def test_the_modes_agree_and_keep_less_and_less() -> None:
    torch.manual_seed(1)
    first = Block()
    found = {}
    for mode in ("none", "selective", "full"):
        block = Block()
        block.load_state_dict(first.state_dict())
        found[mode] = kept_bytes(block, mode)
    for mode in ("selective", "full"):
        for a, b in zip(found["none"][1], found[mode][1], strict=True):
            assert torch.equal(a, b), mode
    assert [found[mode][2] for mode in found] == [1, 2, 2]
    assert found["none"][0] > found["selective"][0] >= found["full"][0]


class _Count(TorchDispatchMode):
    """Matrix products with a bias: forward passes only, backward passes have none."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


# full: the last is not needed
@pytest.mark.parametrize(("mode", "n"), [("none", 2), ("selective", 2), ("full", 3)])
def test_selective_does_no_matrix_product_twice(mode: str, n: int) -> None:
    block = Block()
    checkpoint_blocks([block], mode)
    with _Count() as count:
        block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert count.n == n


def test_names_stay() -> None:
    block = Block()
    names = list(block.state_dict())
    checkpoint_blocks([block], "full")
    assert list(block.state_dict()) == names


# full: test_axes.py; both: test_keyed_draws.py; what each computes: above
@pytest.mark.whole
def test_each_mode_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    """The mode is a matter of the layout: it changes on the way, with gradient accumulation."""
    layouts = [
        Layout(dp_shard=2, tp=2, activation_checkpointing="full"),
        Layout(pp=2, dp_shard=2, activation_checkpointing="selective"),
        Layout(tp=2, activation_checkpointing="selective"),
        replace(Layout(dp_shard=3), activation_checkpointing="full"),
        Layout(pp=2, activation_checkpointing="full"),
    ]
    job = job_of("tiny.py", steps=12)
    check(job, tmp_path, pass_through(pool, job, tmp_path, layouts, every=2), 1e-4)


class Counted(nn.Module):
    """Warms up by the number of its calls, and subtracts a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean.lerp(x.detach().mean(0), 0.5)
        return (self.calls / 4) * (self.linear(x - self.mean).sigmoid() * self.mean).exp()


class Reading(nn.Module):
    """Has a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid() * self.scale


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_a_pass_writes_is_written_once(mode: str) -> None:
    """Also of two microbatches whose forward passes are both done before the first backward
    pass."""
    found = []
    for one in ("none", mode):
        torch.manual_seed(1)
        block = Counted()
        checkpoint_blocks([block], one)
        outputs = [block(torch.linspace(-1, i, 16).view(2, 8)) for i in (1, 2)]
        for output in outputs:
            output.square().sum().backward()
        assert block.calls == 2
        found.append([block.mean.clone(), *(p.grad for p in block.parameters())])
    for mine, plain in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.e2e  # torch's compiler takes seconds to load
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_checkpointed_block_is_compiled_unless_it_writes_buffers(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as inductor gets it; two steps give what they give uncompiled."""
    traced = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced)
    for kind, compiled in ((partial(nn.Linear, 8, 8), True), (Reading, True), (Counted, False)):
        found = []
        for compiles in (False, True):
            torch.manual_seed(2)
            block = kind()
            checkpoint_blocks([block], mode)
            plain = block.forward
            if compiles:
                compile_blocks([block])
            for i in (1, 2):
                block(torch.linspace(-1, i, 16).view(2, 8)).square().sum().backward()
            found.append(block.state_dict() | {n: p.grad for n, p in block.named_parameters()})
        torch.testing.assert_close(found[1], found[0])
        chosen = getattr(block.forward, "chosen", block.forward)
        assert (chosen is not plain) == compiled
    torch.compiler.reset()
