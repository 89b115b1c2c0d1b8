"""Hooks on an optimizer's step are part of its step: they see what it sees, are cut only where they
act on each element, and what they took from Program.optimizer itself is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import FOREIGN, PROGRAMS
from support.worker.layout_case import follow
from support.worker.worker_pool import Pool
from torch import nn
from torch.nn.functional import normalize

from elastic.errors import ProgramError
from elastic.program import load_program
from elastic.types import Layout, OptimizerSpec
from elastic.worker.program.element_wise import what_they_keep
from elastic.worker.program.model_profile import trace

BARE = load_program(PROGRAMS / "tiny_bare.py")
SPECS = trace(BARE).specs
KEEPS = OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",))
Named = list[tuple[str, nn.Parameter]]


def adamw(named: Named) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.01)


def clamped(named: Named) -> torch.optim.Optimizer:
    optimizer = adamw(named)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(hook)
    return optimizer


def rows_of_one(named: Named) -> torch.optim.Optimizer:
    optimizer = adamw(named)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    parameter.data.copy_(normalize(parameter.data, dim=-1))

    optimizer.register_step_post_hook(hook)
    return optimizer


def pulled_to_an_average(named: Named) -> torch.optim.Optimizer:
    optimizer = adamw(named)
    average = {name: parameter.detach().clone() for name, parameter in named}

    def hook(*_: Any) -> None:
        for name, parameter in named:
            average[name].lerp_(parameter.detach(), 0.1)
            parameter.data.lerp_(average[name], 0.3)

    optimizer.register_step_post_hook(hook)
    return optimizer


def averaged_in_the_state(named: Named) -> torch.optim.Optimizer:
    optimizer = adamw(named)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                state.setdefault("average", parameter.detach().clone())
                state["average"].lerp_(parameter.detach(), 0.1)

    optimizer.register_step_post_hook(hook)
    return optimizer


def clipped_by_hand(named: Named) -> torch.optim.Optimizer:
    optimizer = adamw(named)

    def hook(*_: Any) -> None:
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(hook)
    return optimizer


def of(optimizer: Callable[[Named], torch.optim.Optimizer]) -> Any:
    return what_they_keep(replace(BARE, optimizer=lambda named: optimizer(list(named))), SPECS)


def test_a_hook_that_acts_on_each_element_is_cut_with_the_step() -> None:
    assert of(clamped).optimizers == (KEEPS,)


def test_a_hook_that_looks_at_rows_steps_whole_tensors() -> None:
    """A shard has whole rows, a part of a row where tp cuts columns."""
    found = of(rows_of_one)
    assert not any(spec.entries for spec in found.optimizers)
    assert {entry.name for spec in found.optimizers for entry in spec.owned} >= set(KEEPS.entries)


def test_an_average_in_the_state_goes_where_the_state_goes() -> None:
    found = of(averaged_in_the_state)
    kept = {entry.name for spec in found.optimizers for entry in spec.owned}
    assert {"average", *KEEPS.entries} <= kept | {e for s in found.optimizers for e in s.entries}


@pytest.mark.parametrize("optimizer", [pulled_to_an_average, clipped_by_hand])
def test_a_hook_over_what_the_optimizer_was_made_with_is_refused(
    optimizer: Callable[[Named], torch.optim.Optimizer],
) -> None:
    said = (
        r"^optimizer AdamW: its step uses a tensor that it was made with \(test_step_hooks.py:\d+\)"
        r".* take them from optimizer.param_groups in each step, .*optimizer.state\[parameter\]$"
    )
    with pytest.raises(ProgramError, match=said) as error:
        of(optimizer)
    assert "\n" not in str(error.value)


@pytest.mark.e2e
def test_rows_of_unit_length_through_live_changes(pool: Pool, tmp_path: Path) -> None:
    layouts = [Layout(tp=2), Layout(dp_shard=2), Layout(pp=2)]
    follow(pool, tmp_path, str(FOREIGN / "rows_of_unit_length.py"), layouts)
