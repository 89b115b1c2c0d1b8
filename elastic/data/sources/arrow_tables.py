"""Records of Parquet files and of datasets saved by Hugging Face `datasets`.

Decoded in pieces (row groups, batches); which rows are in which piece is found once per node.
pyarrow is imported when a file is opened.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from elastic.data.progress import gets_on
from elastic.data.sources.block_cache import BlockCache
from elastic.data.sources.files import Files, files_at
from elastic.data.sources.records import IndexArray, Record, Records
from elastic.errors import ElasticError, SpecError, is_of_node

KEPT_BYTES = 256 << 20  # of decoded row groups or batches, the last used ones; one may be larger
FILES_KEPT = 8  # open at once


class _Tables(Records):
    """Records in pieces of files: `_find` finds them, `_piece` decodes one.

    Decoded pieces are kept up to KEPT_BYTES; `n_decoded` counts how many were decoded for single
    records.
    """

    form = pieces = ""  # of a file, for errors; of its pieces, for the index

    def __init__(self, files: Files, cache: BlockCache | None = None) -> None:
        super().__init__(files, cache)
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._kept: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()
        self._kept_bytes = 0
        self.n_decoded = 0

    @cached_property
    def index(self) -> IndexArray:
        """int64 [pieces, 4]: file, its first piece, place in it, rows."""
        return self.built(self.pieces, self._find, 4)

    @cached_property
    def _starts(self) -> IndexArray:
        """int64 [pieces + 1]: first row of each."""
        return np.concatenate(([0], np.cumsum(self.index[:, 3])))

    def _piece_of(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        return self.pick(index, self.columns)

    def pick(self, index: int, names: Sequence[str]) -> Record:
        piece = self._piece_of(index)
        table = self._decoded(piece, tuple(name for name in self.columns if name in names))
        row = index - int(self._starts[piece])
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
        for n in range(int(self.index[self._piece_of(0), 0]), len(self.files)):
            missing = [name for name in names if name not in found]
            if not missing:
                break
            schema = self._schema(n)
            for name in missing:
                at = schema.get_field_index(name)
                if at >= 0 and (kind := _kind_of(schema.field(at).type)):
                    found[name] = np.dtype(kind)
        return found

    def texts(self, name: str) -> Iterator[Any]:
        if name not in self.columns:
            raise SpecError(
                f"{self.files.uri(0)}: no column '{name}'; it has {', '.join(self.columns)}"
            )
        for piece in range(len(self.index)):
            yield from self._piece(piece, (name,)).column(name).to_pylist()

    @cached_property
    def columns(self) -> Sequence[str]:
        """Those of the first file."""
        return tuple(self._schema(0).names)

    def where(self, index: int) -> str:
        n, first, *_ = (int(value) for value in self.index[self._piece_of(index)])
        return f"{self.files.uri(n)}, row {index - int(self._starts[first]) + 1}"

    def _file(self, n: int) -> Any:
        """Open; of those, the last used ones are kept."""
        file = self._open.get(n)
        if file is None:
            with self._whole(n):
                file = self._open[n] = self._opened(n)
            if len(self._open) > FILES_KEPT:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(n)
        return file

    @contextmanager
    def _whole(self, n: int) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowInvalid, OSError) as error:
            if isinstance(error, ElasticError) or is_of_node(error):
                raise
            raise SpecError(
                f"{self.files.uri(n)}: no whole {self.form} ({_line(error)})"
            ) from error

    def _opened(self, n: int) -> Any:
        raise NotImplementedError

    def _schema(self, n: int) -> Any:
        raise NotImplementedError

    def _find(self) -> Iterable[Any]:
        """The rows of `index`, file by file."""
        raise NotImplementedError

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        raise NotImplementedError


class Parquet(_Tables):
    """Rows of Parquet files as they are found; of a row group, the wanted columns are decoded as a
    whole."""

    form, pieces = "Parquet file", "groups"

    def __init__(
        self, where: str | Path, cache: BlockCache | None = None, pattern: str = "**/*.parquet"
    ) -> None:
        super().__init__(files_at(where, pattern, cache), cache)

    def _opened(self, n: int) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.files.opened(n))

    def _schema(self, n: int) -> Any:
        return self._file(n).metadata.schema.to_arrow_schema()

    def _find(self) -> Iterator[list[tuple[int, ...]]]:
        first = 0
        for n in range(len(self.files)):
            meta = self._file(n).metadata
            groups = range(meta.num_row_groups)
            yield [(n, first, group, meta.row_group(group).num_rows) for group in groups]
            first += len(groups)
            gets_on()

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        n, _, group, _ = (int(value) for value in self.index[piece])
        return self._file(n).read_row_group(group, columns=list(names))


@dataclass(frozen=True)
class _Stream:
    """An Arrow stream that is open."""

    source: Any
    schema: Any

    def close(self) -> None:
        self.source.close()


class HuggingFace(_Tables):
    """A folder that `Dataset.save_to_disk` (or DatasetDict's; then `split` says which) has written:
    Arrow streams.

    The library `datasets` is not needed.
    """

    form, pieces = "Arrow stream", "batches"

    def __init__(
        self, where: str | Path, split: str | None = None, cache: BlockCache | None = None
    ) -> None:
        super().__init__(_saved_files(str(where), split, cache), cache)

    def _opened(self, n: int) -> _Stream:
        import pyarrow.ipc

        local = self.files.root is not None
        source = (
            pyarrow.memory_map(self.files.uri(n))
            if local
            else pyarrow.PythonFile(self.files.opened(n))
        )
        return _Stream(source, pyarrow.ipc.open_stream(source).schema)

    def _schema(self, n: int) -> Any:
        return self._file(n).schema

    def _find(self) -> Iterator[list[tuple[int, ...]]]:
        import pyarrow.ipc

        first = 0
        for n in range(len(self.files)):
            source, found = self._file(n).source, list[tuple[int, ...]]()
            with self._whole(n), suppress(StopIteration):
                source.seek(0)
                reader = pyarrow.ipc.open_stream(source)
                while True:
                    at = source.tell()
                    found.append((n, first, at, reader.read_next_batch().num_rows))
            yield found
            first += len(found)
            gets_on()

    def _piece(self, piece: int, names: Sequence[str]) -> Any:
        import pyarrow.ipc

        n, _, at, _ = (int(value) for value in self.index[piece])
        file = self._file(n)
        file.source.seek(at)
        message = pyarrow.ipc.read_message(file.source)
        return pyarrow.ipc.read_record_batch(message, file.schema).select(list(names))


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


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


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
