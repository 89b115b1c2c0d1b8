"""A run: its storage, and the local folder with its journal file, report and curve.

Where the storage is a folder, the two are one. Where it is object storage, the driver's folder is
./elastic_runs/<run> (where that is of a run in another storage ./elastic_runs/<run>-<hash>): the
journal is written there and stored as segments; a machine without that folder reads the segments.
In both cases a journal file that has become large is closed and packed into the storage.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from elastic.errors import JournalDamaged, SpecError, StorageFailed
from elastic.ledger.journal import CLOSED, Damage, Journal, Line, Sieve, damaged, read_text, sift
from elastic.ledger.parts import PREFIX as PARTS
from elastic.ledger.parts import JournalParts, Packing
from elastic.ledger.segments import N_LOOKS, PREFIX, Segments, StoredJournal, read_stored
from elastic.storage import LocalStorage, Storage, open_storage

DEFAULT_STORAGE = "elastic_runs"
JOURNAL = "journal.jsonl"
ASIDE = "journal-damaged-{}.jsonl"
# and the user's number: a folder of a node, in one where everybody may write
OF_NODE = "elastic-logs-"
MODEL = "model/"  # what an export puts beside the weights
LOGS = "logs"  # what the workers print, a file for each process
PIECE_BYTES = 1 << 20  # that are copied at once
STORED_AT = "storage-uri"  # in a driver's folder: where the run really is


def key_of(uri: str) -> str:
    """Of a run, by its storage, for what runs share: a Ray cluster, a folder. Two runs in two
    storages may have one name."""
    place = uri if "://" in uri else os.path.realpath(uri)
    return f"{uri.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _of_another(folder: Path, uri: str) -> bool:
    """Is the driver's folder that of a run in another storage?"""
    mark = folder / STORED_AT
    return mark.read_text().strip() != uri if mark.is_file() else (folder / JOURNAL).is_file()


def _left_out(file: Path) -> None:
    """Of what `ray job submit --working-dir .` uploads, and of what git adds: runs made there. A
    courtesy: the folder may be another's, who let only the run's own be written."""
    with suppress(OSError):
        if not os.path.lexists(file):
            file.write_text("*\n")


@dataclass(frozen=True)
class _Found:
    """Of a journal: its closed parts, the text after them, what storage holds of that. `where`: of
    the text, for messages."""

    parts: JournalParts
    text: bytes
    stored: StoredJournal
    where: str

    def __iter__(self) -> Iterator[Line]:
        """All lines; one part after the other is read. Raises JournalDamaged."""
        yield from self._after(Sieve(), 0)

    def newest(self) -> list[Line]:
        """A line that holds the newest State, and the lines since."""
        line, last, n = self.parts.newest_state()
        sieve = Sieve(line.epoch if line is not None else 0, last)
        return [*([line] if line is not None else []), *self._after(sieve, n)]

    def _after(self, sieve: Sieve, n: int) -> Iterator[Line]:
        for name in self.parts.names[n:]:
            yield from sieve.lines(self.parts.read(name)[1])
            if sieve.damage is not None:
                raise damaged(self.parts.storage.uri_of(name.key("xz")), sieve.damage)
        yield from sieve.lines(self.text)
        if sieve.damage is not None:
            raise damaged(self.where, sieve.damage, self.stored.place)


@dataclass(frozen=True)
class JournalCut:
    """Of a damaged journal: what is said of it, the file that gets the whole text, and what the
    journal begins with instead. What is stored stays, and counts no more."""

    said: str
    aside: str
    text: bytes
    kept: bytes


@dataclass(frozen=True)
class RunFolder:
    """`folder` is made when something is written to it."""

    storage: Storage
    folder: Path

    @classmethod
    def of(cls, storage: Storage) -> RunFolder:
        """Raises SpecError where a folder says that the run is elsewhere, and another user has put
        that there: whoever looks at the run would ask that place with rights of their own."""
        if not isinstance(storage, LocalStorage):
            folder = Path(DEFAULT_STORAGE).absolute() / storage.uri.rpartition("/")[2]
            return cls(
                storage,
                folder.with_name(key_of(storage.uri))
                if _of_another(folder, storage.uri)
                else folder,
            )
        mark = storage.root / STORED_AT
        if not mark.is_file():
            return cls(storage, storage.root)
        uri, owner = mark.read_text().strip(), mark.lstat().st_uid
        if owner != os.getuid():
            raise SpecError(
                f"{mark}: user {owner} says there that the run is {uri}; if you trust that, name "
                f"{uri} yourself"
            )
        return cls(open_storage(uri), storage.root)

    @property
    def name(self) -> str:
        return self.storage.uri.rpartition("/")[2]

    @property
    def uri(self) -> str:
        return self.storage.uri

    @property
    def journal(self) -> Path:
        """The journal file of this machine."""
        return self.folder / JOURNAL

    @property
    def logs(self) -> Path:
        """Where the workers' output lies, as far as it is here."""
        return self.folder / LOGS

    def logs_of_workers(self, here: bool) -> Path:
        """Where workers write it. `here`: all run on this machine. Nodes without a folder in common
        keep those of their own."""
        of_node = Path(tempfile.gettempdir(), f"{OF_NODE}{os.getuid()}", self.name)
        return self.logs if here or not self.storage.remote else of_node

    def exists(self) -> bool:
        if self.storage.remote:
            return bool(self.storage.list(PREFIX) or self.storage.list(PARTS))
        return self.journal.is_file()

    def lines(self) -> Iterable[Line]:
        """The journal as far as it is known here; of a long one, one part after the other is read
        while it is gone through."""
        found = self._found()
        return (
            found if found.parts.names else read_text(found.text, found.where, found.stored.place)
        )

    def parts_and_text(self, known: JournalParts | None = None) -> tuple[JournalParts, bytes]:
        """Its closed parts, and the text after them, as of one moment. `known`: what a reader who
        comes again has of the parts. Raises JournalDamaged."""
        found = self._found(known)
        return found.parts, found.text

    def newest(self) -> list[Line]:
        """Of the journal the newest State and the lines since: how the run is now. [] = there is
        none. Raises JournalDamaged."""
        return self._found().newest() if self.exists() else []

    def age_s(self) -> float:
        """Seconds since the journal was last written; between clocks of two machines only as good
        as they are."""
        if self.storage.remote:
            newest = [*self.storage.list(PREFIX)[-1:], *self.storage.list(PARTS)[-1:]]
            newest_s = max((self.storage.modified_s(key) for key in newest), default=0.0)
        else:
            newest_s = self.journal.stat().st_mtime
        return max(0.0, time.time() - newest_s)

    def take_over(self) -> tuple[list[Line], StoredJournal]:
        """What earlier drivers wrote: the newest State and the lines since, where there is one.
        Makes this machine's journal file begin with what is stored. Raises JournalDamaged."""
        if not self.storage.remote and self._here() is None:
            return [], StoredJournal()
        found = self._found()
        if self.storage.remote:
            LocalStorage(self.folder).put(STORED_AT, self.storage.uri.encode() + b"\n")
        lines = found.newest()
        self._begin_with(found.text)
        return lines, found.stored

    def without_damage(self) -> tuple[list[Line], StoredJournal, JournalCut]:
        """Instead of `take_over`, where the journal is damaged: what stands before the damage.
        Nothing is written before `open_journal`. Raises SpecError where nothing is damaged."""
        try:
            found = self._found()
            stored, text = found.stored, found.text
            damage = sift(text)[1]
        except JournalDamaged:  # a segment or a part is missing
            found, text = None, self._here() or b""
            stored, damage = StoredJournal(), Damage(1, 0)
        if damage is None:
            raise SpecError(
                f"run '{self.name}': its journal is whole; leave --from-checkpoint out, it "
                "continues as it is"
            )
        kept = text[: damage.offset]
        if damage.offset < len(stored.text):
            stored = stored.until(damage.offset)
            kept = stored.text
        lines = sift(kept)[0] if found is None else replace(found, text=kept).newest()
        aside = next(path for n in count(1) if not (path := self.folder / ASIDE.format(n)).exists())
        said = (
            f"its journal was damaged: {len(lines)} lines before that count, the whole text is in "
            f"{aside}"
        )
        return lines, stored, JournalCut(said, aside.name, text, kept)

    def open_journal(
        self, epoch: int, before: StoredJournal, cut: JournalCut | None = None
    ) -> Journal:
        """To append to. Where the run is in object storage, a plan is stored before `append`
        returns."""
        if cut is not None:
            local = LocalStorage(self.folder)
            if self.storage.remote:
                local.put(STORED_AT, self.storage.uri.encode() + b"\n")
            local.put(cut.aside, cut.text)
            self._begin_with(cut.kept)
        parts = JournalParts.of(self.storage)
        journal = Journal(self.journal, epoch, parts.last())
        if self.folder.parent.name == DEFAULT_STORAGE:
            _left_out(self.folder.parent / ".gitignore")
        journal.parts = Packing(self.storage, epoch, len(parts.names), counted=before.base)
        if self.storage.remote:
            journal.segments = Segments(self.storage, epoch, self.journal, before=before)
        return journal

    def keep(self, name: str) -> None:
        """A file of the folder goes to the run's storage too, however large it is."""
        if self.storage.remote:
            with (self.folder / name).open("rb") as file, self.storage.create(name) as stored:
                shutil.copyfileobj(file, stored, PIECE_BYTES)

    def keep_files(self, files: Mapping[str, bytes]) -> None:
        """What an export puts beside the weights goes to the run's storage."""
        for name, data in files.items():
            self.storage.put(MODEL + name, data)

    def files(self) -> dict[str, bytes]:
        """What `keep_files` has stored."""
        keys = self.storage.list(MODEL)
        return {key.removeprefix(MODEL): self.storage.get(key) for key in keys}

    def _found(self, known: JournalParts | None = None) -> _Found:
        """As of one moment: where a part was stored while this looked, it looks again."""
        parts = JournalParts.of(self.storage)
        parts = known if known is not None and known.names == parts.names else parts
        for _ in range(N_LOOKS):
            found = self._look(parts)
            now = JournalParts.of(self.storage)
            if now.names == parts.names:
                if isinstance(found, JournalDamaged):
                    raise found
                return found
            parts = now
        raise StorageFailed(
            f"{self.storage.uri_of(PARTS)}: the journal grows faster than it can be read; try again"
        )

    def _look(self, parts: JournalParts) -> _Found | JournalDamaged:
        here = self._here()
        if not self.storage.remote:
            if here is None:
                raise FileNotFoundError(self.journal)
            return _Found(parts, self._since(parts, here), StoredJournal(), str(self.journal))
        try:
            stored = read_stored(self.storage, parts.counted())
            while not stored.fits:  # its driver had been replaced when it packed the last one
                parts = parts.shorter()
                stored = read_stored(self.storage, parts.counted())
            text = self._since(parts, here or b"")
        except JournalDamaged as error:
            return error
        if text != stored.text and text.startswith(stored.text):
            return _Found(parts, text, stored, str(self.journal))
        return _Found(parts, stored.text, stored, f"{self.storage.uri}/{PREFIX}")

    def _since(self, parts: JournalParts, here: bytes) -> bytes:
        """Of the text that is here, what the last part does not hold."""
        last = parts.read(parts.names[-1])[1] if parts.names and here else b""
        return here[len(last) :] if last and here.startswith(last) else here

    def _here(self) -> bytes | None:
        """The text of the journal file here, after that of the one that is being packed."""
        texts = [_text(self.journal), _text(self.folder / CLOSED)]
        if texts[0] is None or texts[1] is None or texts[0].startswith(texts[1]):
            return texts[0] if texts[0] is not None else texts[1]
        # the same: it was closed in between
        return texts[1] if texts[1].startswith(texts[0]) else texts[1] + texts[0]

    def _begin_with(self, text: bytes) -> None:
        """The journal file, one alone, holds this text and no more."""
        if _text(self.journal) != text:
            LocalStorage(self.folder).put(JOURNAL, text)
        (self.folder / CLOSED).unlink(missing_ok=True)


def _text(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
