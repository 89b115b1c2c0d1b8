"""What an optimizer keeps for whole tensors of a model, and how much its step computes: steps on
tensors of the real shapes without memory.

On the meta device a number that is read of a tensor (`item()`) is 1: which way an optimizer goes
may hang on values, what it keeps should not. Where its step does not work without memory, it is
done on real tensors, if they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import OptimizerSpec, OwnedEntry, TensorSpec
from elastic.worker.program.optimizers import Optimizers, line_of, shown, step_of
from elastic.worker.program.owned.state_form import StateForm, form_of

STEPS = 3
REAL_MOST = 1 << 22  # elements of a tensor that is stepped for the trial
# FLOPs of a decomposition of an n x n matrix over n**3 (Golub and Van Loan 2013, chapters 4, 5, 8)
PER_CUBE = {
    "linalg_cholesky_ex": 1 / 3, "linalg_inv_ex": 2.0, "linalg_solve_ex": 2.0, "linalg_qr": 4.0,
    "_linalg_eigh": 9.0, "_linalg_svd": 21.0, "linalg_eig": 25.0,
}  # fmt: skip


def owned_specs(
    program: Program, every: Sequence[TensorSpec], of: Mapping[str, str], *, names: Sequence[str]
) -> dict[str, OptimizerSpec]:
    """Parameter -> what its owner keeps, of the optimizers `names`. `of`: parameter -> optimizer.
    Raises ProgramError that names the one whose state cannot be known."""
    mine = [spec for spec in every if of[spec.fqn] in names]
    settings = _settings(program, every)
    known: dict[Any, OptimizerSpec] = {}
    found = {}
    for spec in mine:
        key = (of[spec.fqn], spec.shape, spec.dtype, settings[spec.fqn], spec.attributes)
        if key not in known:
            known[key] = _tried(program, every, spec)
        found[spec.fqn] = known[key]
    return found


def _settings(program: Program, every: Sequence[TensorSpec]) -> dict[str, int]:
    """Parameter -> the group of settings that it is in."""
    tensors = {spec.fqn: _parameter(spec, "meta") for spec in every}
    names = {id(tensor): fqn for fqn, tensor in tensors.items()}
    groups = Optimizers(program, every, tensors).groups
    return {names[id(p)]: i for i, group in enumerate(groups) for p in group["params"]}


def _parameter(spec: TensorSpec, device: str) -> nn.Parameter:
    dtype = getattr(torch, spec.dtype)
    if device == "meta":
        return nn.Parameter(torch.empty(spec.shape, dtype=dtype, device="meta"))
    return nn.Parameter(torch.rand(spec.shape, dtype=torch.float32).to(dtype))


def _tried(program: Program, every: Sequence[TensorSpec], spec: TensorSpec) -> OptimizerSpec:
    made = Optimizers(program, every, {})
    name = made.of[spec.fqn]
    who = f"optimizer {shown(name, made.each[name])}"
    try:
        try:
            counted, (form, owned) = _noted(program, every, spec, device="meta")
        except ProgramError:
            raise
        except Exception as error:  # a boundary: any optimizer may raise anything
            if prod(spec.shape) > REAL_MOST:
                raise ProgramError(
                    f"what it keeps for {spec.fqn} {list(spec.shape)} cannot be known before its "
                    "first step, which fails on tensors without values "
                    f"({type(error).__name__}: {line_of(error)})"
                ) from error
            with torch.random.fork_rng(devices=[]):
                counted, (form, owned) = _noted(program, every, spec, device="cpu")
    except ProgramError as error:
        raise ProgramError(f"{who}: {error}") from error
    flop = float(round(counted.flop / STEPS))
    return OptimizerSpec(name=name, owned=owned, form=form.text(), flop=flop)


def _noted(
    program: Program, every: Sequence[TensorSpec], spec: TensorSpec, *, device: str
) -> tuple[WithoutValues, tuple[StateForm, tuple[OwnedEntry, ...]]]:
    with WithoutValues() as counted:
        return counted, form_of(_states(program, every, spec, device=device))


def _states(
    program: Program, every: Sequence[TensorSpec], spec: TensorSpec, *, device: str
) -> Iterator[Mapping[Any, Any]]:
    """The parameter's state after each step."""
    parameter = _parameter(spec, device)
    optimizer = Optimizers(program, every, {spec.fqn: parameter}).owner(spec.fqn)
    for _ in range(STEPS):
        drawn = torch.rand(parameter.shape, device=device, dtype=torch.float32)
        parameter.grad = drawn.sub_(0.3).to(parameter.dtype)
        step_of(optimizer)
        yield optimizer.state.get(parameter, {})


class WithoutValues(TorchDispatchMode):
    """Numbers read of tensors without values are 1; FLOPs of products are counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if name == "_local_scalar_dense":
                return torch.ones((), dtype=first.dtype, device="cpu").item()
            if name == "equal":
                return True
        out = func(*args, **(kwargs or {}))
        counted: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if counted is not None:
            self.flop += counted(*args, **(kwargs or {}), out_val=out)
        elif name in PER_CUBE and isinstance(first, torch.Tensor) and first.ndim > 1:
            self.flop += PER_CUBE[name] * first.numel() * min(first.shape[-2:])
        return out


def indexed(
    found: Mapping[str, OptimizerSpec], first: int
) -> tuple[tuple[OptimizerSpec, ...], dict[str, int]]:
    """The distinct ones, and the index of each parameter's, counted from `first`."""
    distinct = list(dict.fromkeys(found.values()))
    return tuple(distinct), {fqn: first + distinct.index(kept) for fqn, kept in found.items()}
