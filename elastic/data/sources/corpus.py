"""Text as one long row of tokens, with the places where documents end. Nothing of it is kept in
memory but those places."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elastic.data.progress import gets_on
from elastic.data.sources.array_file import ArrayWriter
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.files import CHUNK_BYTES, Files
from elastic.errors import SpecError

LOG = logging.getLogger(__name__)
Tokens = NDArray[np.int64]
DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64", "uint64")
VERSION = 1
META, TOKENS, ENDS, HEADS = "meta.json", "tokens.bin", "ends.npy", "heads.npy"
HEAD = np.dtype([("start", "i8"), ("kind", "U3"), ("tokens", "i8")])  # of a token file
AT_ONCE = 100  # documents that are tokenized in one call: 1000 whole files took 700 MB


class Corpus(Protocol):
    """`ends`: int64 [documents], where each document ends (exclusive), rising; the last one is
    `n_tokens`. `name`: equal ones have equal tokens."""

    name: str
    n_tokens: int

    @property
    def ends(self) -> NDArray[np.int64]: ...

    def read(self, start: int, stop: int) -> Tokens:
        """int64 [stop - start]"""
        ...


class Parts:
    """Which piece of which file: `starts` [files + 1] in tokens."""

    def __init__(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
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
        inside, self.n_tokens = self._parts.starts[1:], total
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
        self.files, self._end_token = files, end_token
        self._cache = cache or BlockCache()
        self.name = f"ids-{files.digest}-{dtype or 'npy'}-{end_token}"
        self._heads = self._found(dtype)
        self._parts = Parts(self._heads["tokens"])
        self.n_tokens = int(self._parts.starts[-1])

    def _found(self, dtype: str | None) -> NDArray[Any]:
        """The head of each file: those of .npy files are read once per node."""

        def heads() -> NDArray[Any]:
            return np.asarray([_head(self.files, n, dtype) for n in range(len(self.files))], HEAD)

        if not any(name.endswith(".npy") for name in self.files.names):
            return heads()
        name = f"heads-{self.files.digest}-{dtype or 'npy'}"
        folder = self._cache.once(name, lambda into: np.save(into / HEADS, heads()))
        found: NDArray[Any] = np.load(folder / HEADS, mmap_mode="r")
        return found

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Found in one pass over all tokens, once per node, where a token says it."""
        found: NDArray[np.int64] = np.unique(self._parts.starts)
        if self._end_token is not None:
            folder = self._cache.once(f"ends-{self.name}", self._scan)
            found = np.load(folder / ENDS, mmap_mode="r")
        # an empty file is no document
        return found[np.searchsorted(found, 0, side="right") :]

    def read(self, start: int, stop: int) -> Tokens:
        found = np.zeros(stop - start, dtype=np.int64)
        at = 0
        for n, first, until in self._parts.pieces(start, stop):
            head, kind = int(self._heads["start"][n]), np.dtype(self._heads["kind"][n])
            size = kind.itemsize
            data = self.files.read(n, head + first * size, (until - first) * size)
            found[at : at + until - first] = np.frombuffer(data, dtype=kind)
            at += until - first
        return found

    def _scan(self, into: Path) -> None:
        ends = self._parts.starts[1:]
        with ArrayWriter(into / ENDS) as out:
            for start in range(0, self.n_tokens, CHUNK_BYTES):
                stop = min(self.n_tokens, start + CHUNK_BYTES)
                at = np.flatnonzero(self.read(start, stop) == self._end_token) + start + 1
                out.add(np.union1d(at, ends[(ends > start) & (ends <= stop)]))
                gets_on()


def _head(files: Files, n: int, dtype: str | None) -> tuple[int, str, int]:
    """Where the tokens begin, what they are, and how many."""
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
    count, rest = divmod(files.sizes[n] - start, kind.itemsize)
    if rest:
        raise SpecError(
            f"{uri}: {files.sizes[n] - start} bytes are no whole number of {kind} tokens of "
            f"{kind.itemsize}"
        )
    return start, kind.str, count


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
        self.n_tokens = n = int(self.meta["tokens"])
        self._ids = (
            np.memmap(folder / TOKENS, dtype=self.meta["dtype"], mode="r", shape=(n,))
            if n
            else np.zeros(0, np.uint8)
        )

    def read(self, start: int, stop: int) -> Tokens:
        return np.asarray(self._ids[start:stop]).astype(np.int64)

    def _write(self, into: Path) -> None:
        kind = id_type(self.tokenizer)
        at = 0
        with (into / TOKENS).open("wb") as file, ArrayWriter(into / ENDS) as out:
            for texts in self._some():
                ends = list[int]()
                for ids in self.tokenizer.encode(texts):
                    file.write(np.asarray(ids, dtype=kind).tobytes())
                    at += len(ids)
                    if len(ids):
                        ends.append(at)
                out.add(ends)
                gets_on()
            file.flush()
            os.fsync(file.fileno())
        (into / META).write_text(json.dumps({"tokens": at, "dtype": str(kind)}))

    def _some(self) -> Iterator[list[Any]]:
        """The texts, AT_ONCE of them."""
        waiting: list[Any] = []
        for n, text in enumerate(self.documents.texts(self.field)):
            if problem := self.tokenizer.problem(text):
                raise SpecError(f"{self.documents.where(n)}, field '{self.field}': {problem}")
            waiting.append(text)
            if len(waiting) == AT_ONCE:
                yield waiting
                waiting = []
        yield waiting
