"""Weights of other types than they were trained in, for what reads an export: bfloat16, or the
blocks' matrices in int8 or float8 with a scale for each row, as transformers stores and loads what
torchao has quantised.

A matrix is quantised some rows at a time, by torchao itself: no export needs a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic.errors import SpecError
from elastic.models.lora import DOWN, UP, base_name
from elastic.models.nf4 import NO_TORCHAO
from elastic.program import WEIGHT_TYPES, Program, in_blocks

CONFIG = "config.json"
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
Parts = Callable[[str], Iterator[Tensor]]


@dataclass(frozen=True)
class TypedWeights:
    """What a safetensors file has of them: names, shapes and types, pieces of rows, its
    metadata."""

    shapes: Shapes
    parts: Parts
    metadata: Mapping[str, str] = field(default_factory=dict)


def in_type(kind: str, program: Program, shapes: Shapes, *, parts: Parts) -> TypedWeights:
    """Raises SpecError for another type than those of WEIGHT_TYPES, and without torchao."""
    if kind not in WEIGHT_TYPES:
        raise SpecError(f"weights: '{kind}' is none of {', '.join(WEIGHT_TYPES)}")
    with torch.device("meta"):
        model: nn.Module = program.model()
    if kind == "bfloat16":
        return in_bfloat16(_parameters(model, program), shapes, parts)
    return _quantised(kind, _matrices(model, program) & set(shapes), shapes, parts=parts)


def with_config(kind: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What stands beside such weights. Raises SpecError where no config.json is among it: nobody
    else would know how to read them."""
    if CONFIG not in files:
        raise SpecError(
            f"--weights {kind}: nothing puts a {CONFIG} beside these weights, by which "
            "transformers would read them; elastic.models.huggingface has causal_lm for a Program "
            "and files_of for a loop"
        )
    config = json.loads(files[CONFIG])
    if kind == "bfloat16":
        config["dtype"] = kind
    else:
        from transformers import TorchAoConfig

        config["quantization_config"] = TorchAoConfig(_settings(kind)).to_dict()
    return {**files, CONFIG: json.dumps(config, indent=2).encode()}


def _exported(name: str, program: Program) -> str:
    """A parameter's name in an export."""
    return base_name(name).removeprefix(f"{program.exports}." if program.exports else "")


def _parameters(model: nn.Module, program: Program) -> set[str]:
    return {_exported(n, program) for n, _ in model.named_parameters(remove_duplicate=False)}


def _matrices(model: nn.Module, program: Program) -> set[str]:
    """Weights of the linear layers in the blocks."""
    return {
        _exported(f"{name}.weight", program)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and in_blocks(name, program.blocks)
        and not {DOWN, UP} & set(name.split("."))
    }


def in_bfloat16(parameters: Container[str], shapes: Shapes, parts: Parts) -> TypedWeights:
    """`parameters`: the names of those; buffers stay as they are."""
    changed = {
        name for name, (_, dtype) in shapes.items() if name in parameters and "float" in dtype
    }

    def converted(name: str) -> Iterator[Tensor]:
        return (part.bfloat16() if name in changed else part for part in parts(name))

    said = {
        name: (shape, "bfloat16" if name in changed else dtype)
        for name, (shape, dtype) in shapes.items()
    }
    return TypedWeights(said, converted)


def _quantised(
    kind: str, matrices: Collection[str], shapes: Shapes, *, parts: Parts
) -> TypedWeights:
    said: dict[str, tuple[tuple[int, ...], str]] = {}
    metadata = {"tensor_names": json.dumps([*shapes])}
    of: dict[str, str] = {}
    for name, (shape, dtype) in shapes.items():
        if name not in matrices:
            said[name] = (shape, dtype)
            metadata[name] = json.dumps({"_type": "Tensor"})
            continue
        row, about = _rows(kind, name, torch.ones(1, shape[1], dtype=getattr(torch, dtype)))
        metadata[name] = about[name]
        for stored, tensor in row.items():
            kept = str(tensor.dtype).removeprefix("torch.")
            said[stored], of[stored] = ((shape[0], *tensor.shape[1:]), kept), name

    def pieces(stored: str) -> Iterator[Tensor]:
        if stored not in of:
            yield from parts(stored)
            return
        for part in parts(of[stored]):
            yield _rows(kind, of[stored], part)[0][stored]

    return TypedWeights(said, pieces, metadata)


def _rows(kind: str, name: str, part: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Some rows of a matrix as torchao stores them: tensors by name, and what it says of them."""
    settings = _settings(kind)
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    rows, columns = part.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(part.contiguous(), requires_grad=False)
    quantize_(linear, settings)
    found: tuple[dict[str, Tensor], dict[str, str]] = flatten_tensor_state_dict(
        {name: linear.weight}
    )
    return found


def _settings(kind: str) -> Any:
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise SpecError(f"--weights {kind} {NO_TORCHAO}") from error
    config = Int8WeightOnlyConfig if kind == "int8" else Float8WeightOnlyConfig
    return config(set_inductor_config=False)
