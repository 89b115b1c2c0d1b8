"""A .npy file of integers that is written piece by piece: they need not fit into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike


class ArrayWriter:
    """int64 [rows, *width]: as `numpy.save` of all that was added writes it, once it is closed."""

    def __init__(self, path: Path, *width: int) -> None:
        self._file, self._width, self._rows = path.open("wb"), width, 0
        self._write_head()

    def add(self, rows: ArrayLike) -> None:
        """Behind what is there: [rows, *width]"""
        values = np.ascontiguousarray(rows, dtype=np.int64)
        self._file.write(values.data)
        self._rows += len(values)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_head()

    def _write_head(self) -> None:
        """Of one length whatever the number of rows: NumPy leaves room for it to grow."""
        kind = np.dtype(np.int64).str
        what = {"descr": kind, "fortran_order": False, "shape": (self._rows, *self._width)}
        np.lib.format.write_array_header_1_0(self._file, what)
