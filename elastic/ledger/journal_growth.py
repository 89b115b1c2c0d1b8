"""What a run's journal has more than when it was looked at last: whoever follows a run reads every
line once, in a folder as in object storage, also while the journal is closed into parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from elastic.ledger.journal import CLOSED, SEAL, Line, Sieve, crc_of, damaged
from elastic.ledger.parts import PREFIX as PARTS
from elastic.ledger.parts import JournalParts, Name
from elastic.ledger.run_folder import RunFolder
from elastic.ledger.segments import PREFIX
from elastic.storage import Storage

NEWLINE = b"\n"
MARK = 64  # bytes before the place that was read to, by which the same text is known again


class ReadOnce:
    """A storage whose journal segments, which are never changed, are fetched once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._texts: dict[str, bytes] = {}

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        keys = self._storage.list(prefix, after)
        if prefix == PREFIX and not after:
            self._texts = {key: text for key, text in self._texts.items() if key in keys}
        return keys

    def get(self, key: str) -> bytes:
        if not key.startswith(PREFIX):
            return self._storage.get(key)
        if key not in self._texts:
            self._texts[key] = self._storage.get(key)
        return self._texts[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


Stamp = tuple[int, int, int]  # of a file: inode, bytes, when it was written


@dataclass(frozen=True)
class _Seen:
    """What is another where anything was added. None = there is no such file."""

    journal: Stamp | None
    closed: Stamp | None
    stored: tuple[str, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True)
class JournalPlace:
    """How far a journal was read: through these parts, and the first `at` bytes of the text after
    them, with this checksum. `stamps`: of the parts' files, size and time; () = no files here.
    `epoch`, `last`, `sealed`: see Sieve."""

    names: tuple[Name, ...]
    stamps: tuple[tuple[int, float], ...]
    at: int
    crc: int
    n_lines: int
    epoch: int
    last: str
    sealed: int | None


class JournalGrowth:
    """Reads what was added since the last call, of the first one since `place`. `begun`: how often
    it began from the first line: a journal that was cut, or that another driver's lines replaced,
    is read again from there."""

    def __init__(self, run: RunFolder, place: JournalPlace | None = None) -> None:
        if run.storage.remote:
            run = replace(run, storage=cast(Storage, ReadOnce(run.storage)))
        self._run = run
        self.begun = 0
        self.trouble = ""  # why nothing more is read
        self._signs: _Seen | None = None
        self._begin()
        if place is not None:
            self._resume(place)

    def _begin(self) -> None:
        self.begun += 1
        self.trouble = ""
        self._sieve = Sieve()
        self._parts: JournalParts | None = None
        self._n_parts, self._at, self._crc, self._mark = 0, 0, 0, b""
        self._n_lines = 0  # of the text that is read, for messages
        self._stamps: tuple[tuple[int, float], ...] = ()

    def _resume(self, place: JournalPlace) -> None:
        self._sieve = Sieve(place.epoch, place.last, sealed=place.sealed)
        self._parts = JournalParts(self._run.storage, place.names)
        self._n_parts, self._n_lines = len(place.names), place.n_lines
        self._at, self._crc, self._stamps = place.at, place.crc, place.stamps

    @property
    def place(self) -> JournalPlace | None:
        """Where another reader continues; None = the newest line is torn, or damaged."""
        if self.trouble or self._sieve.torn is not None or self._parts is None:
            return None
        names, sieve = self._parts.names[: self._n_parts], self._sieve
        return JournalPlace(
            names, self._stamps_of(names), self._at, self._crc, self._n_lines,
            sieve.epoch, sieve.last, sieve.sealed,
        )  # fmt: skip

    def _stamps_of(self, names: tuple[Name, ...]) -> tuple[tuple[int, float], ...]:
        """In object storage nothing that is stored is changed, and each of them would be asked."""
        storage, keys = self._run.storage, [name.key("xz") for name in names]
        if storage.remote:
            return ()
        return tuple((storage.size(key), storage.modified_s(key)) for key in keys)

    def look(self, part_read: Callable[[], object] | None = None) -> Iterator[Line]:
        """Lines that nobody has read; to be taken to their end. `part_read`: is called behind the
        last line of each part. Raises JournalDamaged for parts or segments that are missing,
        SpecError where a newer version wrote it."""
        signs = self._seen()
        if signs == self._signs:
            return
        text, begins = self._grown(signs), max(0, self._at - MARK)
        if text is None:
            parts, text = self._run.parts_and_text(self._parts)
            begins = 0
            if not self._continues(parts, text):
                self._begin()
            self._parts, self._stamps = parts, ()
            for name in parts.names[self._n_parts :]:
                packed = parts.read(name)[1]
                yield from self._taken(packed, parts.storage.uri_of(name.key("xz")))
                self._n_parts, self._at = self._n_parts + 1, max(0, self._at - len(packed))
                self._crc, self._mark = crc32(text[: self._at]), b""
                if part_read is not None:
                    part_read()
        yield from self._taken(text, str(self._run.journal), begins)
        self._signs = signs

    def _seen(self) -> _Seen:
        run = self._run
        journal, closed = (_stamp(path) for path in (run.journal, run.folder / CLOSED))
        stored = run.storage.list(PREFIX) if run.storage.remote else []
        return _Seen(journal, closed, tuple(stored), tuple(run.storage.list(PARTS)))

    def _grown(self, now: _Seen) -> bytes | None:
        """The newest bytes of a file that has only become longer, from MARK bytes before the place
        that was read to: a driver adds a line each second for months. None = another one, or
        parts."""
        before, there = self._signs, now.journal
        if before is None or before.journal is None or there is None or self._run.storage.remote:
            return None
        if before.closed or now.closed or before.parts != now.parts:
            return None
        with self._run.journal.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != before.journal[0]:
                return None
            file.seek(max(0, self._at - MARK))
            text = file.read()
        return text if self._mark and text.startswith(self._mark) else None

    def _continues(self, parts: JournalParts, text: bytes) -> bool:
        """Does the journal still begin with what was read?"""
        if len(parts.names) < self._n_parts:
            return False
        known = self._parts.names[: self._n_parts] if self._parts is not None else ()
        if parts.names[: self._n_parts] != known:
            return False
        if self._stamps and self._stamps != self._stamps_of(known):
            return False
        begins = b""
        for name in parts.names[self._n_parts :]:  # some may have been closed when they were read
            if len(begins) >= self._at:
                break
            begins += parts.read(name)[1]
        if len(begins) < self._at:
            begins += text
        return len(begins) >= self._at and crc32(begins[: self._at]) == self._crc

    def _taken(self, text: bytes, where: str, begins: int = 0) -> Iterator[Line]:
        """The whole lines that follow the place that was read to. `begins`: of the text, in its
        file."""
        at = self._at - begins
        end = text.rfind(NEWLINE, at) + 1 or at
        rest = text[end:]
        seal = SEAL.search(rest)
        if seal and crc_of(rest[: seal.start()] + b"}") == seal[1].decode():
            end = len(text)  # whole but for its newline
        added = text[at:end]
        if not added or self.trouble:
            return
        yield from self._sieve.lines(added)
        if (damage := self._sieve.damage) is not None:
            number = self._n_lines + damage.number
            self.trouble = str(damaged(where, replace(damage, number=number)))
            return
        self._n_lines += added.count(NEWLINE)
        self._crc = crc32(added, self._crc)
        self._at, self._mark = begins + end, text[max(0, end - MARK) : end]


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
