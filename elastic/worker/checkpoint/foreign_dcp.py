"""Checkpoints that torch.distributed.checkpoint saved without elastic: their index is a pickle,
read here without running it.

The unpickler knows the few classes that DCP's index is made of and gives a plain record for each;
any other name is refused. It is the one in Python, which can be looked over the shoulder: tuples
that hold each other many times would be hashed for ever. The tensors' memory is taken from the
blobs as in our own files.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, ClassVar

from elastic.errors import SpecError
from elastic.storage import Storage, open_storage
from elastic.types import DTYPE_BYTES, Box
from elastic.worker.checkpoint.blob import UNCHECKED
from elastic.worker.checkpoint.checkpoint_format import METADATA, BlobEntry, Damaged, Marker
from elastic.worker.checkpoint.checkpoint_reader import Checkpoint
from elastic.worker.program.safetensor_files import NAME_MOST

NO_PICKLE = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError,
    ValueError, MemoryError, OverflowError, RecursionError, AssertionError, struct.error,
)  # fmt: skip
MOST_BYTES = 1 << 30  # of an index
MOST_IN_A_TUPLE = 100_000  # items, those of the tuples in it counted each time
TEXT_MOST = 10_000  # characters of a path or a name
LEAST_BYTES = 10  # of an index, for each part of a tensor that it names
NATURAL_MOST = 2**62
TUPLES = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
# opcodes that no index needs, by which memory is asked for without bytes, or objects that others
# have registered
UNUSED = (
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2,
    pickle.EXT4,
)  # fmt: skip
DCP, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class Record:
    """Stands for an object of one of DCP's classes: its fields (or its state, where it pickles a
    tuple)."""

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
    if not all(isinstance(value, int) for value in values):
        raise SpecError("a size in it is made of other things than numbers: refused")
    return tuple(values)


def _text(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts) or sum(map(len, parts)) > TEXT_MOST:
        raise SpecError("a path in it is no short text: refused")
    return "/".join(parts)


def _member(owner: Any, name: Any) -> Record:
    """In the place of getattr, by which some versions of Python (3.11.0 to 3.11.3) pickle the
    member of an enumeration."""
    if owner is not ALLOWED[DCP, "_MEM_FORMAT_ENCODING"] or not isinstance(name, str):
        raise SpecError("it asks for builtins.getattr, which no index of DCP holds: refused")
    return _record("_MEM_FORMAT_ENCODING")(name)


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    **{(DCP, name): _record(name) for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata",
        "BytesStorageMetadata", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING",
    )}, (FILES, "_StorageInfo"): _record("_StorageInfo"), ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _text, **{("pathlib", name): _text for name in ("Path",
    "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")}, **{("pathlib._local",
    name): _text for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath",
    "PureWindowsPath")},
}  # fmt: skip


def _weighed(load: Any) -> Any:
    """The same opcode, for a tuple of not too much."""

    def weigh(reader: _Reader) -> None:
        load(reader)
        made = reader.stack[-1]
        n = 1 + sum(reader.weights.get(id(item), (1,))[0] for item in made)
        if n > MOST_IN_A_TUPLE:
            raise pickle.UnpicklingError(
                f"a tuple in it stands for more than {MOST_IN_A_TUPLE:,} items"
            )
        reader.weights[id(made)] = n, made  # kept, so that its id stays its own

    return weigh


class _Reader(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = {
        code: _weighed(load) if bytes([code]) in TUPLES else load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in UNUSED
    }
    stack: list[Any]

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self.weights: dict[int, tuple[int, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if module == "torch" and name in DTYPE_BYTES:
            return name
        raise SpecError(
            f"{self._where}: it asks for {module}.{name}, which no index of DCP holds: refused"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise SpecError(
            f"{self._where}: it asks for a persistent object, which no index holds: refused"
        )


def read_index(data: bytes, where: str) -> Record:
    """DCP's Metadata as a Record. Raises SpecError that names what a malicious index asks for,
    Damaged for what is none."""
    if len(data) > MOST_BYTES:
        raise Damaged(f"{where}: {len(data)} bytes are no index")
    try:
        found = _Reader(data, where).load()
    except SpecError as error:
        raise SpecError(str(error) if where in str(error) else f"{where}: {error}") from error
    except NO_PICKLE as error:
        raise Damaged(f"{where}: not readable ({_said(error)})") from error
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise Damaged(f"{where}: it is no index of torch.distributed.checkpoint")
    return found


def open_plain(uri: str) -> Checkpoint:
    """A checkpoint that plain DCP saved. Tensors are named by their path in the saved state dict
    (`optim.state.w.exp_avg`).

    Sizes are checked against the files; there are no digests. Raises SpecError or Damaged, naming
    the file.
    """
    storage = open_storage(uri)
    where = storage.uri_of(METADATA)
    try:
        data = storage.get(METADATA)
        index = read_index(data, where)
    except FileNotFoundError as error:
        raise SpecError(
            f"{uri}: it has no {METADATA}; it is no checkpoint of torch.distributed.checkpoint"
        ) from error
    try:
        entries = _entries(index, where, len(data) // LEAST_BYTES)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: not readable ({_said(error)})") from error
    _check_files(storage, entries)
    return Checkpoint(storage, Marker(0, 0, 0, 0, {}, ()), [], plain=entries)


def _entries(index: Record, where: str, most: int) -> list[tuple[str, BlobEntry]]:
    """`most`: entries, as many as the index has bytes for."""
    names = index.fields.get("planner_data") or {}
    places = {
        (key["fqn"], tuple(key.fields.get("offset") or ())): info
        for key, info in index["storage_data"].items()
    }
    out: list[tuple[str, BlobEntry]] = []
    for fqn, about in index["state_dict_metadata"].items():
        if about.kind != "TensorStorageMetadata":
            continue
        name = _name(names.get(fqn) or (fqn,))
        dtype = _dtype(about["properties"], f"{where}: {name}")
        for chunk in about["chunks"]:
            box = Box(name, _naturals(chunk["offsets"]), _naturals(chunk["sizes"]), dtype)
            if len(out) > most:
                raise ValueError(
                    f"it names more than {most} parts, which is more than its bytes can hold"
                )
            if box.n_elements:
                out.append(_entry(box, places[fqn, box.offsets], f"{where}: {name}"))
    return out


def _name(path: Any) -> str:
    """Of a tensor, by its path in the state dict."""
    parts = [str(part) for part in path if isinstance(part, str | int)]
    if len(parts) < len(path) or sum(map(len, parts)) > TEXT_MOST:
        raise ValueError("a tensor's name in it is no short text")
    return ".".join(parts)


def _said(error: BaseException) -> str:
    """What an exception says, if that is short: of a KeyError it is whatever stands for the key."""
    what = error.args[0] if error.args else ""
    return (
        f"{type(error).__name__}: {what[:NAME_MOST]}"
        if isinstance(what, str)
        else type(error).__name__
    )


def _entry(box: Box, info: Record, where: str) -> tuple[str, BlobEntry]:
    if info.fields.get("transform_descriptors"):
        raise SpecError(f"{where}: it was saved compressed or encrypted, which is not read here")
    offset, length = _naturals((info["offset"], info["length"]))
    name = info["relative_path"]
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        said = repr(name)[:NAME_MOST] if isinstance(name, str) else f"by a {type(name).__name__}"
        raise SpecError(f"{where}: its file is called {said}: refused")
    return name, BlobEntry(box, offset, length, UNCHECKED)


def _dtype(properties: Record, where: str) -> str:
    state = properties.state if isinstance(properties.state, tuple) else ()
    found = properties.fields.get("dtype") or next(iter(state), None)
    if not isinstance(found, str) or found not in DTYPE_BYTES:
        said = found[:NAME_MOST] if isinstance(found, str) else f"(a {type(found).__name__})"
        raise SpecError(f"{where}: dtype {said} is not known")
    return found


def _naturals(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if any(
        not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= NATURAL_MOST
        for value in out
    ):
        raise ValueError("sizes in it are no numbers of at least 0")
    return out


def _check_files(storage: Storage, entries: list[tuple[str, BlobEntry]]) -> None:
    ends: dict[str, int] = {}
    for name, entry in entries:
        ends[name] = max(ends.get(name, 0), entry.offset + entry.length)
    for name, end in ends.items():
        try:
            n_bytes = storage.size(name)
        except FileNotFoundError as error:
            raise Damaged(f"{storage.uri_of(name)}: missing") from error
        if n_bytes < end:
            raise Damaged(
                f"{storage.uri_of(name)}: truncated ({n_bytes} bytes, the index names {end})"
            )
