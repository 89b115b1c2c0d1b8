"""metrics.csv of a run that is going on: a line for each step that counts, none twice, whatever
was undone or resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.observe.metrics.step_rows import COLUMNS, Row, columns_of, read_rows, text_of
from elastic.storage import LocalStorage

CSV = "metrics.csv"


class MetricsCsv:
    """`known`: the table was there. `last`: its newest row. Raises OSError where the file cannot be
    written."""

    def __init__(self, folder: Path) -> None:
        self.last: Row | None = None
        self._storage = LocalStorage(folder)
        self._path = folder / CSV
        try:
            rows, self.known = self._read(), True
        except (FileNotFoundError, ValueError):
            rows, self.known = [], False
        self._columns = list(COLUMNS)
        self._write(rows)  # a torn last line is gone

    def add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        if set(columns_of(rows)) - set(self._columns):
            self._write([*self._read(), *rows])
            return
        with self._path.open("a") as file:
            file.write(text_of(rows, self._columns, head=False))
        self.last = rows[-1]

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds to the row of a step what was evaluated there."""
        rows = self._read()
        self._write([{**one, **metrics} if one["step"] == step else one for one in rows])

    def cut(self, step: int) -> None:
        """What came after this step was undone."""
        if self.last is not None and self.last["step"] > step:
            self._write([one for one in self._read() if one["step"] <= step])

    def _read(self) -> list[Row]:
        return read_rows(self._path.read_text())

    def _write(self, rows: Sequence[Row]) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *columns_of(rows)]))
        self.last = rows[-1] if rows else None
        self._storage.put(CSV, text_of(rows, self._columns).encode())
