"""Traces a Program on the meta device: which tensors there are and how they may be cut. Allocates no weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import nn

from elastic.errors import ProgramError
from elastic.program import Program
from elastic.types import ModelProfile, TensorSpec

# tensor-parallel style -> dimension that is cut, per parameter name
CUT = {
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "vocab": {"weight": 0},
}


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """`layers.*.attn.w[qkv]`: `*` stands for one part of a module name, brackets as in file names."""
    parts = [re.escape(p).replace(r"\*", "[^.]+").replace(r"\[", "[").replace(r"\]", "]") for p in pattern.split(".")]
    return re.compile(r"\.".join(parts) + r"\Z")


def block_names(model: nn.Module, pattern: str) -> list[str]:
    """Names of the repeated blocks, in order of registration."""
    regex = pattern_regex(pattern)
    return [name for name, _ in model.named_modules() if regex.match(name)]


def tp_styles(model: nn.Module, program: Program) -> dict[str, str]:
    """Module name -> style. Raises ProgramError for a pattern that matches nothing."""
    styles: dict[str, str] = {}
    for pattern, style in program.tp.items():
        regex = pattern_regex(pattern)
        found = [name for name, _ in model.named_modules() if regex.match(name)]
        if not found:
            raise ProgramError(f"Program.tp: no module is named like '{pattern}'; patterns take module names, not parameters")
        styles.update(dict.fromkeys(found, style))
    return styles


def build_meta(program: Program) -> nn.Module:
    """The program's module on the meta device."""
    with torch.device("meta"):
        model = program.model()
    if not isinstance(model, nn.Module):
        raise ProgramError(f"Program.model must return an nn.Module, not {type(model).__name__}")
    return model


def trace(program: Program) -> ModelProfile:
    """Parameters, buffers, blocks, tp cuts and optimizer entries of a Program.

    Raises ProgramError when the optimizer is not element-wise or a pattern matches nothing.
    """
    model = build_meta(program)
    blocks = block_names(model, program.blocks)
    styles = tp_styles(model, program)
    specs = _specs(model, blocks, styles)
    entries, scalars = optimizer_entries(program, specs)
    trainable = [s for s in specs if not s.buffer and s.tied_to is None]
    n_params = sum(math.prod(s.shape) for s in trainable)
    limit = program.tp_limit if styles else 1
    for spec in specs:
        if spec.tp_dim is not None:
            limit = math.gcd(limit, spec.shape[spec.tp_dim])
    return ModelProfile(len(blocks), n_params, specs, entries, scalars, 6.0 * n_params, max(1, limit))


def _specs(model: nn.Module, blocks: list[str], styles: dict[str, str]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    first_name: dict[int, str] = {}
    seen_block = False
    for fqn, tensor, buffer in _named_tensors(model):
        block = _block_of(fqn, blocks)
        seen_block = seen_block or block is not None
        if block is None:
            block = len(blocks) if seen_block else -1
        tied_to = first_name.get(id(tensor))
        first_name.setdefault(id(tensor), fqn)
        module, _, leaf = fqn.rpartition(".")
        tp_dim = CUT[styles[module]].get(leaf) if module in styles and not buffer else None
        trainable = not buffer and tensor.requires_grad
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(fqn, tuple(tensor.shape), dtype, tp_dim, block, tied_to, trainable, buffer))
    return tuple(specs)


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor, bool]]:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        yield fqn, parameter, False
    kept = set(model.state_dict(keep_vars=True))
    for fqn, buffer in model.named_buffers():
        if fqn in kept:
            yield fqn, buffer, True


def _block_of(fqn: str, blocks: list[str]) -> int | None:
    for i, name in enumerate(blocks):
        if fqn.startswith(name + "."):
            return i
    return None


def optimizer_entries(program: Program, specs: tuple[TensorSpec, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the optimizer's state entries: (of the parameter's shape, scalar), found by one step on a tiny replica."""
    named = [
        (s.fqn, nn.Parameter(torch.zeros([min(d, 2) + 1 for d in s.shape]))) for s in specs if s.trainable and s.tied_to is None
    ]
    optimizer = program.optimizer(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ProgramError(f"Program.optimizer must return one torch.optim.Optimizer, not {type(optimizer).__name__}")
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
    for fqn, parameter in named:
        state = optimizer.state.get(parameter, {})
        like = tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape)
        scalar = tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0)
        odd = [k for k, v in state.items() if k not in like and k not in scalar and v is not None]
        if odd:
            raise ProgramError(
                f"optimizer {type(optimizer).__name__}: state '{odd[0]}' of {fqn} is neither a scalar tensor nor of the "
                "parameter's shape; only element-wise optimizers can be moved between layouts"
            )
        found.add((like, scalar))
    if len(found) > 1:
        raise ProgramError(f"optimizer {type(optimizer).__name__} keeps different entries for different parameters: {found}")
    return found.pop() if found else ((), ())
