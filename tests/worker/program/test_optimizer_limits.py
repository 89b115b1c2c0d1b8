"""Optimizers that act otherwise beyond a limit: of the gradient, of the size of a tensor, of the
steps done."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.docs.pages import blocks
from support.places import PROGRAMS
from torch.distributed.tensor import DTensor

from elastic.errors import ProgramError
from elastic.ledger.journal import decode, encode
from elastic.program import Program, load_program
from elastic.types import Job, Layout, TensorSpec
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.loop_program import module_factory
from elastic.worker.program.model_profile import trace
from elastic.worker.program.optimizers import Optimizers
from elastic.worker.state.train_state import TrainState

BARE = load_program(PROGRAMS / "tiny_bare.py")
SPECS = trace(BARE).specs
MOST = 50.0


class Clipped(torch.optim.SGD):
    """By the norm of all gradients, far above that of small ones."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], MOST)
        return super().step(closure)


class ClippedEach(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(MOST / p.grad.norm().clamp(min=MOST))
        return super().step(closure)


class ClippedAtTimes(torch.optim.SGD):
    """Each tensor by its own norm, in each fifth step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"] if group["n"] % 5 == 0 else ():
                p.grad.mul_(MOST / p.grad.norm().clamp(min=MOST))
        return super().step(closure)


class ClippedLater(torch.optim.SGD):
    """By the norm of all gradients, from the tenth step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            if group["n"] >= 10:
                torch.nn.utils.clip_grad_norm_(group["params"], MOST)
        return super().step(closure)


class Projected(torch.optim.SGD):
    """As SGDP has it: where the gradient is nearly orthogonal to the weight, the part of the step
    along the weight is left out."""

    rows = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                views = (p.flatten(1), p.grad.flatten(1)) if p.ndim > 1 else (p[None], p.grad[None])
                w, g = views if self.rows else (one.reshape(1, -1) for one in views)
                cosine = torch.cosine_similarity(w, g).abs().max()
                if p.ndim > 1 and cosine < 0.1 / math.sqrt(w.shape[1]):
                    unit = w / w.norm(dim=1, keepdim=True)
                    p.grad = (g - unit * (unit * g).sum(1, keepdim=True)).view_as(p)
        return super().step(closure)


class ProjectedWhole(Projected):
    rows = False


class Doubled(torch.optim.SGD):
    """Element-wise, and not torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(2.0)
        return super().step(closure)


class ByPlace(torch.optim.SGD):
    """Those that come first in a group are stepped least."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.grad.mul_(0.9 ** (len(group["params"]) - i))
        return super().step(closure)


class ByRows(torch.optim.SGD):
    """Steps of large tensors are smaller, by their number of rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() > 100:
                    p.grad.div_(math.sqrt(p.shape[0]))
        return super().step(closure)


class Averaged(torch.optim.SGD):
    """Weights are averaged from the 20th step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"]:
                if group["n"] == 20:
                    self.state[p]["average"] = p.clone()
        return None


class Anchored(torch.optim.SGD):
    """Each fifth step goes back half the way to where the weights were, which begins as they do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("anchor", p.clone())
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"] if group["n"] % 5 == 0 else ():
                p.copy_(self.state[p]["anchor"].lerp_(p, 0.5))
        return None


class Lookahead(torch.optim.Optimizer):
    """The same around another optimizer, whose groups and state it has."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.n = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.n % 5 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return None


def around(parameters: list[Any], lr: float) -> Lookahead:
    return Lookahead(torch.optim.AdamW(parameters, lr=lr))


def with_norms(parameters: list[Any], lr: float) -> torch.optim.AdamW:
    """AdamW, whose matrices are divided by their norms after each tenth step."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in group["params"] if group["n"] % 10 == 0 else ():
                p.data.div_(p.data.norm() if p.ndim == 2 else 1.0)

    optimizer.register_step_post_hook(hook)
    return optimizer


def kept(kind: Callable[..., torch.optim.Optimizer], specs: Sequence[TensorSpec] = SPECS) -> Any:
    program: Program = replace(BARE, optimizer=lambda named: kind([p for _, p in named], lr=0.1))
    return what_they_keep(program, specs).optimizers


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Clipped, "Clipped: the step of .* depends on other parameters"),
        (ClippedLater, "ClippedLater: the step of .* depends on other parameters"),
        (ByPlace, "ByPlace: the step of .* depends on other parameters"),
        (Averaged, "Averaged: its state 'average' comes later than with its first 3 steps"),
    ],
)
def test_what_begins_beyond_a_limit_is_refused(kind: type[torch.optim.SGD], says: str) -> None:
    with pytest.raises(ProgramError) as refused:
        kept(kind)
    assert re.search(says, str(refused.value))


@pytest.mark.parametrize(
    "kind", [ClippedEach, ClippedAtTimes, with_norms, Projected, ProjectedWhole, ByRows]
)
def test_what_looks_at_a_whole_tensor_is_given_whole_ones(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    assert all(one.form for one in kept(kind))
    for plain in (torch.optim.SGD, torch.optim.AdamW, Doubled):
        assert not any(one.form for one in kept(plain))


def test_a_place_in_the_group_is_seen_where_all_parameters_are_alike() -> None:
    specs = [spec for spec in SPECS if len(spec.shape) == 2]
    alike = [replace(specs[0], fqn=f"layers.{i}.weight") for i in range(3)]
    program: Program = replace(BARE, optimizer=lambda named: ByPlace([p for _, p in named], lr=0.1))
    with pytest.raises(ProgramError, match="depends on other parameters"):
        what_they_keep(program, alike)


def of_the_page(parameters: Any, lr: float) -> torch.optim.Optimizer:
    there: dict[str, Any] = {"torch": torch}
    (text,) = (one.text for one in blocks("loop.md", "python") if "class Averaged" in one.text)
    exec(text, there)
    made: torch.optim.Optimizer = there["Averaged"](parameters, lr=lr)
    return made


class Typed(torch.optim.SGD):
    """Counts in whole numbers, and keeps its moment in 16 bits."""

    moment = torch.float32

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept["n"] = torch.tensor(0)
                    kept["mean"] = torch.zeros_like(p, dtype=self.moment)
                kept["n"] += 1
                kept["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(kept["mean"], alpha=group["lr"])
        return None


class Half(Typed):
    moment = torch.bfloat16


def test_state_of_another_type_keeps_it() -> None:
    """At its owner; a count is the same number in each."""
    assert all(one.entries == ("mean",) and not one.form for one in kept(Typed))
    assert all("bfloat16" in str(one.owned) for one in kept(Half))
    found = kept(Typed, [replace(spec, dtype="bfloat16") for spec in SPECS])
    assert all("float32" in str(one.owned) and not one.entries for one in found)


@pytest.mark.parametrize(
    ("kind", "copy"), [(Anchored, "anchor"), (around, "slow"), (of_the_page, "average")]
)
def test_state_that_begins_as_the_weights_do_is_made_by_its_owner(
    kind: Callable[..., torch.optim.Optimizer], copy: str
) -> None:
    found = kept(kind)
    assert all(one.form for one in found) and all(copy in one.form for one in found)


class Scaled(torch.optim.SGD):
    """As modded-nanogpt has it: each parameter says by how much its steps are longer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * p.lr_mul)
        return None


def marked() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for i, p in enumerate(model.parameters()):
        p.lr_mul = 1.0 + i  # type: ignore[attr-defined]
    model[0].bias._no_weight_decay = True
    return model


def by_mark(named: Any) -> torch.optim.Optimizer:
    """As Mamba has it."""
    decayed = [p for _, p in named if not getattr(p, "_no_weight_decay", False)]
    spared = [p for _, p in named if getattr(p, "_no_weight_decay", False)]
    return torch.optim.SGD([{"params": decayed}, {"params": spared, "weight_decay": 0.0}], lr=0.1)


def test_what_a_model_sets_on_its_parameters_is_there_for_groups_and_steps() -> None:
    program: Program = replace(BARE, model=marked, blocks="*", tp={}, init=None, weights=None)
    scaled = replace(program, optimizer=lambda named: Scaled([p for _, p in named], lr=0.1))
    specs = trace(scaled).specs
    assert not any(one.form for one in what_they_keep(scaled, specs).optimizers)
    tensors = {spec.fqn: torch.nn.Parameter(torch.ones(spec.shape)) for spec in specs}
    made = Optimizers(scaled, specs, tensors)
    for tensor in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    made.step()
    for i, tensor in enumerate(tensors.values()):
        torch.testing.assert_close(tensor.detach(), torch.full_like(tensor, 0.9 - 0.1 * i))

    groups = Optimizers(replace(program, optimizer=by_mark), specs, tensors).groups
    assert [p is tensors["0.bias"] for p in groups[1]["params"]] == [True]
    copied = module_factory(marked())()
    assert [p.lr_mul for p in copied.parameters()] == [1.0, 2.0, 3.0, 4.0]  # type: ignore[attr-defined]
    assert decode(encode(trace(scaled))).specs == specs, "the journal has them"


def test_so_it_is_on_the_parts_that_fsdp_makes() -> None:
    program: Program = replace(
        BARE, model=marked, blocks="*", tp={}, init=None, weights=None,
        optimizer=lambda named: Scaled([p for _, p in named], lr=0.1),
    )  # fmt: skip
    layout = Layout(dp_shard=2)
    groups = Groups(0, layout, torch.device("cpu"))
    try:
        groups.pretend(0)
        state = TrainState(
            program, trace(program), groups, layout=layout, layers=(2,), rank=0, job=Job()
        )
        for parts in (state.model.parameters(), state.local.values()):
            assert [part.lr_mul for part in parts] == [1.0, 2.0, 3.0, 4.0]  # type: ignore[attr-defined]
        assert all(isinstance(part, DTensor) for part in state.model.parameters())
    finally:
        groups.close()
