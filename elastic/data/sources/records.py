"""Records (a name -> value mapping each) by number, also as samples; JSON lines.

Read when they are requested; what is kept is where they begin.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.sources.array_file import ArrayWriter
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.files import Files, files_at
from elastic.errors import SpecError

NUMBERS = "biuf"  # kinds of dtypes
KINDS = ("bool", "int64", "uint64", "float64")  # of what JSON holds
NOT_INT64 = re.compile(rb"[0-9][.eE]|[0-9]{19}|NaN|Infinity")  # a line without has no such number
INDEX = "index.npy"
PACKED = (".gz", ".zst", ".bz2", ".xz")
MEASURED = 1 << 12  # samples whose lengths are written together
Record = Mapping[str, Any]
IndexArray = NDArray[np.int64]


class Records:
    """Map-style. `texts(name)` reads one field of all of them from the beginning to the end."""

    def __init__(self, files: Files, cache: BlockCache | None = None) -> None:
        self.files, self._cache = files, cache

    @property
    def digest(self) -> str:
        return self.files.digest

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Record:
        raise NotImplementedError

    def pick(self, index: int, names: Sequence[str]) -> Record:
        """These fields of a record, of those that it has; more where that costs nothing."""
        return self[index]

    def texts(self, name: str) -> Iterator[Any]:
        raise NotImplementedError

    def kinds(self, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
        """Of the numbers in these fields, as the first record has them; none for a field whose
        first value tells none."""
        return _with_kinds({}, self.pick(0, names), names)

    def where(self, index: int) -> str:
        """File and row (or line) of a record, counted from 1, for errors."""
        raise NotImplementedError

    def built(self, name: str, build: Callable[[], Iterable[Any]], *width: int) -> IndexArray:
        """An index, int64 [rows, *width], that is made once per node and of these very files;
        `build`: its rows, some at a time."""

        def write(into: Path) -> None:
            with ArrayWriter(into / INDEX, *width) as out:
                for rows in build():
                    out.add(rows)

        folder = (self._cache or BlockCache()).once(f"{name}-{self.digest}", write)
        found: IndexArray = np.load(folder / INDEX, mmap_mode="r")
        return found


# --------------------------------------------------------------------------------------- JSON lines


class Jsonl(Records):
    """One JSON object per line; empty lines are passed over."""

    def __init__(
        self,
        where: str | Path,
        cache: BlockCache | None = None,
        pattern: str = "**/*.{jsonl,ndjson,json}",
    ) -> None:
        super().__init__(files_at(where, pattern, cache), cache)
        for n in range(len(self.files)):
            if self.files.names[n].endswith(PACKED):
                raise SpecError(
                    f"{self.files.uri(n)}: a compressed file has no lines that can be found "
                    "again; unpack it first"
                )

    @cached_property
    def lines(self) -> IndexArray:
        """int64 [records, 3]: file, first byte, last byte + 1."""
        return self.built("lines", self._find, 3)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Record:
        n, start, stop = (int(value) for value in self.lines[index])
        data = self.files.read(n, start, stop - start)
        return self._parsed(data, lambda: self.where(index))

    def texts(self, name: str) -> Iterator[Any]:
        for n in range(len(self.files)):
            for number, line in self._each(n):
                record = self._parsed(
                    line, lambda n=n, number=number: f"{self.files.uri(n)}, line {number}"
                )
                if name not in record:
                    raise SpecError(
                        f"{self.files.uri(n)}, line {number}: no field '{name}'; it has "
                        f"{_listed(record)}"
                    )
                yield record[name]

    def kinds(self, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
        """The one kind that holds the numbers of all records; they are read once per node for
        it."""
        key = hashlib.sha256(json.dumps([*names]).encode()).hexdigest()[:16]

        def build() -> Iterator[list[int]]:
            found = self._all_kinds(names)
            yield [KINDS.index(str(found[n])) if n in found else -1 for n in names]

        numbers = self.built(f"kinds-{key}", build)
        return {n: np.dtype(KINDS[at]) for n, at in zip(names, numbers, strict=True) if at >= 0}

    def _all_kinds(self, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
        found: dict[str, np.dtype[Any]] = {}
        for n in range(len(self.files)):
            for number, line in self._each(n):
                kinds = {str(found.get(name)) for name in names}
                if kinds == {"float64"}:
                    return found  # which holds all others
                if kinds <= {"float64", "int64"} and not NOT_INT64.search(line):
                    continue
                place = f"{self.files.uri(n)}, line {number}"
                found = _with_kinds(found, self._parsed(line, lambda place=place: place), names)
        return found

    def where(self, index: int) -> str:
        n, start, _ = (int(value) for value in self.lines[index])
        before, left = 0, start
        for chunk in self.files.chunks(n):
            before += chunk[:left].count(b"\n")
            left -= len(chunk)
            if left <= 0:
                break
        return f"{self.files.uri(n)}, line {before + 1}"

    def _parsed(self, line: bytes, where: Any) -> Record:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise SpecError(f"{where()}: not JSON: {str(error).split(':')[0].lower()}") from error
        if not isinstance(found, dict):
            raise SpecError(
                f'{where()}: it must be a JSON object such as {{"text": ...}}, not a '
                f"{type(found).__name__}"
            )
        return found

    def _each(self, n: int) -> Iterator[tuple[int, bytes]]:
        """(line number, line) of the lines that are not empty."""
        rest, number = b"", 0
        for chunk in self.files.chunks(n):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                number += 1
                if line.strip():
                    yield number, line
        if rest.strip():
            yield number + 1, rest

    def _find(self) -> Iterator[IndexArray]:
        for n, size in enumerate(self.files.sizes):
            start = at = 0
            for chunk in self.files.chunks(n):
                here = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
                stops = here.astype(np.int64) + at
                at += len(chunk)
                if at == size:  # behind the last newline
                    stops = np.append(stops, at)
                if len(stops):
                    yield self._rows(n, np.append(start, stops[:-1] + 1), stops)
                    start = int(stops[-1]) + 1

    def _rows(self, n: int, starts: IndexArray, stops: IndexArray) -> IndexArray:
        """Of lines of file `n`, those that are not empty."""
        keep = np.ones(len(stops), dtype=bool)
        for i in np.flatnonzero(stops - starts < 8):  # perhaps only blanks
            keep[i] = bool(self.files.read(n, int(starts[i]), int(stops[i] - starts[i])).strip())
        return np.stack([np.full(len(stops), n), starts, stops], axis=1)[keep]


def _listed(record: Record) -> str:
    return ", ".join(f"'{name}'" for name in record) or "none"


# --------------------------------------------------------------------------------------- as samples


class Columns:
    """Records of numbers as samples: {column: array}. A column has one dtype, that of `kinds`.
    Raises SpecError that names the column that is no tensor.

    The length of a sample is that of its first column of lists; all of them are read once per node
    for it.
    """

    def __init__(self, records: Records, columns: Sequence[str] | None = None) -> None:
        self.records = records
        first = records[0] if len(records) else {}
        for name in columns or ():
            if name not in first:
                raise SpecError(f"{records.where(0)}: no field '{name}'; it has {_listed(first)}")
        self.columns = tuple(columns or first)
        self._along = next((name for name in self.columns if isinstance(first.get(name), list)), "")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        record = self.records.pick(index, self.columns)
        found = {name: self._array(record, name, index) for name in self.columns}
        return {name: self._cast(array, name, index) for name, array in found.items()}

    def _cast(self, array: NDArray[Any], name: str, index: int) -> NDArray[Any]:
        """In the dtype of its column, exactly: of whole numbers also those that are stored as
        floats. Raises SpecError that names the number which that cannot hold."""
        kind = self._kinds.get(name, array.dtype)
        if array.dtype == kind or not array.size:
            return array.astype(kind, copy=False)
        with np.errstate(invalid="ignore"):  # NaN, and what is too large
            cast = array.astype(kind)
        for value, held in zip(array.ravel().tolist(), cast.ravel().tolist(), strict=True):
            if value != held:  # Python compares integers with floats exactly
                raise SpecError(
                    f"{self.records.where(index)}: '{name}' is {value!r}, which {kind}, the type "
                    "of this column, cannot hold; cast the column to one type in all files that "
                    "holds it, or give `columns` without it"
                )
        return cast

    def length(self, index: int) -> int:
        return int(self.lengths[index])

    def longest(self) -> tuple[int, str]:
        """Tokens of the longest sample, and where it stands."""
        index = int(np.argmax(self.lengths))
        return self.length(index), self.records.where(index)

    @cached_property
    def lengths(self) -> IndexArray:
        """int64 [records]"""
        along = hashlib.sha256(self._along.encode()).hexdigest()[:16]
        return self.records.built(f"lengths-{along}", self._measured)

    def _measured(self) -> Iterator[IndexArray]:
        if not self._along:
            yield np.ones(len(self), dtype=np.int64)
            return
        found = (
            len(value) if isinstance(value, list) else 0
            for value in self.records.texts(self._along)
        )
        while len(some := np.fromiter(islice(found, MEASURED), dtype=np.int64)):
            yield some

    @cached_property
    def _kinds(self) -> dict[str, np.dtype[Any]]:
        return self.records.kinds(self.columns)

    def _array(self, record: Record, name: str, index: int) -> NDArray[Any]:
        if name not in record:
            raise SpecError(
                f"{self.records.where(index)}: no field '{name}'; it has {_listed(record)}"
            )
        found = _numbers(record[name])
        if found.dtype.kind not in NUMBERS:
            raise SpecError(
                f"{self.records.where(index)}: '{name}' is no number or tensor "
                f"({str(record[name])[:40]!r}); give `columns` "
                "without it, or `text` and a tokenizer"
            )
        return found


def _with_kinds(
    found: Mapping[str, np.dtype[Any]], record: Record, names: Sequence[str]
) -> dict[str, np.dtype[Any]]:
    """The kinds that hold the numbers of this record too."""
    kinds = dict(found)
    for name in names:
        array = _numbers(record.get(name))
        if array.size and array.dtype.kind in NUMBERS:  # an empty list is of floats
            kinds[name] = np.result_type(kinds.get(name, array.dtype), array.dtype)
    return kinds


def _numbers(value: Any) -> NDArray[Any]:
    """As numpy has it; of objects where they are no numbers."""
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.asarray(None)
