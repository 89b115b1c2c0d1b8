"""The journal of a run: append-only JSONL, one line per tick.

    {"v": 1, "at_s": 12.5, "epoch": 1, "events": [[12.5, {"kind": "NodeLost", ...}]],
     "decision": {"actions": [...], ...}, "after": "07ab34cd", "crc": "89ab01ef"}

`crc` is the CRC-32 of the line without it, `after`, in the first line of a driver or of a file,
that of the whole line before it, all of it: a damaged line between two drivers was a torn one when
the second came, or was altered since. Lines that were recorded without are read all the same. A
file that has become large is closed and packed with the State after it: see parts.py.

`encode` and `decode` turn every dataclass of `elastic.types` into plain data and back. An event, an
action and whatever is given to `encode` directly carries its class name as "kind"; nested values
whose class follows from the field do not. A field that is itself called `kind` is written "kind_"
where the class name is written too. Secrets are written as "***".
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import types as python_types
import typing
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

from elastic import types
from elastic.config.masking import masked, masked_text
from elastic.errors import InternalError, JournalDamaged, SpecError
from elastic.ledger.append_file import Appender
from elastic.ledger.segments import GO_ON, Segments
from elastic.types import (
    Decision,
    EnterPlan,
    Event,
    Job,
    NodeLoadSeen,
    RollForward,
    StepDone,
    Stop,
    WorkerId,
)
from elastic.types.replacing import made

log = logging.getLogger(__name__)

if typing.TYPE_CHECKING:
    Doubles = array[float]
else:
    Doubles = array  # Python 3.11 has no array[float]
T = TypeVar("T")
VERSION = 1
VERSION_OF_STATE = 2  # of a line that holds a State
# a line with one of these is stored before it is carried out
PLAN_CHANGES = (EnterPlan, RollForward, Stop)
MERGE_S = 1.0  # ticks that hold only these become at most one line in this time
QUIET = (StepDone, NodeLoadSeen)

CLASSES: dict[str, type] = {
    name: cls for name, cls in vars(types).items() if isinstance(cls, type) and types.is_noun(cls)
}
CLOSED = "journal-closed.jsonl"  # a file that is being packed
KEPT_WORKERS = 1 << 15
NO_LINE = "00000000"  # what `after` says where there is no line before
SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
SEALED = ',"crc":"{}"}}'
# two lines that have become one; a torn one ends before its checksum
_MORE = re.compile(rb',"crc":"[0-9a-f]{8}"\}.')
FREE = ("job", "drill")  # fields of plain data: in them a name may say that a value is secret
_OPEN: tuple[type, ...] = (types.Event, types.Action)  # fields of these types hold any subclass


# -------------------------------------------------------------------------------------------- codec


def encode(obj: Any) -> dict[str, Any]:
    """A dataclass of `elastic.types` as plain JSON data, with its class name as "kind"."""
    if type(obj).__name__ not in CLASSES:
        raise InternalError(
            f"{type(obj).__name__} is not a noun of elastic.types; it cannot be written to a "
            "journal"
        )
    data = {"kind": type(obj).__name__}
    for name, value in _fields(obj):
        data["kind_" if name == "kind" else name] = value
    return data


def decode(data: dict[str, Any]) -> Any:
    """The inverse of `encode`. Fields that this version does not know are ignored."""
    name = data.get("kind", "")
    if name not in CLASSES:
        raise SpecError(
            f"journal: unknown kind '{name}'; it was written by another version of elastic"
        )
    plain = dict(data)
    del plain["kind"]
    if "kind_" in plain:
        plain["kind"] = plain.pop("kind_")
    return _reader_of(CLASSES[name])(plain)


def _fields(obj: Any) -> Iterable[tuple[str, Any]]:
    cls: type = type(obj)
    for name in _names(cls):
        value = getattr(obj, name)
        value = value.plain() if isinstance(value, Job) else value  # as DriverStarted has it
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
    if types.is_noun(type(value)):
        return dict(_fields(value))
    if isinstance(value, Mapping):
        if all(isinstance(key, str | int) for key in value):
            return {str(key): _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple | Set):
        return [_plain(item) for item in value]
    if isinstance(value, array):  # whatever it holds, bit by bit
        return value.typecode + b64encode(value).decode()
    return str(value)


@cache
def _names(cls: type) -> tuple[str, ...]:
    return types.names_of(cls)


@cache
def _reader_of(cls: type) -> Callable[[dict[str, Any]], Any]:
    """A function that builds `cls` from plain data, with one reader for each field that needs
    one."""
    hints = typing.get_type_hints(cls)
    readers = {name: _reader(hints[name]) for name in _names(cls)}
    names = frozenset(readers)
    read = [(name, reader) for name, reader in readers.items() if reader is not _as_it_is]

    def build(data: dict[str, Any]) -> Any:
        found = {name: value for name, value in data.items() if name in names}
        for name, reader in read:
            if name in found:
                found[name] = reader(found[name])
        return made(cls, found)

    return build


def _as_it_is(value: Any) -> Any:
    return value


def _reader(hint: Any) -> Callable[[Any], Any]:
    """A function that turns plain data into a value of the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, python_types.UnionType):
        given = [arg for arg in args if arg is not type(None)]
        actions = all(isinstance(arg, type) and issubclass(arg, _OPEN) for arg in given)
        inner = decode if actions and len(given) > 1 else _reader(given[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple and Ellipsis not in args:
        readers = [_reader(arg) for arg in args]
        return lambda value: tuple(read(v) for read, v in zip(readers, value, strict=True))
    if hint is array:
        return lambda text: array(text[0], b64decode(text[1:]))
    if origin in (tuple, list, set, frozenset, Set):
        item, kind = _reader(args[0]), frozenset if origin is Set else origin
        return lambda value: kind([item(v) for v in value])
    if origin in (dict, Mapping):
        key, item = int if args[0] is int else _reader(args[0]), _reader(args[1])
        return lambda value: {
            key(k): item(v) for k, v in (value.items() if isinstance(value, dict) else value)
        }
    if hint is WorkerId:
        return lambda data: _worker(data["node_id"], data["local_rank"])
    if origin is typing.Literal:
        return lambda value: sys.intern(value) if type(value) is str else value
    if isinstance(hint, type) and hint in _OPEN:
        return decode
    if hint is Job:
        return Job.from_plain
    if isinstance(hint, type) and types.is_noun(hint):
        return _reader_of(hint)
    return float if hint is float else _as_it_is


@lru_cache(KEPT_WORKERS, typed=True)
def _worker(node_id: str, local_rank: int) -> WorkerId:
    """Each plan names the same thousands, several times: whoever keeps plans keeps each once."""
    return WorkerId(node_id, local_rank)


def plain(obj: Any) -> dict[str, Any]:
    """Any dataclass of such nouns as plain JSON data, without its class name."""
    return dict(_fields(obj))


def built(cls: type[T], data: dict[str, Any]) -> T:
    """The inverse of `plain`."""
    read: Callable[[type], Callable[[dict[str, Any]], Any]] = _reader_of
    return typing.cast(T, read(cls)(data))


# -------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Line:
    """One tick: its time, the driver's epoch, the events with their own times, and what was
    decided. `state`: instead of these, the State that the lines before end with, as plain data."""

    at_s: float
    epoch: int
    events: tuple[tuple[float, Event], ...] = ()
    decision: Decision | None = None
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Read:
    """A line as it was found. `sealed`: it has its checksum; `after`: '' = it is not the first of a
    driver, or not sealed."""

    line: Line
    sealed: bool
    after: str


def write_line(line: Line, after: str = "") -> str:
    """The line as JSON text, without the newline. `after`: checksum of the line before a driver's
    first."""
    data = {
        "v": VERSION if line.state is None else VERSION_OF_STATE,
        "at_s": line.at_s,
        "epoch": line.epoch,
        "events": [[at_s, encode(event)] for at_s, event in line.events],
        "decision": None if line.decision is None else _plain(line.decision),
    }
    more = ({"after": after} if after else {}) | (
        {"state": line.state} if line.state is not None else {}
    )
    text = json.dumps(data | more, separators=(",", ":"), allow_nan=False)
    return text[:-1] + SEALED.format(crc_of(text.encode()))


def parse_line(text: str) -> Line:
    """Raises ValueError when the text is not a line as it was written, SpecError when a newer
    version wrote it."""
    return _parsed(text.encode()).line


def parse_state(text: bytes) -> tuple[Line, str]:
    """A line that holds a State, and the checksum of the line before. Raises ValueError."""
    found = _parsed(text)
    if found.line.state is None or not found.sealed:
        raise ValueError("it holds no State")
    return found.line, found.after


def _parsed(text: bytes) -> _Read:
    seal = SEAL.search(text)
    if seal and crc_of(text[: seal.start()] + b"}") != seal[1].decode():
        raise ValueError("its checksum is another")
    try:
        data = json.loads(text.decode("utf-8", "surrogatepass"))
        if not isinstance(data, dict) or "v" not in data:
            raise ValueError("not a journal line")
        if data["v"] > VERSION_OF_STATE:
            newest = f"{VERSION_OF_STATE}, the newest that this elastic reads; take a later one"
            raise SpecError(f"journal: schema version {data['v']} is newer than {newest}")
        decision = data.get("decision")
        line = Line(
            at_s=float(data["at_s"]),
            epoch=int(data["epoch"]),
            events=tuple((float(at_s), decode(event)) for at_s, event in data["events"]),
            decision=None if decision is None else _reader_of(Decision)(decision),
            state=data.get("state"),
        )
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a journal line: {type(error).__name__}") from error
    return _Read(line, seal is not None, str(data.get("after", "")) if seal else "")


def crc_of(text: bytes) -> str:
    return f"{crc32(text):08x}"


def read(path: str | Path) -> list[Line]:
    """The lines of a journal, in order.

    A damaged last line (of the file, or of a driver before a newer one took over) was torn and is
    left out. Lines of an older epoch after a line of a newer one are ignored: their driver had lost
    its lease. Raises JournalDamaged for other damage.
    """
    return read_text(Path(path).read_bytes(), str(path))


def read_text(text: bytes, where: str, place: Callable[[int], str] | None = None) -> list[Line]:
    """The lines of a journal's text, as `read`; `where` is for messages, and what `place` adds to
    it for an offset."""
    lines, damage = sift(text)
    if damage is not None:
        raise damaged(where, damage, place)
    return lines


def damaged(
    where: str, damage: Damage, place: Callable[[int], str] | None = None
) -> JournalDamaged:
    """What is said of a damaged line; as `read_text`."""
    more = place(damage.offset) if place is not None else ""
    return JournalDamaged(
        f"{where}, line {damage.number}{more}: it was altered after it was written; {GO_ON}"
    )


@dataclass(frozen=True)
class Damage:
    """The first damaged line: its number, counted from 1, and where it begins, in bytes."""

    number: int
    offset: int


def sift(text: bytes) -> tuple[list[Line], Damage | None]:
    """The lines of a journal's text up to a damaged one that no driver left so; None = all are
    whole."""
    sieve = Sieve()
    return list(sieve.lines(text)), sieve.damage


class Sieve:
    """The whole lines of texts that follow each other. `last`: checksum of the newest; `damage`:
    where it ended for good, in the text that it was given last."""

    def __init__(self, epoch: int = 0, last: str = NO_LINE, *, sealed: int | None = None) -> None:
        self.damage: Damage | None = None
        self._newest: str | bytes = last
        self.epoch = epoch
        self.torn: Damage | None = None
        self.sealed = sealed  # the last epoch whose lines have checksums

    @property
    def last(self) -> str:
        """It is asked for rarely, and lines are many."""
        return self._newest if isinstance(self._newest, str) else crc_of(self._newest)

    def lines(self, text: bytes) -> Iterator[Line]:
        """Up to a damaged one that no driver left so."""
        offset = 0
        for number, one in enumerate(text.split(b"\n"), start=1):
            start, offset = offset, offset + len(one) + 1
            if not one.strip():
                continue
            try:
                found = _parsed(one)
                if not found.sealed and found.line.epoch == self.sealed:
                    raise ValueError("its checksum is missing")
            except ValueError:
                self.damage = (
                    (self.torn or Damage(number, start)) if self.torn or _MORE.search(one) else None
                )
                if self.damage:
                    return
                self.torn = Damage(number, start)
                continue
            line = found.line
            if self.torn and (
                line.epoch <= self.epoch or (found.sealed and found.after != self.last)
            ):
                self.damage = self.torn
                return
            self.torn, self._newest = None, one
            if line.epoch >= self.epoch:
                self.epoch = line.epoch
                yield line
            self.sealed = line.epoch if found.sealed else self.sealed


class Closing(Protocol):
    """Takes a file of the journal that is closed, and packs it in a thread of its own."""

    most_bytes: int

    @property
    def free(self) -> bool:
        """The one before is packed."""

    def begin(self, path: Path, line: Callable[[], str], counted: dict[str, int]) -> None:
        """`path`: the closed file; `line`: the State after it; `counted`: epoch -> segments that
        hold it and all before."""

    def close(self) -> None:
        """What is not packed is left to the next driver."""


class Journal:
    """Appends to the journal file of a run. Before `append` returns, lines that hold actions reach
    the disk, and plan changes the run's storage; where these do not answer, it waits 10 s at most,
    once, and `settled` is False.

    `segments`: where the run is in object storage, they take the lines there. `parts`: closes a
    file that has become large. `hear`: are given each line at once, also one that is held back.
    `last`: checksum of the line before the file's first.
    """

    def __init__(self, path: str | Path, epoch: int, last: str = NO_LINE) -> None:
        self.path = Path(path)
        self.epoch = epoch
        self.segments: Segments | None = None
        self.parts: Closing | None = None
        self.hear: Sequence[Callable[[Line], None]] = ()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Appender(self.path)
        self._stored_to = 0  # the end of the last plan change in the file
        self._not_below = 0  # bytes at which the file, which could not be closed, is tried again
        self._after = _last(self.path, last)  # of the first line alone
        self._newest = self._after
        self._at_s = 0.0
        self._pending: list[tuple[float, Event]] = []
        self._pending_decision: Decision | None = None
        if self._file.end:
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            if torn:
                self._file.write(b"\n", sync=False)  # a line of the driver before us

    def append(
        self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None
    ) -> None:
        """One tick. Ticks of only steps and loads, without actions, are held back and merged for up
        to MERGE_S."""
        quiet = decision is None or not decision.actions
        if events and quiet and all(isinstance(event, QUIET) for _, event in events):
            self._pending += events
            self._pending_decision = decision
            if at_s >= self._pending[0][0] + MERGE_S:
                self.flush()
        else:
            self.flush()
            if events or decision is not None:
                self._write(Line(at_s, self.epoch, tuple(events), decision), sync=not quiet)
        for hear in self.hear:
            hear(Line(at_s, self.epoch, tuple(events), decision))

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

    def close_part(self, state: Any) -> None:
        """Continues in another file, where this one is large and its lines are all where they
        must be; one that cannot be closed grows until it can. `state`: what they end with; a
        dataclass."""
        parts = self.parts
        if parts is None or not parts.free:
            return
        if self._file.end < max(parts.most_bytes, self._not_below):
            return
        self.flush()
        if self._file.owes or not (self.segments is None or self.segments.store(self._file.end)):
            return
        at_s, epoch, after = self._at_s, self.epoch, self._newest
        closed = self.path.with_name(CLOSED)
        counted: dict[str, int] | None = {}
        try:
            if self.segments is None:
                self._file.begin_anew(closed)
            else:
                counted = self.segments.begin_anew(lambda: self._file.begin_anew(closed))
        except OSError as error:
            if not self._not_below:
                log.warning("%s cannot be closed (%s): it grows until it can be", self.path, error)
            self._not_below = self._file.end + parts.most_bytes // 8
            return
        if counted is None:
            return
        self._not_below = 0
        self._after, self._stored_to = after, 0
        parts.begin(
            closed, lambda: write_line(Line(at_s, epoch, state=plain(state)), after), counted
        )

    @property
    def settled(self) -> bool:
        """The lines of plan changes are where the next driver finds them."""
        return not self._file.owes and (
            self.segments is None or self.segments.stored(self._stored_to)
        )

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
                if self.parts is not None:
                    self.parts.close()
                if self.segments is not None:
                    self.segments.close()

    def _write(self, line: Line, sync: bool) -> None:
        text = write_line(line, self._after).encode()
        self._file.write(text + b"\n", sync)
        self._after, self._newest, self._at_s = "", crc_of(text), line.at_s
        if self.segments is None:
            return
        if line.decision is not None and any(
            isinstance(action, PLAN_CHANGES) for action in line.decision.actions
        ):
            self._stored_to = self._file.end
            self.segments.store(self._stored_to)
        elif sync:
            self.segments.soon()


def _last(path: Path, before: str) -> str:
    """Checksum of a file's last whole line, `before` where it has none; its end is read alone."""
    with path.open("rb") as file:
        end, n = file.seek(0, os.SEEK_END), 1 << 16
        while True:
            file.seek(max(0, end - n))
            # the first may be the end of a line
            found = newest_of(file.read().split(b"\n")[n < end :])
            if found or n >= end:
                return found or before
            n *= 8


def newest_of(lines: Sequence[bytes]) -> str:
    """Checksum of the last whole one, '' where none is."""
    return next((crc_of(text) for text in reversed(lines) if text.strip() and _is_whole(text)), "")


def _is_whole(text: bytes) -> bool:
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


class MemoryJournal:
    """A journal that is never written: the lines of a run as a list."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.settled, self.trouble = True, None
        self.lines: list[Line] = []
        self.due_at_s: float | None = None

    def append(
        self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None
    ) -> None:
        self.lines.append(Line(at_s, self.epoch, tuple(events), decision))

    def close_part(self, state: Any) -> None:
        """It stays one list."""

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""
