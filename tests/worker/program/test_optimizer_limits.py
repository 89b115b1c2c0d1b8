"""Optimizers that act otherwise beyond a limit: of the gradient, of the size of a tensor, of the
steps done."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS

from elastic.errors import ProgramError
from elastic.program import Program, load_program
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.model_profile import trace

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


def kept(kind: Callable[..., torch.optim.Optimizer]) -> Any:
    program: Program = replace(BARE, optimizer=lambda named: kind([p for _, p in named], lr=0.1))
    return what_they_keep(program, SPECS).optimizers


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Clipped, "Clipped: the step of .* depends on other parameters"),
        (Averaged, "Averaged: its state 'average' comes later than with its first 3 steps"),
    ],
)
def test_what_begins_beyond_a_limit_is_refused(kind: type[torch.optim.SGD], says: str) -> None:
    with pytest.raises(ProgramError) as refused:
        kept(kind)
    assert re.search(says, str(refused.value))


@pytest.mark.parametrize("kind", [ClippedEach, ByRows])
def test_what_looks_at_a_whole_tensor_is_given_whole_ones(kind: type[torch.optim.SGD]) -> None:
    assert all(one.form for one in kept(kind))
    assert not any(one.form for one in kept(torch.optim.SGD))


@pytest.mark.parametrize(("kind", "copy"), [(Anchored, "anchor"), (around, "slow")])
def test_state_that_begins_as_the_weights_do_is_made_by_its_owner(
    kind: Callable[..., torch.optim.Optimizer], copy: str
) -> None:
    found = kept(kind)
    assert all(one.form for one in found) and all(copy in one.form for one in found)
