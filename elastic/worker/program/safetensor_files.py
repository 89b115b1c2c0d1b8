"""Weights as safetensors: written as a stream, read in ranges behind what the `safetensors` package
says of their headers.

A file is the length of its header (u64, little-endian), the header (JSON: name -> dtype, shape,
offsets), then the tensors' bytes (https://github.com/huggingface/safetensors, Format). Several
files come with model.safetensors.index.json, as transformers has it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
CHUNK_BYTES = 16 << 20
# shorter pieces of a row are not read one by one: whole rows are, and cut in memory
RUN_BYTES = 4096
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
    """Tensors of one file, or of a folder with several. `tensors`: name -> (shape, dtype). `tick`:
    called before each chunk that is read. Close it.

    Ranges are read with pread, not mapped: mapped pages count as memory of the process until the
    system takes them back, and a box that is cut along columns touches all of them."""

    def __init__(self, path: str | Path, tick: Callable[[], object] = lambda: None) -> None:
        self.uri, self._tick = str(path), tick
        if not Path(path).exists():
            raise SpecError(
                f"{path}: no such file or folder; weights are a local folder with safetensors, or "
                "one file"
            )
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # file, its first byte there
        with ExitStack() as self._stack:  # closes what is open where a file is refused
            for file in safetensor_paths(Path(path)):
                self._add(file)
            self._stack = self._stack.pop_all()

    def _add(self, file: Path) -> None:
        # not at the top: certify runs where it is not installed
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="pt"):  # looks at the header and the file's length
                opened = self._stack.enter_context(file.open("rb", buffering=0))
            n_header = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(n_header))
        except (SafetensorError, OSError) as error:
            raise SpecError(f"{file}: no safetensors file that can be read: {error}") from error
        header.pop("__metadata__", None)
        for name, about in header.items():
            dtype = DTYPES.get(about["dtype"])
            if dtype is None:
                raise SpecError(
                    f"{file}: {name} is of dtype {about['dtype']}, which is not read here; "
                    "take weights of 16 or 32 bits"
                )
            if name in self.tensors:
                raise SpecError(f"{file}: {name} is in another file too")
            self.tensors[name] = tuple(about["shape"]), dtype
            self._places[name] = opened.fileno(), 8 + n_header + about["data_offsets"][0]

    def close(self) -> None:
        self._stack.close()

    def read(self, box: Box) -> Tensor:
        """As a new tensor; see `read_into`."""
        out = torch.empty(box.sizes, dtype=getattr(torch, box.dtype))
        self.read_into(box.fqn, box, out)
        return out

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """The part of `name` that `box` says, converted to the target's dtype; a chunk of rows at a
        time."""
        if not box.n_elements:
            return
        if not box.sizes:
            target.copy_(self._rows(name, (), (), first=0, n=1).reshape(()))
            return
        shape, dtype = self.tensors[name]
        row_bytes = prod(shape[1:]) * DTYPE_BYTES[dtype]
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for at in range(0, box.sizes[0], step):
            self._tick()
            n = min(step, box.sizes[0] - at)
            first = box.offsets[0] + at
            part = self._rows(name, box.offsets[1:], box.sizes[1:], first=first, n=n)
            target.narrow(0, at, n).copy_(part)

    def _rows(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], *, first: int, n: int
    ) -> Tensor:
        """[n, *sizes]: rows from `first` on, of each the part at `offsets`."""
        shape, kind = self.tensors[name]
        rest = list(shape[1:])
        dtype: torch.dtype = getattr(torch, kind)
        width, inner, item = prod(rest), prod(rest[1:]), DTYPE_BYTES[kind]
        in_runs = rest and list(sizes) != rest and list(sizes[1:]) == rest[1:]
        if in_runs and (run := sizes[0] * inner * item) >= RUN_BYTES:
            memory = bytearray(n * run)
            for i in range(n):
                at = ((first + i) * width + offsets[0] * inner) * item
                self._pread(name, memoryview(memory)[i * run : (i + 1) * run], at)
            return torch.frombuffer(memory, dtype=dtype).view(n, *sizes)
        memory = bytearray(n * width * item)
        self._pread(name, memoryview(memory), first * width * item)
        part = torch.frombuffer(memory, dtype=dtype).view(n, *rest)
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True), 1):
            part = part.narrow(dim, offset, size)
        return part

    def _pread(self, name: str, into: memoryview, at: int) -> None:
        file, start = self._places[name]
        done = 0
        while done < len(into):
            n = os.preadv(file, [into[done:]], start + at + done)
            if not n:
                raise SpecError(f"{self.uri}: a file has become shorter while it was read")
            done += n


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
