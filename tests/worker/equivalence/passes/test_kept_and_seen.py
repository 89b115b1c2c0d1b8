"""What passes of one process keep for later ones, and what samples of a batch have to do with each
other, in programs of a few lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.program import Program
from elastic.types import Layout, ModelProfile
from elastic.worker.equivalence.layout_check import OF_A_PROGRAM, _in_one_process
from elastic.worker.equivalence.small_copy import ROWS, SmallCopy
from elastic.worker.equivalence.structure import Structure
from elastic.worker.program.model_profile import trace

WIDTH = 6
CALLS = 0
BATCH = {
    "input": torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(0)),
    "target": torch.arange(ROWS * 3).view(ROWS, 3) % WIDTH,
}


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more()

    def more(self) -> None: ...

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.between(F.gelu(self.inner(x))))
        return found


class FollowsGradient(Net):
    """The size of a gradient is followed in a buffer, which no forward pass writes."""

    def more(self) -> None:
        self.register_buffer("size", torch.ones(()))
        self.head.register_full_backward_hook(lambda module, given, grad: self.follow(grad[0]))

    def follow(self, gradient: Tensor) -> None:
        self.size.lerp_(gradient.norm(), 0.1)

    def between(self, x: Tensor) -> Tensor:
        return x / self.size.clone()


class CountsBackward(Net):
    """A buffer that a backward pass writes, and that is the same on all ranks."""

    def more(self) -> None:
        self.register_buffer("passes", torch.zeros(()))
        self.head.register_full_backward_hook(lambda *_: self.count())

    def count(self) -> None:
        self.passes += 1


class CountsInPython(Net):
    def more(self) -> None:
        self.passes = 0
        self.head.register_full_backward_hook(lambda *_: self.count())

    def count(self) -> None:
        self.passes += 1


class ClippedTogether(Net):
    """The gradient of a batch is clipped, far above what that of a few samples has."""

    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * (500.0 / g.norm().clamp(min=500.0)))
        return x


class ClippedEach(Net):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g * (0.1 / g.norm(dim=-1, keepdim=True).clamp(min=0.1)))
        return x


class Forgotten(Net):
    """A count that no state_dict has."""

    def more(self) -> None:
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def between(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * torch.where(self.passes > 50, 0.5, 1.0)


class Scratch(Net):
    """Room to work in, and a table that the first pass fills: neither is kept for a later pass."""

    def more(self) -> None:
        self.register_buffer("room", torch.zeros(2, 3, WIDTH), persistent=False)
        self.table: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(WIDTH, dtype=x.dtype)
        self.room[: len(x)].copy_(x.detach()[:2])
        return x * self.table


class CountsInAGlobal(Net):
    def between(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x


class Mixed(Net):
    def between(self, x: Tensor) -> Tensor:
        return 0.8 * x + 0.2 * x[torch.rand(len(x)).argsort()]


class MaskedByMean(Net):
    def between(self, x: Tensor) -> Tensor:
        kept = (torch.rand(len(x), 1, 1) < 0.7).to(x.dtype)
        return x * kept / kept.mean().clamp(min=0.1)


class Noisy(Net):
    """Each sample has its own noise, and all have three numbers that are drawn once."""

    def between(self, x: Tensor) -> Tensor:
        kept = (torch.rand(len(x), 1, 1) < 0.7).to(x.dtype) / 0.7
        return (x + 0.1 * torch.randn_like(x)) * kept + torch.rand(3).sum()


class CountsByLength(Net):
    """What it keeps says how many passes there were."""

    def more(self) -> None:
        self.seen: list[Tensor] = []

    def between(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().mean())
        return x if len(self.seen) < 500 else 0.5 * x


class CountsUnseen(Net):
    """By something that has no numbers to look at."""

    def more(self) -> None:
        self.count = itertools.count()

    def between(self, x: Tensor) -> Tensor:
        return x if next(self.count) < 20 else 0.5 * x


class Observed(Net):
    """Quantized by the smallest and the largest value so far, as plain attributes."""

    def more(self) -> None:
        self.low: Tensor | None = None
        self.high: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        low, high = x.detach().min(), x.detach().max()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        step = (self.high - self.low) / 15
        return x + (((x - self.low) / step).round() * step + self.low - x).detach()


class ScaledByTheFirst(Net):
    """As ActNorm: by what the first batch of all looked like."""

    def more(self) -> None:
        self.size: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.size is None:
            self.size = x.detach().std()
        return x / self.size


class LargestSoFar(Net):
    def more(self) -> None:
        self.top = 0.0

    def between(self, x: Tensor) -> Tensor:
        self.top = max(self.top, float(x.detach().abs().max()))
        return x / (1 + self.top)


class ReadsGradients(Net):
    def between(self, x: Tensor) -> Tensor:
        gradient = self.head.weight.grad
        return x if gradient is None else x / (1 + gradient.norm())


class ClearsGradients(Net):
    def between(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            p.grad = None
        return x


class Tempered(Net):
    """A learned temperature that is not yet at its limit."""

    def more(self) -> None:
        self.t = nn.Parameter(torch.ones(1))

    def between(self, x: Tensor) -> Tensor:
        if self.t.item() > 4:
            with torch.no_grad():
                self.t.clamp_(max=4)
        return x * self.t.exp()


class ClampedValue(Tempered):
    """The same without a word to the weight."""

    def between(self, x: Tensor) -> Tensor:
        return x * self.t.clamp(max=4).exp()


class ClampsBackward(Tempered):
    """A weight that the backward pass writes."""

    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self.cut())
        return x * self.t.exp()

    def cut(self) -> None:
        self.t.data = self.t.data.clamp(max=0.5)


def beside(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """It has the model from elsewhere."""
    return loss(logits, batch) + 0.01 * len(logits) * BUILT[-1].head.weight.square().sum()


BUILT: list[Net] = []


class Registered(Net):
    def more(self) -> None:
        BUILT.append(self)


TEMPERATURE = nn.Parameter(torch.ones(()))


def untrained(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return loss(logits * TEMPERATURE, batch)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return loss(logits, batch) * (0.5 if self.calls > 50 else 1.0)


def closed_over() -> Callable[..., Tensor]:
    calls = 0

    def counting(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(logits, batch)

    return counting


def said_of(kind: type[nn.Module] = Net, **more: Any) -> tuple[str, tuple[str, ...]]:
    program = Program(
        model=kind,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dataset=list,
        **{"loss": loss, **more},
    )
    return _in_one_process(SmallCopy(program, trace(program)), BATCH, words=OF_A_PROGRAM)


ALL, OTHERS = ("dp", "tp", "pp", "ep", "cp"), ("dp", "pp", "ep")


@pytest.mark.parametrize(
    ("kind", "axes", "says"),
    [
        (FollowsGradient, ("dp", "pp", "ep", "cp"), "the backward pass writes the buffer size"),
        (CountsInPython, ALL, "changes the number passes,"),
        (CountsInAGlobal, ALL, "changes the number CALLS,"),
        (Forgotten, ALL, r"changes the buffer passes, .* without persistent=False"),
        (ClippedTogether, OTHERS, r"that of \S+ differs by .* clip by clip_grad_norm in job.yaml"),
        (Mixed, OTHERS, "what is drawn for a sample acts on others beside it"),
        (MaskedByMean, OTHERS, "what is drawn for a sample acts on others beside it"),
        (CountsByLength, ALL, r"changes the number len\(seen\),"),
        (CountsUnseen, ALL, "in pass 21 over them, .* it counts passes outside of its buffers"),
        (Observed, ALL, "in the first pass of a model and .* after a pass of others"),
        (ScaledByTheFirst, ALL, "in the first pass of a model and .* after a pass of others"),
        (LargestSoFar, ALL, "in the first pass of a model and .* after a pass of others"),
        (ReadsGradients, OTHERS, "something reads or clears `.grad`"),
        (ClearsGradients, OTHERS, "something reads or clears `.grad`"),
        (Tempered, ALL, "where its values are large, forward writes the weight t:"),
        (ClampsBackward, ALL, "a pass writes the weight t:"),
    ],
)
def test_what_layouts_would_change_is_named(
    kind: type[nn.Module], axes: tuple[str, ...], says: str
) -> None:
    why, closed = said_of(kind)
    assert re.search(says, why) and set(closed) == set(axes), why


@pytest.mark.parametrize("kind", [Net, CountsBackward, ClippedEach, Scratch, Noisy, ClampedValue])
def test_what_each_sample_has_alone_stays_open(kind: type[nn.Module]) -> None:
    assert said_of(kind)[0] == ""


@pytest.mark.parametrize("counting", [Counting(), closed_over()])
def test_a_loss_that_counts_is_named(counting: Callable[..., Tensor]) -> None:
    why, closed = said_of(loss=counting)
    assert re.search(r"changes the number \w*\.?calls", why) and set(closed) == set(ALL), why


@pytest.mark.parametrize(
    ("kind", "takes", "reached"),
    [(Registered, beside, "head.weight"), (Net, untrained, "a tensor that is no parameter")],
)
def test_a_loss_that_takes_weights_beside_the_output_is_named(
    kind: type[nn.Module], takes: Callable[..., Tensor], reached: str
) -> None:
    why, closed = said_of(kind, loss=takes)
    assert f"Program.loss reaches {reached}" in why and set(closed) == set(ALL), why


@pytest.mark.parametrize("kind", [ClippedTogether, Mixed])
def test_what_is_wanted_is_taken(kind: type[nn.Module]) -> None:
    assert said_of(kind, batch_dependent=True)[0] == ""


def test_what_sees_the_batch_has_no_microbatches() -> None:
    profile = ModelProfile(4, 100, ())
    assert Structure(no_dp="x", at_once=True).close(profile).together == 0
    assert Structure(no_dp="x").close(replace(profile, together=8)).together == 8
    assert Layout().microbatch_size == 0
