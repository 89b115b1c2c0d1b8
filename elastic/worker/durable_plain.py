"""Checkpoints that torch.distributed.checkpoint saved without elastic: their index is a pickle, read here without running it.

The unpickler knows the few classes that DCP's index is made of and gives a plain record for each; any other name is refused.
The tensors' memory is taken from the blobs as in our own files.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from elastic.errors import SpecError
from elastic.storage import Storage, open_storage
from elastic.types import DTYPE_BYTES, Box
from elastic.worker.durable_digest import UNCHECKED
from elastic.worker.durable_format import METADATA, Damaged, Entry, Marker
from elastic.worker.durable_load import Checkpoint

NO_PICKLE = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError, MemoryError,
    OverflowError, RecursionError,
)  # fmt: skip
MOST_BYTES = 1 << 30  # of an index
DCP, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class Record:
    """Stands for an object of one of DCP's classes: its fields (or its state, where it pickles a tuple)."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.fields: dict[str, Any] = {}
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.fields = {}
        self.state = state
        if isinstance(state, dict):
            self.fields = {str(key): value for key, value in state.items()}

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {"kind": name})


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _member(owner: Any, name: Any) -> Record:
    """In the place of getattr, by which some versions of Python (3.11.0 to 3.11.3) pickle the member of an enumeration."""
    if owner is not ALLOWED[DCP, "_MEM_FORMAT_ENCODING"] or not isinstance(name, str):
        raise SpecError("it asks for builtins.getattr, which no index of DCP holds: refused")
    return _record("_MEM_FORMAT_ENCODING")(name)


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    **{(DCP, name): _record(name) for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta",
        "TensorProperties", "_MEM_FORMAT_ENCODING",
    )},
    (FILES, "_StorageInfo"): _record("_StorageInfo"),
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _text,
    **{("pathlib", name): _text for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    **{("pathlib._local", name): _text for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
}  # fmt: skip


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and name in DTYPE_BYTES:
            return name
        raise SpecError(f"{self._where}: it asks for {module}.{name}, which no index of DCP holds: refused")

    def persistent_load(self, pid: Any) -> Any:
        raise SpecError(f"{self._where}: it asks for a persistent object, which no index holds: refused")


def read_index(data: bytes, where: str) -> Record:
    """DCP's Metadata as a Record. Raises SpecError that names what a malicious index asks for, Damaged for what is none."""
    if len(data) > MOST_BYTES:
        raise Damaged(f"{where}: {len(data)} bytes are no index")
    try:
        found = _Reader(data, where).load()
    except SpecError as error:
        raise SpecError(str(error) if where in str(error) else f"{where}: {error}") from error
    except NO_PICKLE as error:
        raise Damaged(f"{where}: not readable ({type(error).__name__}: {error})") from error
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise Damaged(f"{where}: it is no index of torch.distributed.checkpoint")
    return found


def open_plain(uri: str) -> Checkpoint:
    """A checkpoint that plain DCP saved. Tensors are named by their path in the saved state dict (`optim.state.w.exp_avg`).

    Sizes are checked against the files; there are no digests. Raises SpecError or Damaged, naming the file.
    """
    storage = open_storage(uri)
    where = storage.uri_of(METADATA)
    try:
        index = read_index(storage.get(METADATA), where)
    except FileNotFoundError as error:
        raise SpecError(f"{uri}: it has no {METADATA}; it is no checkpoint of torch.distributed.checkpoint") from error
    try:
        entries = _entries(index, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{where}: not readable ({type(error).__name__}: {error})") from error
    _check_files(storage, entries)
    return Checkpoint(storage, Marker(0, 0, 0, 0, {}, ()), [], entries)


def _entries(index: Record, where: str) -> list[tuple[str, Entry]]:
    names = index.fields.get("planner_data") or {}
    places = {(key["fqn"], tuple(key.fields.get("offset") or ())): info for key, info in index["storage_data"].items()}
    out = []
    for fqn, about in index["state_dict_metadata"].items():
        if about.kind != "TensorStorageMetadata":
            continue
        name = ".".join(map(str, names.get(fqn) or (fqn,)))
        dtype = _dtype(about["properties"], f"{where}: {name}")
        for chunk in about["chunks"]:
            box = Box(name, _naturals(chunk["offsets"]), _naturals(chunk["sizes"]), dtype)
            if box.n_elements:
                out.append(_entry(box, places[fqn, box.offsets], f"{where}: {name}"))
    return out


def _entry(box: Box, info: Record, where: str) -> tuple[str, Entry]:
    if info.fields.get("transform_descriptors"):
        raise SpecError(f"{where}: it was saved compressed or encrypted, which is not read here")
    offset, length = _naturals((info["offset"], info["length"]))
    name = info["relative_path"]
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise SpecError(f"{where}: its file is called {name!r}: refused")
    return name, Entry(box, offset, length, UNCHECKED)


def _dtype(properties: Record, where: str) -> str:
    found = properties.fields.get("dtype") or (properties.state[0] if isinstance(properties.state, tuple) else None)
    if found not in DTYPE_BYTES:
        raise SpecError(f"{where}: dtype {found} is not known")
    return str(found)


def _naturals(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in out):
        raise ValueError(f"{out} are no sizes")
    return out


def _check_files(storage: Storage, entries: list[tuple[str, Entry]]) -> None:
    ends: dict[str, int] = {}
    for name, entry in entries:
        ends[name] = max(ends.get(name, 0), entry.offset + entry.length)
    for name, end in ends.items():
        try:
            n_bytes = storage.size(name)
        except FileNotFoundError as error:
            raise Damaged(f"{storage.uri_of(name)}: missing") from error
        if n_bytes < end:
            raise Damaged(f"{storage.uri_of(name)}: truncated ({n_bytes} bytes, the index names {end})")
