"""Counts how often a training step would make the host wait for a GPU, without one: the CPU plays
the device.

What lies on the device is followed by its memory: the tensors named at the start, whatever is made
with a `torch.device` object (a factory's `device=`, a `.to(device)`, which is made a real copy
here), and whatever is computed from those. The string "cpu" names the host. A number, a shape or a
copy that the host takes from such memory is a synchronization on CUDA, and so is a copy to it
without `non_blocking`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
METHODS = ("tolist", "numpy", "__array__", "cpu")


class _Memory:
    """Of the device, by storage; they are kept, so that no address comes twice."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.UntypedStorage] = {}

    def add(self, value: Any) -> None:
        for tensor in tree_leaves(value):
            if (
                type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
                and tensor.layout is torch.strided
            ):
                storage = tensor.untyped_storage()
                self.kept[storage._cdata] = storage

    def has(self, value: Any) -> bool:
        return any(
            isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self.kept
            for tensor in tree_leaves(value)
        )


class HostReads(TorchDispatchMode):
    """`seen`: one line of the code for each synchronization. May be entered again: what is on the
    device stays known."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.memory = _Memory()
        self.memory.add(list(tensors))
        # what is allocated there comes from hooks, whose own calls cannot be seen: the device's
        self.in_backward = False
        self._calls = _Calls(self)

    def __enter__(self) -> HostReads:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def take(self) -> list[str]:
        """What was seen since the last time."""
        seen, self.seen = self.seen, []
        return seen

    def note(self, what: str) -> None:
        own = [
            frame
            for frame in traceback.extract_stack()
            if "host_reads" not in frame.filename and "torch/" not in frame.filename
        ]
        self.seen.append(
            f"{what} at "
            + " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in own[:-4:-1])
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        here = self.memory.has((args, kwargs)) or (self.in_backward and name == "empty")
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)
            for one in args[1]
        )
        if here and (name in READS or masked):
            self.note(name)
        if name == "copy_" and not self.memory.has(args[0]) and self.memory.has(args[1]):
            self.note("copy_ to the host")
            here = False
        out = func(*args, **kwargs)
        if here:
            written = [
                one.name
                for one in func._schema.arguments
                if one.alias_info is not None and one.alias_info.is_write
            ]
            names = [one.name for one in func._schema.arguments]
            self.memory.add(
                [
                    out,
                    *(
                        value
                        for key, value in (*zip(names, args), *kwargs.items())
                        if key in written
                    ),
                ]
            )
        return out


class _Calls(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, memory = getattr(func, "__name__", ""), self.reads.memory
        named = any(isinstance(one, torch.device) for one in (*args, *kwargs.values()))
        of = args[0] if args else None
        if func is torch.Tensor.backward:
            self.reads.in_backward = True
            try:
                return func(*args, **kwargs)
            finally:
                self.reads.in_backward = False
        leaves = name == "to" and any(isinstance(one, str) for one in (*args[1:], *kwargs.values()))
        if (name in METHODS or leaves) and memory.has(of):
            self.reads.note(f".{name}()")
            return func(*args, **kwargs).clone() if name in ("to", "cpu") else func(*args, **kwargs)
        out = func(*args, **kwargs)
        if named and isinstance(out, torch.Tensor):
            if name == "to" and not memory.has(of):
                out = out.clone()
                if not kwargs.get("non_blocking"):
                    self.reads.note("a blocking .to(device)")
            memory.add(out)
        return out
