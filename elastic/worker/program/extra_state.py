"""Objects with a state of their own (a learning rate schedule, an average of the weights) as boxes
of the training state.

The state of each object is one box `extra.<name>` of bytes, equal on every rank and never cut: two
lengths, JSON, the bytes of its tensors. Nothing in it is ever executed or unpickled. The box is
larger than the state was at first (`capacity`), since numbers grow by some digits; tensors must
keep their shapes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from elastic.errors import ProgramError, SpecError, StateLost
from elastic.reshard.rank_boxes import EXTRA
from elastic.types import DTYPE_BYTES, TensorSpec
from elastic.worker.program.owned.optimizer_counters import COUNTERS, OptimizerCounters

Tensors = Mapping[str, tuple[Any, torch.Tensor]]

HEAD_BYTES = 8
SPARE_BYTES, ROUND_BYTES = 4096, 1024
PLAIN = (bool, int, float, str, type(None))


class ExtraState:
    """The objects of a Program, and their state as it was when the program was loaded: that of a
    fresh start."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.objects = dict(objects)
        self.first = {
            name: encode(name, _state_of(name, held)) for name, held in self.objects.items()
        }

    def count_for(self, each: Mapping[str, Any]) -> None:
        """What optimizers count is that of these, the ones of a generation."""
        counters = self.objects.get(COUNTERS)
        if isinstance(counters, OptimizerCounters):
            counters.each = each

    def specs(self) -> tuple[TensorSpec, ...]:
        """What the model's profile says of the boxes."""
        return tuple(
            TensorSpec(EXTRA + name, (capacity(len(data)),), "uint8", trainable=False, buffer=True)
            for name, data in self.first.items()
        )

    def fresh(self, tensors: Tensors) -> None:
        """Fills the boxes that are given with the state of a fresh start."""
        for name, data in self.first.items():
            if EXTRA + name in tensors:
                _write(name, data, tensors[EXTRA + name][1])

    def note(self, tensors: Tensors) -> None:
        """Fills the boxes with the objects' state as it is now. Raises ProgramError where it has
        outgrown its box."""
        for name, held in self.objects.items():
            _write(name, encode(name, _state_of(name, held)), tensors[EXTRA + name][1])

    def load(self, tensors: Tensors) -> None:
        """Gives the objects the state in the boxes."""
        for name, held in self.objects.items():
            held.load_state_dict(decode(name, tensors[EXTRA + name][1]))


def capacity(n_bytes: int) -> int:
    """Bytes of the box of a state that takes `n_bytes` at first."""
    wanted = HEAD_BYTES + n_bytes + n_bytes // 4 + SPARE_BYTES
    return -(-wanted // ROUND_BYTES) * ROUND_BYTES


def _state_of(name: str, held: Any) -> Any:
    if isinstance(held, type) or not (
        hasattr(held, "state_dict") and hasattr(held, "load_state_dict")
    ):
        kind = (
            f"the class {held.__name__}" if isinstance(held, type) else f"a {type(held).__name__}"
        )
        raise SpecError(
            f"extra_state['{name}'] is {kind}; it must be an object with state_dict() and "
            "load_state_dict()"
        )
    return held.state_dict()


def _write(name: str, data: bytes, into: torch.Tensor) -> None:
    if HEAD_BYTES + len(data) > into.numel():
        raise ProgramError(
            f"extra_state['{name}']: its state takes {len(data)} bytes now, its box holds "
            f"{into.numel() - HEAD_BYTES}; "
            "tensors and lists in it must keep their sizes from the start on"
        )
    whole = bytearray(len(data).to_bytes(HEAD_BYTES, "little") + data)
    into[: len(whole)].copy_(torch.frombuffer(whole, dtype=torch.uint8))


# -------------------------------------------------------------------------------------------- bytes


def encode(name: str, value: Any) -> bytes:
    """Numbers, texts, lists, dicts and tensors as bytes. Raises ProgramError that names anything
    else."""
    parts: list[bytes] = []
    tree = _tree(value, f"extra_state['{name}']", parts)
    head = json.dumps(tree, separators=(",", ":")).encode()
    return len(head).to_bytes(HEAD_BYTES, "little") + head + b"".join(parts)


def decode(name: str, box: torch.Tensor) -> Any:
    """The inverse of `encode`, from a box. Raises StateLost where the bytes are no state."""
    data = box.detach().cpu().contiguous().numpy().tobytes()
    n_bytes = int.from_bytes(data[:HEAD_BYTES], "little")
    body = data[HEAD_BYTES : HEAD_BYTES + n_bytes]
    n_head = int.from_bytes(body[:HEAD_BYTES], "little")
    try:
        tree = json.loads(body[HEAD_BYTES : HEAD_BYTES + n_head])
        return _value(tree, body[HEAD_BYTES + n_head :])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StateLost(f"extra_state['{name}']: its bytes are no state ({error})") from error


def _tree(value: Any, where: str, parts: list[bytes]) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor | np.ndarray):
        return _tensor_tree(value, parts)
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [_tree(k, where, parts), _tree(v, f"{where}[{k!r}]", parts)]
                for k, v in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        items = [_tree(item, f"{where}[{i}]", parts) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise ProgramError(
        f"{where} is a {type(value).__name__}; a state_dict() may hold numbers, texts, None, "
        "lists, tuples, dicts and tensors"
    )


def _tensor_tree(value: torch.Tensor | np.ndarray[Any, Any], parts: list[bytes]) -> dict[str, Any]:
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    at = sum(map(len, parts))
    parts.append(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return {
        kind: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at, len(parts[-1])]
    }


def _value(tree: Any, data: bytes) -> Any:
    if isinstance(tree, list):
        return [_value(item, data) for item in tree]
    if not isinstance(tree, dict):
        return tree
    (kind, content), *more = tree.items()
    if more or kind not in ("dict", "counter", "tuple", "tensor", "array"):
        raise ValueError(f"unknown kind {kind}")
    if kind in ("dict", "counter"):
        pairs = {_value(k, data): _value(v, data) for k, v in content}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "tuple":
        return tuple(_value(item, data) for item in content)
    return _tensor(kind, content, data)


def _tensor(kind: str, content: list[Any], data: bytes) -> Any:
    dtype, shape, at, n_bytes = content
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype}")
    found: torch.dtype = getattr(torch, dtype)
    flat = (
        torch.frombuffer(bytearray(data[at : at + n_bytes]), dtype=found)
        if n_bytes
        else torch.empty(0, dtype=found)
    )
    tensor = flat.reshape(shape)
    return tensor.numpy() if kind == "array" else tensor
