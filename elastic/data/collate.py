"""Items of a step -> one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.data.batches import check_shapes, collated, stack_arrays
from elastic.errors import ProgramError

Batch = dict[str, Tensor]


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    """Stacks items (dicts of tensors, arrays or numbers, equal in keys and shapes) along a new
    first dimension.

    Raises ProgramError naming the key and the shapes that differ.
    """
    return collated(items, _stack)


def _stack(key: str, values: list[Any]) -> Tensor:
    check_shapes(key, values)
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values)
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([torch.as_tensor(value) for value in values])
    return tensor_of(key, stack_arrays(key, values))


def tensor_of(key: str, values: Any) -> Tensor:
    """Unsigned numbers of 16 and 32 bits, as token files have them, become int64: no layer of torch
    takes them."""
    if isinstance(values, Tensor):
        return values
    if values.dtype in (np.uint16, np.uint32):
        values = values.astype(np.int64)
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        raise ProgramError(f"'{key}' of an item cannot become a tensor: {error}") from error
