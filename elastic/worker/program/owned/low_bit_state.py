"""Tensors of few bits that torchao's optimizers keep: codes, the scale of each block of them and
the table of values, told apart and put together again.

The library is imported only where a form asks for it: what it makes is known by its class.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from elastic.errors import SpecError

MISSING = "torchao is not installed: pip install 'elastic-ray[torchao]'"
CLASSES = {  # where it stands
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
}


def is_low_bit(value: object) -> bool:
    kind = type(value)
    return CLASSES.get(kind.__name__) == kind.__module__


def parts_of(value: Any) -> dict[str, torch.Tensor]:
    """Its tensors, which share their memory with it."""
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def said_of(value: Any) -> list[Any]:
    """Its class and what it says of itself besides, as JSON."""
    _, about = value.__tensor_flatten__()
    return [type(value).__name__, [_plain(one) for one in about]]


def _plain(one: Any) -> Any:
    if isinstance(one, torch.dtype):
        return str(one)
    return list(one) if isinstance(one, tuple) else one


def low_bit_of(said: list[Any], parts: Mapping[str, torch.Tensor]) -> Any:
    """The tensor of these parts. Raises SpecError without the library."""
    name, about = said
    if name not in CLASSES:
        raise SpecError(f"'{name}' is no tensor of few bits that is known: {', '.join(CLASSES)}")
    try:
        kind = getattr(importlib.import_module(CLASSES[name]), name)
    except ImportError as error:
        raise SpecError(f"an optimizer's state is {name}: {MISSING}") from error
    return kind.__tensor_unflatten__(dict(parts), [_back(one) for one in about])


def _back(one: Any) -> Any:
    if isinstance(one, list):
        return torch.Size(one)
    if isinstance(one, str):
        return getattr(torch, one.removeprefix("torch."))
    return one
