"""The journal of a run: append-only JSONL, one line per tick.

    {"v": 1, "at_s": 12.5, "epoch": 1, "events": [[12.5, {"kind": "NodeLost", ...}]], "decision": {"actions": [...], ...},
     "after": "07ab34cd", "crc": "89ab01ef"}

`crc` is the CRC-32 of the line without it, `after`, in a driver's first line, that of the whole line before it, all of it: a
damaged line between two drivers was a torn one when the second came, or was altered since. Lines that were recorded without are
read all the same.

`encode` and `decode` turn every dataclass of `elastic.types` into plain data and back. An event, an action and whatever is
given to `encode` directly carries its class name as "kind"; nested values whose class follows from the field do not. A field
that is itself called `kind` is written "kind_" where the class name is written too. Secrets are written as "***".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import types as python_types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from elastic import types
from elastic.errors import InternalError, JournalDamaged, SpecError
from elastic.ledger.appending import Appender
from elastic.ledger.segments import GO_ON, Segments
from elastic.masking import masked, masked_text
from elastic.types import Decision, EnterPlan, Event, RollForward, StepDone, Stop

VERSION = 1
PLAN_CHANGES = (EnterPlan, RollForward, Stop)  # a line with one of these is stored before it is carried out
MERGE_S = 1.0  # ticks that hold only StepDone become at most one line in this time

CLASSES: dict[str, type] = {
    name: cls for name, cls in vars(types).items() if dataclasses.is_dataclass(cls) and isinstance(cls, type)
}
NO_LINE = "00000000"  # what `after` says where there is no line before
_SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_MORE = re.compile(rb',"crc":"[0-9a-f]{8}"\}.')  # two lines that have become one; a torn one ends before its checksum
FREE = ("job", "drill")  # fields of plain data: in them a name may say that a value is secret
_OPEN: tuple[type, ...] = (types.Event, types.Action)  # fields of these types hold any subclass


# ------------------------------------------------------------------------------------------------ codec


def encode(obj: Any) -> dict[str, Any]:
    """A dataclass of `elastic.types` as plain JSON data, with its class name as "kind"."""
    if type(obj).__name__ not in CLASSES:
        raise InternalError(f"{type(obj).__name__} is not a noun of elastic.types; it cannot be written to a journal")
    data = {"kind": type(obj).__name__}
    for name, value in _fields(obj):
        data["kind_" if name == "kind" else name] = value
    return data


def decode(data: dict[str, Any]) -> Any:
    """The inverse of `encode`. Fields that this version does not know are ignored."""
    name = data.get("kind", "")
    if name not in CLASSES:
        raise SpecError(f"journal: unknown kind '{name}'; it was written by another version of elastic")
    plain = {("kind" if key == "kind_" else key): value for key, value in data.items() if key != "kind"}
    return _reader_of(CLASSES[name])(plain)


def _fields(obj: Any) -> Iterable[tuple[str, Any]]:
    cls: type = type(obj)
    for name in _names(cls):
        value = getattr(obj, name)
        yield name, _plain(masked(value) if name in FREE else value)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return masked_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, _OPEN):
        return encode(value)
    if dataclasses.is_dataclass(value):
        return dict(_fields(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


@cache
def _names(cls: type) -> tuple[str, ...]:
    return types.names_of(cls)


@cache
def _reader_of(cls: type) -> Callable[[dict[str, Any]], Any]:
    """A function that builds `cls` from plain data, with one reader per field."""
    hints = typing.get_type_hints(cls)
    readers = {name: _reader(hints[name]) for name in _names(cls)}

    def build(data: dict[str, Any]) -> Any:
        return cls(**{name: readers[name](value) for name, value in data.items() if name in readers})

    return build


def _reader(hint: Any) -> Callable[[Any], Any]:
    """A function that turns plain data into a value of the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, python_types.UnionType):
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _reader(args[0])
        return lambda value: tuple(item(v) for v in value)
    if origin is dict:
        item = _reader(args[1])
        return lambda value: {k: item(v) for k, v in value.items()}
    if isinstance(hint, type) and hint in _OPEN:
        return decode
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _reader_of(hint)
    return float if hint is float else lambda value: value


# ------------------------------------------------------------------------------------------------ lines


@dataclass(frozen=True)
class Line:
    """One tick: its time, the driver's epoch, the events with their own times, and what was decided."""

    at_s: float
    epoch: int
    events: tuple[tuple[float, Event], ...] = ()
    decision: Decision | None = None


@dataclass(frozen=True)
class _Read:
    """A line as it was found. `sealed`: it has its checksum; `after`: '' = it is not the first of a driver, or not sealed."""

    line: Line
    sealed: bool
    after: str


def write_line(line: Line, after: str = "") -> str:
    """The line as JSON text, without the newline. `after`: checksum of the line before a driver's first."""
    data = {
        "v": VERSION,
        "at_s": line.at_s,
        "epoch": line.epoch,
        "events": [[at_s, encode(event)] for at_s, event in line.events],
        "decision": None if line.decision is None else _plain(line.decision),
    }
    text = json.dumps(data | ({"after": after} if after else {}), separators=(",", ":"), allow_nan=False)
    return f'{text[:-1]},"crc":"{_crc(text.encode())}"}}'


def parse_line(text: str) -> Line:
    """Raises ValueError when the text is not a line as it was written, SpecError when a newer version wrote it."""
    return _parsed(text.encode()).line


def _parsed(text: bytes) -> _Read:
    seal = _SEAL.search(text)
    if seal and _crc(text[: seal.start()] + b"}") != seal[1].decode():
        raise ValueError("its checksum is another")
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or "v" not in data:
            raise ValueError("not a journal line")
        if data["v"] > VERSION:
            raise SpecError(f"journal: schema version {data['v']} is newer than {VERSION}, the newest that this elastic reads")
        decision = data.get("decision")
        line = Line(
            at_s=float(data["at_s"]),
            epoch=int(data["epoch"]),
            events=tuple((float(at_s), decode(event)) for at_s, event in data["events"]),
            decision=None if decision is None else _reader_of(Decision)(decision),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a journal line: {type(error).__name__}") from error
    return _Read(line, seal is not None, str(data.get("after", "")) if seal else "")


def _crc(text: bytes) -> str:
    return f"{crc32(text):08x}"


def read(path: str | Path) -> list[Line]:
    """The lines of a journal, in order.

    A damaged last line (of the file, or of a driver before a newer one took over) was torn and is left out. Lines of an older
    epoch after a line of a newer one are ignored: their driver had lost its lease. Raises JournalDamaged for other damage.
    """
    return read_text(Path(path).read_bytes(), str(path))


def read_text(text: bytes, where: str, place: Callable[[int], str] | None = None) -> list[Line]:
    """The lines of a journal's text, as `read`; `where` is for messages, and what `place` adds to it for an offset."""
    lines, damage = sift(text)
    if damage is not None:
        more = place(damage.offset) if place is not None else ""
        raise JournalDamaged(f"{where}, line {damage.number}{more}: it was altered after it was written; {GO_ON}")
    return lines


@dataclass(frozen=True)
class Damage:
    """The first damaged line: its number, counted from 1, and where it begins, in bytes."""

    number: int
    offset: int


def sift(text: bytes) -> tuple[list[Line], Damage | None]:
    """The lines of a journal's text up to a damaged one that no driver left so; None = all are whole."""
    lines: list[Line] = []
    torn: Damage | None = None
    sealed: int | None = None  # the last epoch whose lines have checksums
    last, offset = NO_LINE, 0
    for number, one in enumerate(text.split(b"\n"), start=1):
        start, offset = offset, offset + len(one) + 1
        if not one.strip():
            continue
        epoch = lines[-1].epoch if lines else 0
        try:
            found = _parsed(one)
            if not found.sealed and found.line.epoch == sealed:
                raise ValueError("its checksum is missing")
        except ValueError:
            if torn or _MORE.search(one):
                return lines, torn or Damage(number, start)
            torn = Damage(number, start)
            continue
        line = found.line
        if torn and (line.epoch <= epoch or (found.sealed and found.after != last)):
            return lines, torn
        torn, last = None, _crc(one)
        if line.epoch >= epoch:
            lines.append(line)
        sealed = line.epoch if found.sealed else sealed
    return lines, None


class Journal:
    """Appends to the journal file of a run. Before `append` returns, lines that hold actions reach the disk, and plan changes
    the run's storage; where these do not answer, it waits 10 s at most and `settled` is False.

    `segments`: where the run is in object storage, they take the lines there.
    """

    def __init__(self, path: str | Path, epoch: int) -> None:
        self.path = Path(path)
        self.epoch = epoch
        self.segments: Segments | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Appender(self.path)
        self._stored_to = 0  # the end of the last plan change in the file
        self._after = _last(self.path)  # of the first line alone
        self._pending: list[tuple[float, Event]] = []
        self._pending_decision: Decision | None = None
        if self._file.end and not self._ends_with_newline():
            self._file.write(b"\n", sync=False)  # a torn line of the driver before us

    def append(self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None) -> None:
        """One tick. Ticks of only StepDone, without actions, are held back and merged for up to MERGE_S."""
        quiet = decision is None or not decision.actions
        if events and quiet and all(isinstance(event, StepDone) for _, event in events):
            self._pending += events
            self._pending_decision = decision
            if at_s >= self._pending[0][0] + MERGE_S:
                self.flush()
            return
        self.flush()
        if events or decision is not None:
            self._write(Line(at_s, self.epoch, tuple(events), decision), sync=not quiet)

    @property
    def due_at_s(self) -> float | None:
        """When the held-back steps should be flushed."""
        return self._pending[0][0] + MERGE_S if self._pending else None

    def flush(self) -> None:
        """Write the steps that were held back."""
        if self._pending:
            events, decision = tuple(self._pending), self._pending_decision
            self._pending, self._pending_decision = [], None
            self._write(Line(events[-1][0], self.epoch, events, decision), sync=False)

    @property
    def settled(self) -> bool:
        """The lines are where they must be before their actions may be carried out."""
        return not self._file.owes and (self.segments is None or self.segments.stored(self._stored_to))

    @property
    def trouble(self) -> Exception | None:
        """Why lines are not where they must be."""
        return self._file.trouble or (self.segments.trouble if self.segments is not None else None)

    def close(self) -> None:
        """Raises StorageFailed or LostContact where the end could not be written."""
        if not self._file.closed:
            self.flush()
            try:
                self._file.close()
            finally:
                if self.segments is not None:
                    self.segments.close()

    def _write(self, line: Line, sync: bool) -> None:
        self._file.write(write_line(line, self._after).encode() + b"\n", sync)
        self._after = ""
        if self.segments is None:
            return
        if line.decision is not None and any(isinstance(action, PLAN_CHANGES) for action in line.decision.actions):
            self._stored_to = self._file.end
            self.segments.store(self._stored_to)
        elif sync:
            self.segments.soon()

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _last(path: Path) -> str:
    """Checksum of a file's last whole line; its end is read alone."""
    with path.open("rb") as file:
        end, n = file.seek(0, os.SEEK_END), 1 << 16
        while True:
            file.seek(max(0, end - n))
            for text in reversed(file.read().split(b"\n")[n < end :]):  # the first may be the end of a line
                if text.strip() and _is_whole(text):
                    return _crc(text)
            if n >= end:
                return NO_LINE
            n *= 8


def _is_whole(text: bytes) -> bool:
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


class Memory:
    """A journal that is never written: the lines of a run as a list."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.settled, self.trouble = True, None
        self.lines: list[Line] = []
        self.due_at_s: float | None = None

    def append(self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None) -> None:
        self.lines.append(Line(at_s, self.epoch, tuple(events), decision))

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""
