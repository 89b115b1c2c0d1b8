"""Records (a name -> value mapping each) by number: JSON lines, Parquet files, datasets saved by
Hugging Face `datasets`.

Read when they are requested; what is kept is where they begin. pyarrow is imported when a Parquet
or Arrow file is opened.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.files import Files, files_at
from elastic.errors import SpecError

KEPT_BYTES = 256 << 20  # of decoded row groups or batches, the last used ones; one may be larger
FILES_KEPT = 8  # open at once
NUMBERS = "biuf"  # kinds of dtypes
KINDS = ("bool", "int64", "uint64", "float64")  # of what JSON holds
NOT_INT64 = re.compile(rb"[0-9][.eE]|[0-9]{19}|NaN|Infinity")  # a line without has no such number
INDEX = "index.npy"
PACKED = (".gz", ".zst", ".bz2", ".xz")
Record = Mapping[str, Any]


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

    def built(self, name: str, build: Any) -> NDArray[np.int64]:
        """An index that is made once per node and of these very files."""

        def write(into: Path) -> None:
            np.save(into / INDEX, build())

        folder = (self._cache or BlockCache()).once(f"{name}-{self.digest}", write)
        found: NDArray[np.int64] = np.load(folder / INDEX, mmap_mode="r")
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
        self._lines: NDArray[np.int64] | None = None

    @property
    def lines(self) -> NDArray[np.int64]:
        """int64 [records, 3]: file, first byte, last byte + 1."""
        if self._lines is None:
            self._lines = self.built("lines", self._find)
        return self._lines

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

        def build() -> NDArray[np.int64]:
            found = self._all_kinds(names)
            return np.asarray([KINDS.index(str(found[n])) if n in found else -1 for n in names])

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

    def _find(self) -> NDArray[np.int64]:
        found = [self._find_in(n) for n in range(len(self.files))]
        return np.concatenate(found) if found else np.zeros((0, 3), dtype=np.int64)

    def _find_in(self, n: int) -> NDArray[np.int64]:
        at, ends = 0, []
        for chunk in self.files.chunks(n):
            ends.append(
                np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")).astype(np.int64)
                + at
            )
            at += len(chunk)
        stops = np.concatenate([*ends, [at]]).astype(np.int64)
        starts = np.concatenate(([0], stops[:-1] + 1))
        short = np.flatnonzero(stops - starts < 8)  # perhaps only blanks
        keep = np.ones(len(stops), dtype=bool)
        for i in short:
            keep[i] = bool(self.files.read(n, int(starts[i]), int(stops[i] - starts[i])).strip())
        return np.stack([np.full(len(stops), n), starts, stops], axis=1)[keep]


# ------------------------------------------------------------------------------------------- tables


class _Tables(Records):
    """Records in pieces (row groups, batches) of files; `_rows` [pieces] of each, `_piece` decodes
    one.

    Decoded pieces are kept up to KEPT_BYTES; `n_decoded` counts how many were decoded for single
    records.
    """

    def __init__(self, files: Files, cache: BlockCache | None = None) -> None:
        super().__init__(files, cache)
        self._rows: Sequence[int] = ()
        self._starts: list[int] = [0]
        self._kept: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()
        self._kept_bytes = 0
        self.n_decoded = 0

    def _counted(self, rows: Sequence[int]) -> None:
        self._rows, self._starts = rows, [0, *accumulate(rows)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        return self.pick(index, self.columns)

    def pick(self, index: int, names: Sequence[str]) -> Record:
        piece = bisect_right(self._starts, index) - 1
        table = self._decoded(piece, tuple(name for name in self.columns if name in names))
        row = index - self._starts[piece]
        return {name: table.column(i)[row].as_py() for i, name in enumerate(table.schema.names)}

    def _decoded(self, piece: int, names: tuple[str, ...]) -> Any:
        """These columns of a piece, from memory where they were used lately."""
        table = self._kept.get((piece, names))
        if table is None:
            table = self._kept[piece, names] = self._piece(piece, names)
            self.n_decoded += 1
            self._kept_bytes += table.nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end((piece, names))
        return table

    def kinds(self, names: Sequence[str]) -> dict[str, np.dtype[Any]]:
        """As the first file that has records says; a later one where it has no type of numbers."""
        found = super().kinds(names)
        first = self._place(bisect_right(self._starts, 0) - 1)[0]
        for schema in islice(self._schemas_of_all(), first, None):
            missing = [name for name in names if name not in found]
            if not missing:
                break
            for name in missing:
                at = schema.get_field_index(name)
                if at >= 0 and (kind := _kind_of(schema.field(at).type)):
                    found[name] = np.dtype(kind)
        return found

    def _schemas_of_all(self) -> Iterable[Any]:
        """Of all files."""
        raise NotImplementedError

    def texts(self, name: str) -> Iterator[Any]:
        if name not in self.columns:
            raise SpecError(
                f"{self.files.uri(0)}: no column '{name}'; it has {', '.join(self.columns)}"
            )
        for piece in range(len(self._rows)):
            yield from self._piece(piece, (name,)).column(name).to_pylist()

    @property
    def columns(self) -> Sequence[str]:
        raise NotImplementedError

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        raise NotImplementedError

    def _place(self, piece: int) -> tuple[int, int]:
        """File of a piece, and the first piece of that file."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        n, first = self._place(bisect_right(self._starts, index) - 1)
        return f"{self.files.uri(n)}, row {index - self._starts[first] + 1}"


class Parquet(_Tables):
    """Rows of Parquet files as they are found; of a row group, the wanted columns are decoded as a
    whole."""

    def __init__(
        self, where: str | Path, cache: BlockCache | None = None, pattern: str = "**/*.parquet"
    ) -> None:
        super().__init__(files_at(where, pattern, cache), cache)
        self._open: OrderedDict[int, Any] = OrderedDict()
        groups = [self._file(n).metadata for n in range(len(self.files))]
        self._groups = [
            (n, group) for n, meta in enumerate(groups) for group in range(meta.num_row_groups)
        ]
        self._counted([groups[n].row_group(group).num_rows for n, group in self._groups])
        self._columns = tuple(self._file(0).schema_arrow.names)
        self._schemas = [meta.schema.to_arrow_schema() for meta in groups]

    @property
    def columns(self) -> Sequence[str]:
        return self._columns

    def _schemas_of_all(self) -> Iterable[Any]:
        return self._schemas

    def _file(self, n: int) -> Any:
        import pyarrow
        import pyarrow.parquet

        file = self._open.get(n)
        if file is None:
            try:
                file = pyarrow.parquet.ParquetFile(self.files.opened(n))
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise SpecError(
                    f"{self.files.uri(n)}: no whole Parquet file ({_line(error)})"
                ) from error
            self._open[n] = file
            if len(self._open) > FILES_KEPT:
                self._open.popitem(last=False)
        return file

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        n, group = self._groups[piece]
        return self._file(n).read_row_group(group, columns=list(names))

    def _place(self, piece: int) -> tuple[int, int]:
        n, group = self._groups[piece]
        return n, piece - group


class HuggingFace(_Tables):
    """A folder that `Dataset.save_to_disk` (or DatasetDict's; then `split` says which) has written:
    Arrow streams.

    The library `datasets` is not needed.
    """

    def __init__(
        self, where: str | Path, split: str | None = None, cache: BlockCache | None = None
    ) -> None:
        files = _saved_files(str(where), split, cache)
        super().__init__(files, cache)
        self._sources: dict[int, Any] = {}
        self._schemas: dict[int, Any] = {}
        # int64 [batches, 4]: file, its first batch, first byte, rows
        self.batches = self.built("batches", self._find)
        self._counted([int(rows) for rows in self.batches[:, 3]])

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self._schema(0).names)

    def _schemas_of_all(self) -> Iterable[Any]:
        return (self._schema(n) for n in range(len(self.files)))

    def _source(self, n: int) -> Any:
        import pyarrow

        if n not in self._sources:
            local = self.files.root is not None
            self._sources[n] = (
                pyarrow.memory_map(self.files.uri(n))
                if local
                else pyarrow.PythonFile(self.files.opened(n))
            )
        return self._sources[n]

    def _schema(self, n: int) -> Any:
        import pyarrow.ipc

        if n not in self._schemas:
            self._source(n).seek(0)
            self._schemas[n] = pyarrow.ipc.open_stream(self._source(n)).schema
        return self._schemas[n]

    def _find(self) -> NDArray[np.int64]:
        import pyarrow
        import pyarrow.ipc

        found: list[tuple[int, int, int, int]] = []
        for n in range(len(self.files)):
            first, source = len(found), self._source(n)
            try:
                source.seek(0)
                reader = pyarrow.ipc.open_stream(source)
                while True:
                    at = source.tell()
                    found.append((n, first, at, reader.read_next_batch().num_rows))
            except StopIteration:
                pass
            except (pyarrow.ArrowInvalid, OSError) as error:
                raise SpecError(
                    f"{self.files.uri(n)}: no whole Arrow stream ({_line(error)})"
                ) from error
        return np.asarray(found, dtype=np.int64).reshape(-1, 4)

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        import pyarrow.ipc

        n, _, at, _ = (int(value) for value in self.batches[piece])
        schema, source = self._schema(n), self._source(n)
        source.seek(at)
        batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(source), schema)
        return batch.select(list(names))

    def _place(self, piece: int) -> tuple[int, int]:
        return int(self.batches[piece, 0]), int(self.batches[piece, 1])


def _saved_files(where: str, split: str | None, cache: BlockCache | None) -> Files:
    """The Arrow files of a saved dataset, in its order. Raises SpecError where it is none."""
    where = where.rstrip("/")
    found = files_at(where, "**/{dataset_dict.json,state.json}", cache)
    if "dataset_dict.json" in found.names:
        splits = json.loads(_whole(found, "dataset_dict.json"))["splits"]
        if split not in splits:
            said = f"no split '{split}'" if split else "it has several splits: give split"
            raise SpecError(f"{where}: {said}; there are {', '.join(splits)}")
        return _saved_files(f"{where}/{split}", None, cache)
    if split is not None:
        raise SpecError(
            f"{where}: it has no splits; leave split '{split}' out, or name the folder of "
            "dataset_dict.json"
        )
    if "state.json" not in found.names:
        raise SpecError(
            f"{where}: no state.json there; it must be a folder that Dataset.save_to_disk has "
            "written"
        )
    state = json.loads(_whole(found, "state.json"))
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SpecError(
            f"{where}: it was saved with an index of chosen rows; save dataset.flatten_indices() "
            "instead"
        )
    wanted = [str(file["filename"]) for file in state["_data_files"]]
    files = files_at(where, "*.arrow", cache)
    missing = [name for name in wanted if name not in files.names]
    if missing:
        raise SpecError(
            f"{where}: {missing[0]} is missing ({len(missing)} of {len(wanted)} files of the "
            "dataset)"
        )
    return files.only([files.names.index(name) for name in wanted])


def _whole(files: Files, name: str) -> bytes:
    n = files.names.index(name)
    return files.read(n, 0, files.sizes[n])


def _listed(record: Record) -> str:
    return ", ".join(f"'{name}'" for name in record) or "none"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


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
        self._lengths: NDArray[np.int64] | None = None

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

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [records]"""
        if self._lengths is None:
            self._lengths = self.records.built(
                f"lengths-{hashlib.sha256(self._along.encode()).hexdigest()[:16]}", self._measured
            )
        return self._lengths

    def _measured(self) -> NDArray[np.int64]:
        if not self._along:
            return np.ones(len(self), dtype=np.int64)
        found = (
            len(value) if isinstance(value, list) else 0
            for value in self.records.texts(self._along)
        )
        return np.fromiter(found, dtype=np.int64, count=len(self))

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


def _kind_of(of: Any) -> str:
    """That numpy gives the numbers of such an Arrow column, or of its lists; '' = it has none."""
    from pyarrow import types

    while True:
        if hasattr(of, "storage_type"):
            of = of.storage_type
        elif types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
            of = of.value_type
        else:
            break
    told = (types.is_boolean, "bool"), (types.is_integer, "int64"), (types.is_floating, "float64")
    return next((kind for is_kind, kind in told if is_kind(of)), "")


def _numbers(value: Any) -> NDArray[Any]:
    """As numpy has it; of objects where they are no numbers."""
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.asarray(None)
