"""Rows of numbers in Parquet files with an index: written once, then read by sample id, a small row
group at a time.

<folder>/index.json        version, rows, columns (dtype and shape of a row), files with their rows;
                           written last
<folder>/part-00000.parquet

pyarrow is imported when a file is written or read.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.sources.ranged_file import Ranged
from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.types import DTYPE_BYTES

INDEX, VERSION = "index.json", 1
GROUP_BYTES = 128 << 10  # of a row group: what one sample reads at most (one row at least)
FILE_BYTES = 64 << 20
GROUPS_KEPT, FILES_KEPT = 32, 32  # in memory, newest first
DTYPES = tuple(name for name in DTYPE_BYTES if name != "bfloat16")  # NumPy has none

Array = NDArray[Any]


@dataclass(frozen=True)
class ParquetColumn:
    """Of each row: an array of this shape; () = a number."""

    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class ParquetPart:
    """A file. All its row groups have `rows_per_group` rows, the last one what is left."""

    name: str
    rows: int
    rows_per_group: int


@dataclass(frozen=True)
class Index:
    rows: int
    columns: dict[str, ParquetColumn]
    files: tuple[ParquetPart, ...]


# --------------------------------------------------------------------------------------------- read


class Rows:
    """Map-style: `len()`, and `[i]` -> {column: array of one row}. Raises SpecError where there is
    no whole index."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.index = storage, read_index(storage)
        self._starts = [0, *accumulate(part.rows for part in self.index.files)]
        self._files: OrderedDict[int, Any] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], dict[str, Array]] = OrderedDict()

    def __len__(self) -> int:
        return self.index.rows

    def length(self, index: int) -> int:
        """First dimension of the first column that has one; all rows are equal."""
        return next((column.shape[0] for column in self.index.columns.values() if column.shape), 1)

    def __getitem__(self, index: int) -> dict[str, Array]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        n = bisect_right(self._starts, index) - 1
        group, row = divmod(index - self._starts[n], self.index.files[n].rows_per_group)
        rows = self._group(n, group)
        return {name: values[row] for name, values in rows.items()}

    def _group(self, n: int, group: int) -> dict[str, Array]:
        """Columns of a row group, [rows, *shape]."""
        known = self._groups.get((n, group))
        if known is None:
            table = self._file(n).read_row_group(group)
            known = {
                name: _array(table.column(name), column)
                for name, column in self.index.columns.items()
            }
            self._groups[n, group] = known
            if len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)
        return known

    def _file(self, n: int) -> Any:
        import pyarrow.parquet

        file = self._files.get(n)
        if file is None:
            key = self.index.files[n].name
            source = Ranged(partial(self.storage.read_into, key), self.storage.size(key))
            file = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
            self._files[n] = file
            if len(self._files) > FILES_KEPT:
                self._files.popitem(last=False)
        return file


def read_index(storage: Storage) -> Index:
    """Raises SpecError where it is missing or not readable."""
    try:
        raw = json.loads(storage.get(INDEX))
        if raw["version"] != VERSION:
            raise ValueError(f"version {raw['version']} is not known")
        columns = {
            name: ParquetColumn(c["dtype"], tuple(c["shape"])) for name, c in raw["columns"].items()
        }
        return Index(int(raw["rows"]), columns, tuple(ParquetPart(**part) for part in raw["files"]))
    except FileNotFoundError as error:
        raise SpecError(
            f"{storage.uri}: no {INDEX} there: these are no rows that were written for a run"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{storage.uri_of(INDEX)}: not readable ({type(error).__name__}: {error})"
        ) from error


def _array(values: Any, column: ParquetColumn) -> Array:
    flat = values.combine_chunks()
    if column.shape:
        flat = flat.flatten() if hasattr(flat, "flatten") else flat
    found: Array = flat.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False)
    return found.reshape(-1, *column.shape)


# -------------------------------------------------------------------------------------------- write


def write_rows(storage: Storage, batches: Iterable[Mapping[str, Any]], what: str) -> Index:
    """Writes batches (column -> array [rows, *shape], equal columns in all) in their order; the
    index is written last.

    Raises SpecError that begins with `what` and names the column that is no tensor of one dtype and
    shape.
    """
    columns: dict[str, ParquetColumn] = {}
    parts: list[ParquetPart] = []
    waiting: list[dict[str, Array]] = []
    for batch in batches:
        arrays = {
            name: _checked(values, f"{what}: column '{name}'") for name, values in batch.items()
        }
        found = {
            name: ParquetColumn(str(values.dtype), values.shape[1:])
            for name, values in arrays.items()
        }
        columns = columns or found
        _check_equal(columns, found, what)
        waiting.append(arrays)
        if sum(values.nbytes for rows in waiting for values in rows.values()) >= FILE_BYTES:
            parts.append(_write_part(storage, len(parts), columns, batches=waiting))
            waiting = []
    if waiting:
        parts.append(_write_part(storage, len(parts), columns, batches=waiting))
    index = Index(sum(part.rows for part in parts), columns, tuple(parts))
    if not index.rows:
        raise SpecError(f"{what}: it has no rows; nothing to train on")
    storage.put(INDEX, json.dumps({"version": VERSION, **asdict(index)}, indent=1).encode())
    return index


def _checked(values: Any, what: str) -> Array:
    """As an array of a dtype that can become a tensor."""
    found: Array = np.asarray(values)
    if found.dtype == object:
        rows = [np.asarray(row) for row in found]
        shapes = list(dict.fromkeys(str(list(row.shape)) for row in rows))
        if len(shapes) > 1:
            raise SpecError(
                f"{what} has rows of different shapes ({shapes[0]} and {shapes[1]}); pad or cut "
                "them to one"
            )
        found = np.stack(rows) if rows else found
    if str(found.dtype) not in DTYPES:
        kind = "text" if found.dtype.kind in "OUS" else f"dtype {found.dtype}"
        raise SpecError(
            f"{what} holds {kind}; a sample is made of numbers and tensors ({', '.join(DTYPES)}): "
            "map or drop it"
        )
    return found


def _check_equal(
    columns: Mapping[str, ParquetColumn], found: Mapping[str, ParquetColumn], what: str
) -> None:
    for name in {**columns, **found}:
        one, two = columns.get(name), found.get(name)
        if one != two:
            shown = [f"{c.dtype} {list(c.shape)}" if c else "nothing" for c in (one, two)]
            raise SpecError(
                f"{what}: column '{name}' is {shown[0]} in some rows, {shown[1]} in others "
                "(missing values?)"
            )


def _write_part(
    storage: Storage,
    n: int,
    columns: Mapping[str, ParquetColumn],
    *,
    batches: list[dict[str, Array]],
) -> ParquetPart:
    import pyarrow
    import pyarrow.parquet

    row_bytes = max(1, sum(column.row_bytes for column in columns.values()))
    rows_per_group = max(1, GROUP_BYTES // row_bytes)
    table = pyarrow.table(
        {name: _arrow([rows[name] for rows in batches], column) for name, column in columns.items()}
    )
    out = io.BytesIO()
    pyarrow.parquet.write_table(
        table,
        out,
        row_group_size=rows_per_group,
        use_dictionary=False,
        write_page_checksum=True,
        compression="zstd",
    )
    name = f"part-{n:05d}.parquet"
    storage.put(name, out.getvalue())
    return ParquetPart(name, table.num_rows, rows_per_group)


def _arrow(parts: list[Array], column: ParquetColumn) -> Any:
    import pyarrow

    values = np.concatenate(parts)
    flat = pyarrow.array(values.reshape(-1))
    return (
        pyarrow.FixedSizeListArray.from_arrays(flat, prod(column.shape)) if column.shape else flat
    )


def with_rows(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Leaves out batches without rows: some readers give one for each empty file."""
    return (batch for batch in batches if len(next(iter(batch.values()), ())))
