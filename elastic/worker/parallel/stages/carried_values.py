"""A pipeline stage of a program with several groups of blocks: it hands on all that a later stage
needs.

Each stage runs the model's whole forward pass. What stages before it have computed is received and
returned where the model calls the modules that it comes from; modules of other stages give zeros
where nobody needs what they would give. So what the model does between its modules is done on each
stage that needs it, from values that were carried there: gradients of a value that several stages
use are summed on their way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import ModelProfile, UnitFlow
from elastic.types.grid import stage_blocks
from elastic.worker.parallel.keyed_draws import draws_of
from elastic.worker.program.calls import tensors_in
from elastic.worker.program.model_profile import block_names

MODEL_INPUT = "_elastic_model_input"  # by keyword on every stage: later ones are called with values


def carries(program: Program) -> bool:
    """Do its stages hand on whatever later ones need?"""
    return not isinstance(program.blocks, str) and program.stage is None


def with_plain_gradient(received: Any) -> Any:
    """What is sent must lie in one piece, also the gradient of what was received, which goes back:
    it may come out transposed."""
    if not isinstance(received, torch.Tensor) or not received.requires_grad:
        return received
    given = received.view_as(received)
    given.register_hook(torch.Tensor.contiguous)
    return given


class AbsentModule(nn.Module):
    """Stands where a module of another stage was."""

    def __init__(self, unit: UnitFlow, stage: CarriedValues) -> None:
        super().__init__()
        self.unit, self.stage = unit, stage

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.stage.absent(self.unit, args)


class CarriedValues:
    """Of one stage. `takes`: units whose values it is called with; `gives`: those whose values it
    returns, None = it is the last one and returns the model's output."""

    def __init__(
        self,
        model: nn.Module,
        own: list[str],
        *,
        takes: tuple[str, ...],
        gives: tuple[str, ...] | None,
    ) -> None:
        self.takes, self.gives, self.own = takes, gives, own
        self.values: dict[str, torch.Tensor] = {}
        self.like = torch.zeros(())
        self.n_rows = 1
        self._watched = False
        model.register_forward_pre_hook(self._begins, with_kwargs=True)
        model.register_forward_hook(self._ends)

    def _begins(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._watched:  # behind the hooks of tp and FSDP, which may give another tensor
            self._watched = True
            for name in {*self.own} & {*(self.gives or ())}:
                model.get_submodule(name).register_forward_hook(self._keep(name))
        given = kwargs.get(MODEL_INPUT, args[0] if args else None)
        first = next(tensors_in(given), self.like)
        self.like, self.n_rows = first, len(first) if first.ndim else 1
        received = map(with_plain_gradient, args if self.takes else ())
        self.values = dict(zip(self.takes, received, strict=True))
        return (given,), {key: value for key, value in kwargs.items() if key != MODEL_INPUT}

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.values[name] = output

        return hook

    def _ends(self, model: nn.Module, args: Any, output: Any) -> Any:
        values, self.values = self.values, {}
        if self.gives is None:
            return output
        # what is only handed on is sent from memory of its own: the next microbatch is received
        # into that which it came in
        return tuple(
            values[name] if name in self.own else values[name].clone() for name in self.gives
        )

    def absent(self, unit: UnitFlow, args: tuple[Any, ...]) -> torch.Tensor:
        """What a module of another stage gave, or something of its shape where nobody needs it."""
        if unit.name in self.values:
            return self.values[unit.name]
        shape = unit.shape_of(self.n_rows)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.shape == shape:
            return first
        return torch.zeros(shape, dtype=getattr(torch, unit.dtype), device=self.like.device)


def cut_carrying(
    model: nn.Module,
    program: Program,
    profile: ModelProfile,
    *,
    layers: tuple[int, ...],
    stage: int,
) -> nn.Module:
    """Puts absent modules in the place of every unit that another stage holds; names stay as they
    were. Such a stage is called with the values of `profile.carried` (the first one with the
    model's input), and MODEL_INPUT."""
    if not profile.flow:
        raise ProgramError(
            "what pipeline stages of this program hand on is not known: its forward pass could not "
            "be followed; take pp=1"
        )
    mine, last = stage_blocks(layers, stage), stage == len(layers) - 1
    here = {*mine, *((-1,) if stage == 0 else ()), *((profile.n_blocks,) if last else ())}
    units = [unit for unit in profile.flow if unit.name]
    values = CarriedValues(
        model,
        [unit.name for unit in units if unit.place in here],
        takes=profile.carried(mine.start) if stage else (),
        gives=None if last else profile.carried(mine.stop),
    )
    draws, blocks = draws_of(program), set(block_names(model, program.blocks))
    for unit in units:
        if unit.place not in here:
            absent = AbsentModule(unit, values)
            if draws is not None and unit.name in blocks:
                draws.follow(unit.name, absent)
            model.set_submodule(unit.name, absent)
    return model
