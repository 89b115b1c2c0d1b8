"""Weights as safetensors: written as a stream, read through the `safetensors` package.

A file is the length of its header (u64, little-endian), the header (JSON: name -> dtype, shape,
offsets), then the tensors' bytes (https://github.com/huggingface/safetensors, Format). Several
files come with model.safetensors.index.json, as transformers has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.types import DTYPE_BYTES, Box

NAME_MOST = 200  # characters of a bad name that an error shows
FILE_NAME_MOST = 255  # bytes
FILE_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
DTYPES = {short: name for name, short in NAMES.items()}
WRITTEN = {"float8_e4m3fn": "F8_E4M3"}  # but not read
Shapes = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype
Parts = Callable[[str], Iterator[Tensor]]  # the tensor's rows, in order, a piece at a time


def write_files(
    storage: Storage,
    shapes: Shapes,
    parts: Parts,
    *,
    file_bytes: int = FILE_BYTES,
    single: str = "model.safetensors",
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes the tensors in order, at most `file_bytes` in a file where they are smaller; returns
    the names of the files. `single`: the file's name where one is enough. `metadata`: of each
    file."""
    groups = _groups(shapes, file_bytes)
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [single]
    for name, group in zip(names, groups):
        mine = {fqn: shapes[fqn] for fqn in group}
        _write_file(storage, name, mine, parts=parts, metadata=metadata or {})
    if len(groups) == 1:
        return names
    weight_map = {fqn: name for name, group in zip(names, groups) for fqn in group}
    index = {
        "metadata": {"total_size": sum(_n_bytes(*shapes[fqn]) for fqn in weight_map)},
        "weight_map": weight_map,
    }
    storage.put(INDEX, json.dumps(index, indent=1).encode())
    return [*names, INDEX]


def _write_file(
    storage: Storage, name: str, shapes: Shapes, *, parts: Parts, metadata: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for fqn, (shape, dtype) in shapes.items():
        end = at + _n_bytes(shape, dtype)
        short = NAMES.get(dtype) or WRITTEN[dtype]
        header[fqn] = {"dtype": short, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with storage.create(name) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for fqn in shapes:
            for part in parts(fqn):
                memory: Any = part.contiguous().reshape(-1).view(torch.uint8).numpy()
                file.write(memoryview(memory))


def _groups(shapes: Shapes, file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for fqn, (shape, dtype) in shapes.items():
        n_bytes = _n_bytes(shape, dtype)
        if groups[-1] and size + n_bytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(fqn)
        size += n_bytes
    return groups


def _n_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * (1 if dtype in WRITTEN else DTYPE_BYTES[dtype])


class SafetensorFiles:
    """Tensors of one file, or of a folder with several. `tensors`: name -> (shape, dtype). Close
    it."""

    def __init__(self, path: Path) -> None:
        self.uri = str(path)
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        self._of: dict[str, Any] = {}
        self._stack = ExitStack()
        for file in safetensor_paths(path):
            self._add(file)

    def close(self) -> None:
        self._stack.close()

    def read(self, box: Box) -> Tensor:
        """Raises SpecError where the file ends early."""
        # not at the top: certify runs where it is not installed
        from safetensors import SafetensorError

        where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
        try:
            found: Tensor = (
                self._of[box.fqn].get_slice(box.fqn)[where]
                if where
                else self._of[box.fqn].get_tensor(box.fqn)
            )
        except SafetensorError as error:
            raise SpecError(f"{self.uri}: {box.fqn} cannot be read: {error}") from error
        return found

    def _add(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                about = opened.get_slice(name)
                dtype = DTYPES.get(about.get_dtype())
                if dtype is None:
                    raise SpecError(
                        f"{file}: {name} is of dtype {about.get_dtype()}, which is not read here; "
                        "take weights of 16 or 32 bits"
                    )
                if name in self.tensors:
                    raise SpecError(f"{file}: {name} is in another file too")
                self.tensors[name], self._of[name] = (tuple(about.get_shape()), dtype), opened
        except (SafetensorError, OSError) as error:
            raise SpecError(f"{file}: no safetensors file that can be read: {error}") from error


def safetensor_paths(path: Path) -> list[Path]:
    """The file itself, or those of a folder. Raises SpecError where the index names what is not
    there."""
    if path.is_file():
        return [path]
    if not (path / INDEX).is_file():
        found = sorted(path.glob("*.safetensors"))
        odd = [file for file in found if not file.is_file()]
        if odd:
            raise SpecError(
                f"{odd[0]}: no regular file; take it away, or give the one file that is meant"
            )
        if not found:
            raise SpecError(
                f"{path}: neither a .safetensors file nor a folder with some, nor a checkpoint of "
                "DCP (.metadata)"
            )
        return found
    try:
        names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise SpecError(f"{path / INDEX}: not readable ({type(error).__name__}: {error})") from None
    bad = [name for name in names if not isinstance(name, str) or not _is_file_name(name)]
    if bad:
        raise SpecError(f"{path / INDEX}: it names the file {str(bad[0])[:NAME_MOST]!r}: refused")
    missing = sorted(name for name in names if not (path / name).is_file())
    if missing:
        raise SpecError(f"{path / missing[0]}: missing; {INDEX} names it")
    return [path / name for name in sorted(names)]


def _is_file_name(name: str) -> bool:
    """Of a file beside the index, as a file system can have it."""
    return Path(name).name == name and len(name.encode(errors="replace")) <= FILE_NAME_MOST
