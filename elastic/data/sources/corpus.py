"""Text as one long row of tokens, with the places where documents end. Nothing of it is kept in
memory but those places."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic.data.progress import gets_on
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.files import CHUNK_BYTES, Files
from elastic.errors import SpecError

LOG = logging.getLogger(__name__)
Tokens = NDArray[np.int64]
DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64", "uint64")
VERSION = 1
META, TOKENS, ENDS = "meta.json", "tokens.bin", "ends.npy"
AT_ONCE = 100  # documents that are tokenized in one call: 1000 whole files took 700 MB


class Corpus(Protocol):
    """`ends`: int64 [documents], where each document ends (exclusive), rising; the last one is the
    number of tokens. `name`: equal ones have equal tokens."""

    name: str

    @property
    def ends(self) -> NDArray[np.int64]: ...

    def read(self, start: int, stop: int) -> Tokens:
        """int64 [stop - start]"""
        ...


def n_tokens(corpus: Corpus) -> int:
    return int(corpus.ends[-1]) if len(corpus.ends) else 0


class Parts:
    """Which piece of which file: `starts` [files + 1] in tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64))))

    def pieces(self, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
        """(file, first, last + 1), in tokens of that file."""
        n = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            until = min(stop, int(self.starts[n + 1]))
            if until > start:
                yield n, start - int(self.starts[n]), until - int(self.starts[n])
            start, n = until, n + 1


class FileBytes:
    """The bytes of files, a byte 0 behind each; at most `max_bytes` of them. Every file is a
    document."""

    def __init__(self, files: Files, max_bytes: int | None = None) -> None:
        self.files, self._parts = files, Parts([size + 1 for size in files.sizes])
        self.name = f"bytes-{files.digest}-{max_bytes}"
        total = int(self._parts.starts[-1])
        total = total if max_bytes is None else min(total, max_bytes)
        inside = self._parts.starts[1:]
        self.ends = np.append(inside[inside < total], total) if total else inside[:0]

    def read(self, start: int, stop: int) -> Tokens:
        out = np.zeros(stop - start, dtype=np.int64)
        at = 0
        for n, first, until in self._parts.pieces(start, stop):
            data = self.files.read(n, first, until - first)  # without the byte 0
            out[at : at + len(data)] = np.frombuffer(data, dtype=np.uint8)
            at += until - first
        return out


class TokenFiles:
    """Files of token ids: raw (`dtype`) or .npy. Documents end behind each `end_token`, else with
    the files.

    Raises SpecError for a file that is none of the two.
    """

    def __init__(
        self,
        files: Files,
        dtype: str | None = None,
        end_token: int | None = None,
        *,
        cache: BlockCache | None = None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise SpecError(
                f"dtype '{dtype}' of {files.uri(0)}: it must be one of {', '.join(DTYPES)}"
            )
        self.files = files
        self.name = f"ids-{files.digest}-{dtype or 'npy'}-{end_token}"
        self._heads = [_head(files, n, dtype) for n in range(len(files))]
        lengths = [
            (files.sizes[n] - start) // kind.itemsize for n, (start, kind) in enumerate(self._heads)
        ]
        self._parts = Parts(lengths)
        ends: NDArray[np.int64] = np.unique(self._parts.starts)
        if end_token is not None:
            folder = (cache or BlockCache()).once(
                f"ends-{self.name}", lambda into: self._scan(into, end_token)
            )
            ends = np.load(folder / ENDS, mmap_mode="r")
        # an empty file is no document
        self.ends: NDArray[np.int64] = ends[np.searchsorted(ends, 0, side="right") :]

    def read(self, start: int, stop: int) -> Tokens:
        found = np.zeros(stop - start, dtype=np.int64)
        at = 0
        for n, first, until in self._parts.pieces(start, stop):
            head, kind = self._heads[n]
            size = kind.itemsize
            data = self.files.read(n, head + first * size, (until - first) * size)
            found[at : at + until - first] = np.frombuffer(data, dtype=kind)
            at += until - first
        return found

    def _scan(self, into: Path, end_token: int) -> None:
        found, total = [self._parts.starts[1:]], int(self._parts.starts[-1])
        for start in range(0, total, CHUNK_BYTES):
            ids = self.read(start, min(total, start + CHUNK_BYTES))
            found.append(np.flatnonzero(ids == end_token).astype(np.int64) + start + 1)
            gets_on()
        np.save(into / ENDS, np.unique(np.concatenate(found)))


def _head(files: Files, n: int, dtype: str | None) -> tuple[int, np.dtype[Any]]:
    """Where the tokens begin, and what they are."""
    uri = files.uri(n)
    if files.names[n].endswith(".npy"):
        start, kind = _npy_head(files, n)
        if dtype is not None and kind != np.dtype(dtype):
            raise SpecError(
                f"{uri}: its tokens are {kind}, dtype says {dtype}; leave dtype out for .npy files"
            )
        if kind.kind not in "ui":
            raise SpecError(
                f"{uri}: it holds {kind}; token ids must be whole numbers ({', '.join(DTYPES)})"
            )
    elif dtype is None:
        raise SpecError(
            f"{uri}: a raw token file does not say what it holds; give dtype (often uint16)"
        )
    else:
        start, kind = 0, np.dtype(dtype)
    if (files.sizes[n] - start) % kind.itemsize:
        raise SpecError(
            f"{uri}: {files.sizes[n] - start} bytes are no whole number of {kind} tokens of "
            f"{kind.itemsize}"
        )
    return start, kind


def _npy_head(files: Files, n: int) -> tuple[int, np.dtype[Any]]:
    head = io.BytesIO(files.read(n, 0, 4096))
    try:
        version = np.lib.format.read_magic(head)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, by_column, kind = read(head)
    except ValueError as error:
        raise SpecError(f"{files.uri(n)}: no .npy file ({error})") from error
    if by_column and len(shape) > 1:
        raise SpecError(
            f"{files.uri(n)}: an array {list(shape)} stored column by column; save it with "
            "numpy.ascontiguousarray"
        )
    if int(np.prod(shape)) * kind.itemsize != files.sizes[n] - head.tell():
        raise SpecError(
            f"{files.uri(n)}: its head says {list(shape)} of {kind}, the file has "
            f"{files.sizes[n]} bytes: cut off?"
        )
    return head.tell(), kind


# ----------------------------------------------------------------------------------- tokenized once


class Tokenizer(Protocol):
    """`digest`: of all that the ids depend on."""

    digest: str
    vocab_size: int

    def problem(self, text: Any) -> str:
        """Why `text` cannot be encoded; '' = it can."""
        ...

    def encode(self, texts: Sequence[Any]) -> list[Any]:
        """The ids of each text, with that of the end of a document behind."""
        ...


def id_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest that holds its ids."""
    vocab = tokenizer.vocab_size
    return np.dtype("uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32")


class Texts(Protocol):
    """Texts in a fixed order. `where`: the place of one of them, for errors."""

    @property
    def digest(self) -> str: ...

    def texts(self, name: str) -> Iterable[Any]: ...

    def where(self, index: int) -> str: ...


class Tokenized:
    """Documents as tokens: written once per node, for these documents and this tokenizer, then read
    by ranges."""

    def __init__(
        self, documents: Texts, field: str, tokenizer: Tokenizer, *, cache: BlockCache | None = None
    ) -> None:
        self.documents, self.field, self.tokenizer = documents, field, tokenizer
        key = hashlib.sha256(
            f"{documents.digest}|{field}|{tokenizer.digest}|{VERSION}".encode()
        ).hexdigest()
        self.name = f"tokens-{key[:32]}"
        folder = (cache or BlockCache()).once(self.name, self._write)
        self.meta = json.loads((folder / META).read_text())
        self.ends: NDArray[np.int64] = np.load(folder / ENDS, mmap_mode="r")
        n = int(self.meta["tokens"])
        self._ids = (
            np.memmap(folder / TOKENS, dtype=self.meta["dtype"], mode="r", shape=(n,))
            if n
            else np.zeros(0, np.uint8)
        )

    def read(self, start: int, stop: int) -> Tokens:
        return np.asarray(self._ids[start:stop]).astype(np.int64)

    def _write(self, into: Path) -> None:
        kind = id_type(self.tokenizer)
        ends, at = list[int](), 0
        waiting: list[Any] = []
        with (into / TOKENS).open("wb") as file:

            def write() -> None:
                nonlocal at
                for ids in self.tokenizer.encode(waiting):
                    file.write(np.asarray(ids, dtype=kind).tobytes())
                    at += len(ids)
                    ends.append(at)
                waiting.clear()
                gets_on()

            for n, text in enumerate(self.documents.texts(self.field)):
                if problem := self.tokenizer.problem(text):
                    raise SpecError(f"{self.documents.where(n)}, field '{self.field}': {problem}")
                waiting.append(text)
                if len(waiting) == AT_ONCE:
                    write()
            write()
            file.flush()
            os.fsync(file.fileno())
        kept = np.unique(np.asarray(ends, dtype=np.int64))
        np.save(into / ENDS, kept[kept > 0])
        (into / META).write_text(
            json.dumps({"tokens": at, "dtype": str(kind), "documents": len(ends)})
        )
