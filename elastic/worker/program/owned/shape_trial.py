"""What an optimizer keeps for whole tensors of a model, and how much its step computes: steps on
tensors of the real shapes without memory.

On the meta device a number that is read of a tensor (`item()`) is 1: which way an optimizer goes
may hang on values, what it keeps should not. Where its step does not work without memory, it is
done on real tensors, if they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import OptimizerSpec, TensorSpec
from elastic.worker.program.optimizers import Optimizers, line_of, shown, step_of
from elastic.worker.program.owned.state_form import form_of

T = TypeVar("T")
STEPS = 3
NO_SETTINGS = {"params", "param_names", "lr", "initial_lr"}  # what is kept is the same at each rate
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
    known: dict[str, OptimizerSpec] = {}
    for alike in _alike(program, every, of, names=names):
        known |= dict.fromkeys((spec.fqn for spec in alike), _tried(program, every, alike[0]))
    return {spec.fqn: known[spec.fqn] for spec in every if spec.fqn in known}


def other_than_tiny(
    program: Program,
    every: Sequence[TensorSpec],
    of: Mapping[str, str],
    *,
    kept: Mapping[str, OptimizerSpec],
) -> set[str]:
    """Those of the optimizers in `kept` that keep other things of tensors of the model's shapes and
    types than these, which they keep of tiny ones: factors of large ones, more bits than the
    parameter has."""
    return {
        name
        for name, wanted in kept.items()
        if not all(
            _keeps(program, every, alike[0], wanted=wanted)
            for alike in _alike(program, every, of, names=[name])
        )
    }


def _keeps(
    program: Program, every: Sequence[TensorSpec], spec: TensorSpec, *, wanted: OptimizerSpec
) -> bool:
    """Entries of its shape and type, scalars, and nothing else; also where nobody can know."""

    def same(state: Mapping[Any, Any]) -> bool:
        there = {key: value for key, value in state.items() if value is not None}
        return there.keys() == {*wanted.entries, *wanted.scalars} and all(
            isinstance(value, torch.Tensor)
            and (
                (tuple(value.shape), str(value.dtype)) == (spec.shape, f"torch.{spec.dtype}")
                if key in wanted.entries
                else not value.ndim
            )
            for key, value in there.items()
        )

    try:
        _, found = _stepped(program, every, spec, read=lambda states: all(map(same, states)))
    except Exception:  # noqa: BLE001 - a boundary: any optimizer may raise anything
        return True
    return found


def _alike(
    program: Program, every: Sequence[TensorSpec], of: Mapping[str, str], *, names: Sequence[str]
) -> list[list[TensorSpec]]:
    """Parameters of these optimizers, of which all of a list have one shape, type, settings
    and attributes."""
    settings = _settings(program, every)
    found: dict[Any, list[TensorSpec]] = {}
    for spec in (spec for spec in every if of[spec.fqn] in names):
        key = (of[spec.fqn], spec.shape, spec.dtype, settings[spec.fqn], spec.attributes)
        found.setdefault(key, []).append(spec)
    return [*found.values()]


def _settings(program: Program, every: Sequence[TensorSpec]) -> dict[str, int]:
    """Parameter -> the settings of its group, of which groups with another rate alone have the
    same."""
    tensors = {spec.fqn: _parameter(spec, "meta") for spec in every}
    names = {id(tensor): fqn for fqn, tensor in tensors.items()}
    known: dict[str, int] = {}
    found: dict[str, int] = {}
    for group in Optimizers(program, every, tensors).groups:
        said = repr(sorted((key, repr(x)) for key, x in group.items() if key not in NO_SETTINGS))
        number = known.setdefault(said, len(known))
        found |= dict.fromkeys((names[id(p)] for p in group["params"]), number)
    return found


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
        flop, (form, owned) = _stepped(program, every, spec, read=form_of)
    except ProgramError as error:
        raise ProgramError(f"{who}: {error}") from error
    return OptimizerSpec(name=name, owned=owned, form=form.text(), flop=float(round(flop / STEPS)))


def _stepped(
    program: Program,
    every: Sequence[TensorSpec],
    spec: TensorSpec,
    *,
    read: Callable[[Iterator[Mapping[Any, Any]]], T],
) -> tuple[float, T]:
    """FLOPs of the steps, and what `read` makes of the states after each. Raises ProgramError where
    they cannot be made without values, and the tensor is large."""

    def on(device: str) -> tuple[float, T]:
        with WithoutValues() as counted:
            found = read(_states(program, every, spec, device=device))
        return counted.flop, found

    try:
        return on("meta")
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
            return on("cpu")


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
