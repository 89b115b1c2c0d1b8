"""metrics.csv of a run that is going on: a line for each step that counts, none twice, whatever
was undone or resumed. The table of a run of weeks is looked at from its end."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from elastic.observe.metrics.step_rows import COLUMNS, Row, columns_of, read_rows, text_of
from elastic.storage import LocalStorage

CSV = "metrics.csv"
BLOCK_BYTES = 1 << 16  # that are read at once, from the end


class MetricsCsv:
    """`last`: its newest row. Where a write has failed midway, or somebody else has changed the
    file, the next one goes behind the last whole row. Raises OSError where the file cannot be
    written."""

    def __init__(self, folder: Path) -> None:
        self._storage, self._path = LocalStorage(folder), folder / CSV
        self._end = 0
        self.last: Row | None = None
        self._open()

    def add(self, rows: Sequence[Row]) -> None:
        """In place of those from the first one's step on, if there are any."""
        if not rows:
            return
        self.cut(rows[0]["step"] - 1)
        self._widen(columns_of(rows))
        with self._path.open("r+b") as file:
            self._write(file, self._end, text_of(rows, self._columns, head=False).encode())
        self.last = rows[-1]

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds to the row of a step what was evaluated there."""
        self._check()
        self._widen([*metrics])
        with self._path.open("r+b") as file:
            later: list[bytes] = []  # rows, the newest first
            for at, line in self._backwards(file, self._end):
                if _step(line) > step:
                    later.append(line)
                    continue
                if _step(line) == step:
                    row = {**self._row(line), **metrics}
                    text = text_of([row], self._columns, head=False).encode()
                    rest = b"".join(reversed(later))
                    self._write(file, at, text + rest, before=line + rest)
                    self.last = self.last if later else row
                return

    def cut(self, step: int) -> None:
        """What came after this step was undone."""
        self._check()
        if self.last is None or self.last["step"] <= step:
            return
        with self._path.open("r+b") as file:
            found = self._backwards(file, self._end)
            stays = (at + len(line) for at, line in found if _step(line) <= step)
            self._end_at(file, next(stays, len(self._head)))

    # ---------------------------------------------------------------------------------------- parts

    def _check(self) -> None:
        size = -1
        with suppress(FileNotFoundError):
            size = self._path.stat().st_size
        if size != self._end:
            self._open()

    def _open(self) -> None:
        """A torn last line goes; what is no table is begun anew."""
        try:
            with self._path.open("r+b") as file:
                self._head = file.readline()
                if not self._head.endswith(b"\n"):
                    raise ValueError("it has no whole line")
                read_rows(self._head.decode())  # is it that of a table?
                self._columns = next(csv.reader([self._head.decode()]))
                self._end_at(file, self._whole(file))
        except (FileNotFoundError, ValueError):
            self._columns, self.last = list(COLUMNS), None
            self._head = text_of([], self._columns).encode()
            self._storage.put(CSV, self._head)
            self._end = len(self._head)

    def _whole(self, file: BinaryIO) -> int:
        """The end of the last whole line."""
        end, head = file.seek(0, 2), len(self._head)
        while end > head:
            begin = max(head, end - BLOCK_BYTES)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
        return head

    def _end_at(self, file: BinaryIO, end: int) -> None:
        if file.seek(0, 2) != end:
            file.truncate(end)
        self._end = end
        _, line = next(self._backwards(file, end), (0, b""))
        self.last = self._row(line) if line else None

    def _backwards(self, file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
        """The rows before `end`, the newest first: where each begins, and its line."""
        begin, rest = end, b""  # `rest`: what of a line that begins further up was read
        while begin > len(self._head):
            begin, until = max(len(self._head), begin - BLOCK_BYTES), begin
            file.seek(begin)
            text = file.read(until - begin) + rest
            lines = [line + b"\n" for line in text.split(b"\n")[:-1]]
            at, cut = begin + len(text), begin > len(self._head)
            rest = lines[0] if cut else b""
            for line in reversed(lines[cut:]):
                at -= len(line)
                yield at, line

    def _write(self, file: BinaryIO, at: int, text: bytes, *, before: bytes = b"") -> None:
        """`before`: what was there, which comes back where this fails: its room is there."""
        self._end = -1  # not known where this fails
        try:
            _put(file.fileno(), at, text)
        except OSError:
            with suppress(OSError):
                _put(file.fileno(), at, before)
            raise
        self._end = at + len(text)

    def _widen(self, names: Sequence[str]) -> None:
        """Columns behind the others: every line becomes longer, one after the other."""
        new = [name for name in names if name not in self._columns]
        if not new:
            return
        columns = [*self._columns, *new]
        head = text_of([], columns).encode()
        with self._storage.create(CSV) as wide, self._path.open("rb") as file:
            file.readline()
            wide.write(head)
            for line in file:
                wide.write(line[:-1] + b"," * len(new) + b"\n")
            n_bytes = wide.tell()
        self._columns, self._head, self._end = columns, head, n_bytes

    def _row(self, line: bytes) -> Row:
        rows = read_rows((self._head + line).decode())
        if not rows:
            raise ValueError("it is no row")
        return rows[0]


def _put(fd: int, at: int, text: bytes) -> None:
    """The file ends with it. Not by way of a buffer: what was refused would wait there."""
    n = 0
    while n < len(text):
        n += os.pwrite(fd, text[n:], at + n)
    os.ftruncate(fd, at + n)


def _step(line: bytes) -> int:
    return int(line.partition(b",")[0])
