"""Dry steps of a program's optimizers over tiny replicas of its parameters: what a step does to all
of a tensor, to a part of it, to some tensors alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import TensorSpec
from elastic.user_frames import raised_at
from elastic.worker.program.calls import tensors_in
from elastic.worker.program.optimizers import Optimizers, by_name, line_of, shown, step_of
from elastic.worker.program.owned.optimizer_counters import Values, values_of

DRY_STEPS = 3
# after which steps that are other ones now and then (every 5th, or from the 20th on) have come
MORE_STEPS = 30
STEEP = 1e4  # times the others: the last of the dry gradients, which is beyond whoever clips
PART, WHOLE = 2, 3  # rows of a tiny replica; a part has one less in every dimension
ONLY = (
    "an optimizer must step each tensor by itself, without a closure and without communication "
    "(AdamW, Muon, Adafactor ... do)"
)
# cosine of a gradient that is nearly orthogonal to its weight: less than what SGDP and AdamP take
# for orthogonal in a tensor of some hundred elements, and not nothing, which a projection leaves
ACROSS = 0.005
Tensors = dict[str, torch.Tensor]


def _across(weight: torch.Tensor, drawn: torch.Tensor, *, by_rows: bool) -> torch.Tensor:
    """Nearly orthogonal to the weight, and of its size."""
    flat = weight.flatten(1) if by_rows and weight.ndim > 1 else weight.reshape(1, -1)
    drawn = drawn.reshape(flat.shape)
    square = flat.square().sum(1, keepdim=True).clamp(min=1e-30)
    drawn = drawn - (drawn * flat).sum(1, keepdim=True) / square * flat
    size = drawn.norm(dim=1, keepdim=True).clamp(min=1e-30)
    across: torch.Tensor = drawn * (square.sqrt() / size) + ACROSS * flat
    return across.reshape(weight.shape)


# gradients that stand to their weights as drawn ones do not, of the weight and what was drawn; the
# last one makes NaN of what divides by its norm
RELATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    partial(_across, by_rows=True),
    partial(_across, by_rows=False),
    lambda weight, drawn: weight.clone(),
    lambda weight, drawn: -weight,
    lambda weight, drawn: 1e-6 * drawn,
    partial(_across, by_rows=True),
    partial(_across, by_rows=False),
    lambda weight, drawn: weight.clone(),
    lambda weight, drawn: -weight,
    lambda weight, drawn: torch.zeros_like(weight),
)


@dataclass(frozen=True)
class DoneStep:
    """Of a step over whole tensors: the gradients it was given, and the weights behind it."""

    gradients: Tensors
    weights: Tensors


@dataclass
class Dry:
    """The optimizers of `every` parameter over replicas of some of them, of `rows` rows per
    dimension 0, with the same gradients whatever the rows and whatever the others are.

    A part lacks the last index of every dimension: shards cut rows, and tp cuts columns as well.
    """

    program: Program
    every: list[TensorSpec]
    specs: list[TensorSpec]
    rows: int
    counting: Collection[str] = ()
    done: list[DoneStep] = field(default_factory=list)  # that `course` has made

    def __post_init__(self) -> None:
        draws = {
            s.fqn: torch.Generator().manual_seed(zlib.crc32(s.fqn.encode())) for s in self.specs
        }
        self.values = {
            s.fqn: torch.rand(tiny_shape(s), generator=draws[s.fqn]) + 0.5 for s in self.specs
        }
        self._drawn: list[Tensors] = [
            {s.fqn: torch.rand(tiny_shape(s), generator=draws[s.fqn]) - 0.3 for s in self.specs}
            for _ in range(DRY_STEPS)
        ]
        for steep in self._drawn[-1].values():
            steep.mul_(STEEP)
        self.named = {
            fqn: nn.Parameter(self._part(value).clone()) for fqn, value in self.values.items()
        }
        self.optimizers = Optimizers(self.program, self.every, self.named, counting=self.counting)
        for given in self.optimizers.given:
            given.grad = torch.empty_like(given)  # who looks for gradients there is to find some
        if self.optimizers.begun:
            self._begin()

    def _begin(self) -> None:
        """State that is there before the first step is made once more, of tensors that have
        values."""
        assert self.program.optimizer is not None
        fqns = {id(parameter): fqn for fqn, parameter in self.named.items()}
        for optimizer in by_name(self.program.optimizer(list(self.named.items()))).values():
            own = {p: state for p, state in optimizer.state.items() if not isinstance(p, str)}
            for parameter, state in own.items():
                self.optimizers.owner(fqns[id(parameter)]).state[parameter].update(state)

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        return corner(value) if self.rows == PART else value

    def name(self, fqn: str) -> str:
        """Of a parameter's optimizer, as errors have it."""
        return f"optimizer {shown(self.optimizers.of[fqn], self.optimizers.owner(fqn))}"

    def state(self, fqn: str) -> Any:
        return self.optimizers.owner(fqn).state[self.named[fqn]]

    def owned(self, name: str) -> list[str]:
        return [fqn for fqn in self.named if self.optimizers.of[fqn] == name]

    def gradients(self, number: int) -> Tensors:
        """Of whole tensors: drawn ones; of each third of the later steps some that stand in a
        relation to the weights as they are now."""
        drawn = self._drawn[number % DRY_STEPS]
        if number < DRY_STEPS or number % DRY_STEPS:
            return drawn
        relation = RELATIONS[(number // DRY_STEPS - 1) % len(RELATIONS)]
        return {fqn: relation(p.detach(), drawn[fqn]) for fqn, p in self.named.items()}

    def course(self) -> Iterator[DoneStep]:
        """All steps, one by one, of whole tensors."""
        for number in range(DRY_STEPS + self.more_steps):
            gradients = self.gradients(number)
            self.step(gradients)
            weights = {fqn: p.detach().clone() for fqn, p in self.named.items()}
            self.done.append(DoneStep(gradients, weights))
            yield self.done[-1]

    def step(self, gradients: Tensors) -> None:
        """With these, of whole tensors."""
        for fqn, parameter in self.named.items():
            parameter.grad = self._part(gradients[fqn]).clone()
        for name, optimizer in self.optimizers.each.items():
            try:
                with self.optimizers.made_for(name), _OwnTensors():  # type: ignore[no-untyped-call]
                    step_of(optimizer)
            except _ForeignTensor as error:
                raise ProgramError(
                    f"optimizer {shown(name, optimizer)}: its step uses a tensor that it was made "
                    f"with{_place(error)} and that is no longer in its param_groups; ranks have "
                    "parts of the parameters, in the place of these: take them from "
                    "optimizer.param_groups in each step, and keep what belongs to one (an average "
                    "of weights, say) in optimizer.state[parameter]"
                ) from error
            except Exception as error:  # a boundary: any optimizer may raise anything
                text = f"{type(error).__name__}: {line_of(error)}"
                why = (
                    "it communicates" if "process group" in text.lower() else "a plain step() fails"
                )
                raise ProgramError(
                    f"optimizer {shown(name, optimizer)}: {why} ({text}); {ONLY}"
                ) from error

    def beside(self) -> dict[str, Values]:
        return {name: values_of(optimizer) for name, optimizer in self.optimizers.each.items()}

    @property
    def more_steps(self) -> int:
        """How many tell what the first ones did not: none of what torch itself has."""
        return 0 if all(of_torch(one) for one in self.optimizers.each.values()) else MORE_STEPS


def of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """A class of torch.optim as it is: what such a one keeps stands in `state` from its first step
    on, and what a step does there follows from `state` and `param_groups`."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


class _ForeignTensor(Exception):
    """A step uses a tensor without values."""


class _OwnTensors(TorchDispatchMode):
    """What a dry step may use has values. What Program.optimizer is called with has none, and a
    hook or a list that kept it would train nothing, without a word."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            raise _ForeignTensor
        return func(*args, **(kwargs or {}))


def _place(error: Exception) -> str:
    place = raised_at(error)
    return f" ({Path(place.filename).name}:{place.lineno})" if place else ""


def corner(value: torch.Tensor) -> torch.Tensor:
    return value[tuple(slice(n - 1) for n in value.shape)]


def tiny_shape(spec: TensorSpec) -> list[int]:
    return [WHOLE, *(min(d, 2) + 1 for d in spec.shape[1:])] if spec.shape else []
