"""One tensor as torch.save writes it: a zip file whose record `data/0` is the tensor's memory,
stored as it is.

Reading takes that record where it lies, so that nothing is unpickled and nothing copied; a blob
that is laid out otherwise goes through torch.load(weights_only=True).

Digests of blobs: `xxh3:<32 hex digits>` (XXH3-128, 13 GB/s on a core where SHA-256 makes 1 and
CRC-32 makes 2). They find accidents; who can write the files can also write the digests.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pickle import UnpicklingError
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from elastic.types import Box

# of a zip record: lengths of its name and of its extra field
LOCAL_HEADER = struct.Struct("<26xHH")

WHOLE_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")  # opcodes of a pickle
ABOUT_MOST = 64 << 10  # bytes of the pickle that says what the memory is
ZIP_RECORD, DATA_RECORD = b"PK\x03\x04", b"/data/0"


def alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and the only user of its memory as torch sees it: torch.save writes
    the whole storage of a view.

    Nothing is copied where the tensor is contiguous and on the CPU.
    """
    out = tensor.to("cpu").contiguous()
    if out.untyped_storage().nbytes() == out.nbytes:
        return out
    memory = torch.from_numpy(out.reshape(-1).view(torch.uint8).numpy())
    return memory.view(out.dtype).reshape(out.shape)


def decode_blob(data: memoryview, box: Box, start: int | None = -1) -> Tensor:
    """The tensor of `box`; it may look into `data`. `start`: where its memory begins there, -1 = to
    be found.

    Raises ValueError for anything but a tensor of that shape and dtype.
    """
    dtype: torch.dtype = getattr(torch, box.dtype)
    if start == -1:
        start = find_data(data, box)
    elif start is not None:
        check_head(data[:start])
    if start is not None:
        return torch.frombuffer(data, dtype=dtype, count=box.n_elements, offset=start).reshape(
            box.sizes
        )
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError, KeyError) as error:
        raise ValueError(type(error).__name__) from error
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (box.sizes, dtype):
        raise ValueError("it holds something else")
    return tensor


def check_head(head: memoryview) -> None:
    """Raises ValueError unless these bytes, up to the tensor's memory, begin as torch.save begins a
    blob."""
    if head[:4] != ZIP_RECORD or DATA_RECORD not in bytes(head):
        raise ValueError("it does not begin as torch.save writes it")


def find_data(data: memoryview, box: Box) -> int | None:
    """Where the tensor's memory begins, when the blob holds that of `box`, element after element,
    little-endian and uncompressed."""

    def read_at(offset: int, into: memoryview) -> int:
        part = data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    return find_data_in(Blob(read_at, len(data)), box)


def find_data_in(blob: Blob, box: Box) -> int | None:
    """The same of a blob that is not in memory: little of it is read."""
    try:
        with zipfile.ZipFile(blob) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        order, start = (
            _content(blob, records["byteorder"], 6),
            _content(blob, records["data/0"], box.n_bytes),
        )
        about = records["data.pkl"]
        pickled = _content(blob, about, min(about.file_size, ABOUT_MOST))
        if pickled is None or not _in_order(blob.part(pickled, about.file_size), box.sizes):
            return None
    except (zipfile.BadZipFile, struct.error, KeyError, OSError, ValueError):
        return None
    if order is None or blob.part(order, 6) != b"little" or "data/1" in records:
        return None
    return start


def _in_order(pickled: bytes, sizes: tuple[int, ...]) -> bool:
    """Does the pickle say that the tensor begins with its memory, and is contiguous? It is looked
    through, not loaded: behind the memory's name come the offset, the sizes and the strides."""
    found: list[int] | None = None
    for code, value, _ in pickletools.genops(pickled):
        if code.name == "BINPERSID":
            found = []
        elif found is not None and code.name.startswith("NEW"):  # whether it has gradients
            break
        elif found is not None and code.name in WHOLE_NUMBERS and isinstance(value, int):
            found.append(value)
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if found is None or len(found) != 1 + 2 * len(sizes):
        return False
    is_as = zip(sizes, found[1 + len(sizes) :], strides, strict=True)
    return found[: 1 + len(sizes)] == [0, *sizes] and all(
        one == two for size, one, two in is_as if size > 1
    )


def _content(blob: Blob, record: zipfile.ZipInfo, n_bytes: int) -> int | None:
    """Where the bytes of a record begin, if they are `n_bytes`, stored as they are."""
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != n_bytes:
        return None
    head = blob.part(record.header_offset, LOCAL_HEADER.size)
    name_length, extra_length = LOCAL_HEADER.unpack(head)
    start: int = record.header_offset + LOCAL_HEADER.size + name_length + extra_length
    return start if start + n_bytes <= blob.length else None


class Blob(io.RawIOBase):
    """A file of `length` bytes. `read_at`: fills memory from an offset on; returns the bytes that
    there were."""

    def __init__(self, read_at: Callable[[int, memoryview], int], length: int) -> None:
        self._read_at, self.length, self._at = read_at, length, 0

    def part(self, offset: int, n_bytes: int) -> bytes:
        self.seek(offset)
        return self.read(n_bytes) or b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.length)[whence])
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: max(0, self.length - self._at)]
        n = self._read_at(self._at, view) if view else 0
        self._at += n
        return n


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def text(self) -> str: ...


class Xxh3:
    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: memoryview, /) -> None:
        self._state.update(data)

    def text(self) -> str:
        return f"xxh3:{self._state.hexdigest()}"


class Unchecked:
    """For files that come without digests (those of plain DCP)."""

    def update(self, data: memoryview, /) -> None: ...

    def text(self) -> str:
        return UNCHECKED


UNCHECKED = "none:"
KINDS: dict[str, type[Hasher]] = {"xxh3": Xxh3, "none": Unchecked}
LENGTHS = {"xxh3": 32, "none": 0}


def hasher_for(digest: str) -> Hasher:
    """A fresh hasher of the kind that made `digest`. Raises ValueError for a kind that is not
    known."""
    kind, _, value = digest.partition(":")
    if kind not in KINDS or len(value) != LENGTHS[kind] or value.strip("0123456789abcdef"):
        raise ValueError(f"{digest!r} is no digest (xxh3:<32 hex digits>)")
    return KINDS[kind]()


def digest_of(*parts: memoryview) -> str:
    """The digest of these bytes one after the other."""
    hasher = Xxh3()
    for part in parts:
        hasher.update(part)
    return hasher.text()
