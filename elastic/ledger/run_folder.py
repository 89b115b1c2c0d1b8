"""A run: its storage, and the local folder with its journal file, report and curve.

Where the storage is a folder, the two are one. Where it is s3://, the driver's folder is ./elastic_runs/<run> (where that is of
a run in another storage ./elastic_runs/<run>-<hash>): the journal is written there and stored as segments; a machine without
that folder reads the segments.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from elastic.errors import JournalDamaged, SpecError
from elastic.ledger.journal import Damage, Journal, Line, read, read_text, sift
from elastic.ledger.segments import PREFIX, Segments, Stored, read_stored
from elastic.storage import LocalStorage, Storage, open_storage

DEFAULT_STORAGE = "elastic_runs"
JOURNAL = "journal.jsonl"
ASIDE = "journal-damaged-{}.jsonl"
OF_NODE = "elastic-logs-"  # and the user's number: a folder of a node, in one where everybody may write
LOGS = "logs"  # what the workers print, a file for each process
STORED_AT = "storage-uri"  # in a driver's folder: where the run really is


def key_of(uri: str) -> str:
    """Of a run, by its storage, for what runs share: a Ray cluster, a folder. Two runs in two storages may have one name."""
    place = uri if "://" in uri else os.path.realpath(uri)
    return f"{uri.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _of_another(folder: Path, uri: str) -> bool:
    """Is the driver's folder that of a run in another storage?"""
    mark = folder / STORED_AT
    return mark.read_text().strip() != uri if mark.is_file() else (folder / JOURNAL).is_file()


@dataclass(frozen=True)
class Cut:
    """Of a damaged journal: what is said of it, the file that gets the whole text, and what the journal begins with instead.
    What is stored stays, and counts no more."""

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
        """Raises SpecError where a folder says that the run is elsewhere, and another user has put that there: whoever looks at
        the run would ask that place with rights of their own."""
        if not isinstance(storage, LocalStorage):
            folder = Path(DEFAULT_STORAGE).absolute() / storage.uri.rpartition("/")[2]
            return cls(storage, folder.with_name(key_of(storage.uri)) if _of_another(folder, storage.uri) else folder)
        mark = storage.root / STORED_AT
        if not mark.is_file():
            return cls(storage, storage.root)
        uri, owner = mark.read_text().strip(), mark.lstat().st_uid
        if owner != os.getuid():
            raise SpecError(f"{mark}: user {owner} says there that the run is {uri}; if you trust that, name {uri} yourself")
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
        """Where workers write it. `here`: all run on this machine. Nodes without a folder in common keep those of their own."""
        of_node = Path(tempfile.gettempdir(), f"{OF_NODE}{os.getuid()}", self.name)
        return self.logs if here or not self.storage.remote else of_node

    def exists(self) -> bool:
        return bool(self.storage.list(PREFIX)) if self.storage.remote else self.journal.is_file()

    def lines(self) -> list[Line]:
        """The journal as far as it is known here."""
        if not self.storage.remote:
            return read(self.journal)
        stored = read_stored(self.storage)
        return read_text(self._local(stored.text) or stored.text, f"{self.storage.uri}/{PREFIX}", stored.place)

    def age_s(self) -> float:
        """Seconds since the journal was last written; between clocks of two machines only as good as they are."""
        if self.storage.remote:
            newest_s = max((self.storage.modified_s(key) for key in self.storage.list(PREFIX)[-1:]), default=0.0)
        else:
            newest_s = self.journal.stat().st_mtime
        return max(0.0, time.time() - newest_s)

    def take_over(self) -> tuple[list[Line], Stored]:
        """What earlier drivers wrote. Makes this machine's journal file begin with what is stored. Raises JournalDamaged."""
        if not self.storage.remote:
            return (read(self.journal) if self.journal.is_file() else []), Stored()
        stored = read_stored(self.storage)
        local = LocalStorage(self.folder)
        local.put(STORED_AT, self.storage.uri.encode() + b"\n")
        if self._local(stored.text) is None:
            local.put(JOURNAL, stored.text)
        return read_text(self.journal.read_bytes(), str(self.journal), stored.place), stored

    def without_damage(self) -> tuple[list[Line], Stored, Cut]:
        """Instead of `take_over`, where the journal is damaged: what stands before the damage. Nothing is written before
        `open_journal`. Raises SpecError where nothing is damaged."""
        try:
            stored = read_stored(self.storage) if self.storage.remote else Stored()
            text = self._local(stored.text) or stored.text
            damage = sift(text)[1]
        except JournalDamaged:  # a segment is missing
            text = self._local(b"") or b""
            stored, damage = Stored(), Damage(1, 0)
        if damage is None:
            raise SpecError(f"run '{self.name}': its journal is whole; leave --from-checkpoint out, it goes on as it is")
        kept = text[: damage.offset]
        if damage.offset < len(stored.text):
            stored = stored.until(damage.offset)
            kept = stored.text
        lines = sift(kept)[0]
        aside = next(path for n in count(1) if not (path := self.folder / ASIDE.format(n)).exists())
        said = f"its journal was damaged: {len(lines)} lines before that count, the whole text is in {aside}"
        return lines, stored, Cut(said, aside.name, text, kept)

    def open_journal(self, epoch: int, before: Stored, cut: Cut | None = None) -> Journal:
        """To append to. Where the run is in object storage, a plan is stored before `append` returns."""
        if cut is not None:
            local = LocalStorage(self.folder)
            if self.storage.remote:
                local.put(STORED_AT, self.storage.uri.encode() + b"\n")
            local.put(cut.aside, cut.text)
            local.put(JOURNAL, cut.kept)
        journal = Journal(self.journal, epoch)
        if self.storage.remote:
            journal.segments = Segments(self.storage, epoch, self.journal, before)
        return journal

    def keep(self, name: str) -> None:
        """A file of the folder goes to the run's storage too."""
        if self.storage.remote:
            self.storage.put(name, (self.folder / name).read_bytes())

    def _local(self, stored: bytes) -> bytes | None:
        """The text of the journal file here, where it goes on from what is stored; else None."""
        try:
            text = self.journal.read_bytes()
        except FileNotFoundError:
            return None
        return text if text.startswith(stored) else None
