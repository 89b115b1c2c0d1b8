"""The journal of a run in storage that cannot be appended to: whole pieces of it, as objects that
are only ever created.

`journal/<epoch>-<first>-<last>.jsonl` holds the segments first .. last of the driver of that epoch:
a head line, then journal lines. Sixty segments become one object, sixty such objects the next
larger one, so that a run of weeks is read in a few hundred requests. The head of an epoch's first
segment says how many segments of each older epoch its driver had read; what an older driver stored
after that does not count.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastic.errors import (
    JournalDamaged,
    LostContact,
    SpecError,
    StorageDamaged,
    StorageFailed,
    StorageRefused,
)
from elastic.storage import Storage

log = logging.getLogger(__name__)

PREFIX = "journal/"
VERSION = 1
_NAME = re.compile(re.escape(PREFIX) + r"([0-9]{8})-([0-9]{8})-([0-9]{8})\.jsonl")
NEWLINE = b"\n"
EVERY_S = 10.0
FAN = 60  # so many segments become one object
N_LOOKS = 5  # an object may be replaced by a larger one between list and get
N_READERS = 8
# the longest that a plan change waits for storage; the workers tell the next driver of a plan
# without line
WAIT_S = 10.0
AGAIN_S = 2.0  # between tries
CLOSE_MOST_S = 15.0
GO_ON = (
    "its checkpoints are whole: `elastic run` with this --run-name and --from-checkpoint sets the "
    "journal aside, keeps what stands before the damage, and resumes from the newest checkpoint"
)


@dataclass(frozen=True)
class Span:
    """Segments first .. last of an epoch: the name of an object."""

    epoch: int
    first: int
    last: int

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.epoch:08d}-{self.first:08d}-{self.last:08d}.jsonl"

    @property
    def n(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class SegmentHead:
    """First line of an object. `n_bytes`: of each segment in it; `before`: older epoch -> its
    segments that count."""

    v: int
    epoch: int
    first: int
    n_bytes: tuple[int, ...]
    before: dict[str, int]


@dataclass(frozen=True)
class Piece:
    """One segment of what was read, and the object that it is in: the pieces of an object follow
    each other."""

    uri: str
    epoch: int
    n_bytes: int


@dataclass(frozen=True)
class StoredJournal:
    """What storage holds of a journal after its closed parts. `counted`: epoch -> segments of it
    that count; `base`: those of them that the parts stand for; `fits`: drivers that came after had
    read these."""

    text: bytes = b""
    counted: dict[str, int] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    base: dict[str, int] = field(default_factory=dict)
    fits: bool = True

    def place(self, offset: int) -> str:
        """Which line of which object stands there, for a message; '' = it is not stored."""
        at, begin, uri = 0, 0, ""
        for piece in self.pieces:
            begin, uri = (begin if piece.uri == uri else at), piece.uri
            at += piece.n_bytes
            if offset < at:
                # the first is the head
                return f" ({uri}, line {self.text.count(NEWLINE, begin, offset) + 2})"
        return ""

    def until(self, offset: int) -> StoredJournal:
        """The segments that end there or before: the others count no more, and stay where they
        are."""
        kept, at = list[Piece](), 0
        for piece in self.pieces:
            if at + piece.n_bytes > offset:
                break
            kept.append(piece)
            at += piece.n_bytes
        counted = Counter(self.base) + Counter(str(piece.epoch) for piece in kept)
        return StoredJournal(self.text[:at], dict(counted), tuple(kept), self.base)


def read_stored(storage: Storage, base: dict[str, int] | None = None) -> StoredJournal:
    """All segments that count after `base`, joined. A last one that is missing or not whole is left
    out. Raises JournalDamaged for a gap."""
    hole: JournalDamaged | None = None
    looked: list[Span] = []
    for _ in range(N_LOOKS):
        spans = _spans(storage.list(PREFIX))
        if hole is not None and spans == looked:
            raise hole
        try:
            return _join(storage, spans, base or {})
        except FileNotFoundError:
            hole = None
        except JournalDamaged as error:  # or objects were merged while they were listed
            hole, looked = error, spans
    raise StorageFailed(
        f"{storage.uri_of(PREFIX)}: its objects change faster than they can be read; try again"
    )


def _spans(keys: Sequence[str]) -> list[Span]:
    found = []
    for key in keys:
        if match := _NAME.fullmatch(key):
            found.append(Span(*map(int, match.groups())))
    return found


def _join(storage: Storage, spans: list[Span], base: dict[str, int]) -> StoredJournal:
    """The newest epoch whose first segment can be read says which older ones count."""
    least = max(map(int, base), default=0)
    for epoch in sorted({span.epoch for span in spans if span.epoch >= least}, reverse=True):
        begin = base.get(str(epoch), 0)
        row = _row([span for span in spans if span.epoch == epoch], begin)
        pieces = _pieces(storage, row, last_may_be_torn=True)
        if not pieces:
            continue
        before = pieces[0][0].before
        older = sorted((int(older), n) for older, n in before.items())
        found = [
            item
            for number, n in older
            for item in _of_older(storage, spans, number, wanted=(base.get(str(number), 0), n))
        ]
        found += _segments(storage, pieces)
        counted = before | {str(epoch): begin + sum(len(head.n_bytes) for head, _ in pieces)}
        fits = all(counted.get(known, 0) >= n for known, n in base.items())
        return StoredJournal(
            b"".join(text for _, text in found),
            counted,
            tuple(piece for piece, _ in found),
            base,
            fits,
        )
    return StoredJournal(counted=dict(base), base=base)


def remove_covered(storage: Storage, counted: dict[str, int]) -> None:
    """Removes the segments that closed parts stand for."""
    for span in _spans(storage.list(PREFIX)):
        if span.last < counted.get(str(span.epoch), 0):
            storage.delete(span.key)


def _of_older(
    storage: Storage, spans: list[Span], epoch: int, *, wanted: tuple[int, int]
) -> list[tuple[Piece, bytes]]:
    """Segments wanted[0] .. wanted[1] - 1 of an epoch."""
    begin, n = wanted
    row = [
        span
        for span in _row([span for span in spans if span.epoch == epoch], begin)
        if span.first < n
    ]
    if sum(span.n for span in row) < n - begin:
        raise JournalDamaged(
            f"{storage.uri_of(PREFIX)}: of epoch {epoch}, segments before the {n}th are missing; "
            f"{GO_ON}"
        )
    return _segments(storage, _pieces(storage, row, last_may_be_torn=False))[: max(0, n - begin)]


def _segments(
    storage: Storage, pieces: Sequence[tuple[SegmentHead, bytes]]
) -> list[tuple[Piece, bytes]]:
    found = []
    for head, body in pieces:
        uri, at = (
            storage.uri_of(Span(head.epoch, head.first, head.first + len(head.n_bytes) - 1).key),
            0,
        )
        for n in head.n_bytes:
            found.append((Piece(uri, head.epoch, n), body[at : at + n]))
            at += n
    return found


def _row(spans: Sequence[Span], at: int) -> list[Span]:
    """Objects of one epoch that follow each other from segment `at` on; the larger ones where there
    are several."""
    spans = [span for span in spans if span.first >= at]
    largest: dict[int, Span] = {}
    for span in spans:
        if span.first not in largest or span.last > largest[span.first].last:
            largest[span.first] = span
    row: list[Span] = []
    while at in largest:
        row.append(largest[at])
        at = largest[at].last + 1
    beyond = [span for span in spans if span.first > at]
    if beyond:
        raise JournalDamaged(
            f"journal segment {at} of epoch {beyond[0].epoch} is missing, and {beyond[0].key} is "
            f"there; {GO_ON}"
        )
    return row


def _pieces(
    storage: Storage, row: Sequence[Span], last_may_be_torn: bool
) -> list[tuple[SegmentHead, bytes]]:
    with ThreadPoolExecutor(N_READERS) as pool:
        texts = list(pool.map(lambda span: _text(storage, span), row))
    found = []
    for i, (span, text) in enumerate(zip(row, texts, strict=True)):
        try:
            found.append(_parsed(text, span))
        except ValueError as error:
            if last_may_be_torn and i == len(row) - 1:
                break
            raise JournalDamaged(
                f"{storage.uri_of(span.key)}: {error}; it was altered; {GO_ON}"
            ) from error
    return found


def _text(storage: Storage, span: Span) -> bytes:
    try:
        return storage.get(span.key)
    except StorageDamaged:
        return b""  # read as not whole


def _parsed(text: bytes, span: Span) -> tuple[SegmentHead, bytes]:
    """Raises ValueError when it is not whole, SpecError when a newer version wrote it."""
    line, _, body = text.partition(NEWLINE)
    try:
        data = json.loads(line)
    except RecursionError as error:
        raise ValueError("its head is too deep") from error
    if not isinstance(data, dict) or not isinstance(data.get("v"), int):
        raise ValueError("its head is not that of a journal segment")
    if data["v"] > VERSION:
        raise SpecError(
            f"{span.key}: version {data['v']} is newer than {VERSION}, the newest that this "
            "elastic reads"
        )
    try:
        head = SegmentHead(
            data["v"],
            data["epoch"],
            data["first"],
            tuple(data["n_bytes"]),
            counts_of(data["before"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"its head lacks {error}") from error
    if not all(type(n) is int and n >= 0 for n in head.n_bytes):
        raise ValueError("its head gives lengths that are none")
    if (head.epoch, head.first, len(head.n_bytes)) != (span.epoch, span.first, span.n) or sum(
        head.n_bytes
    ) != len(body):
        raise ValueError("its head does not fit its name and length")
    return head, body


def counts_of(data: object) -> dict[str, int]:
    """Epoch -> how many of its segments count. Raises ValueError for what is none."""
    if not isinstance(data, dict) or not all(
        re.fullmatch("[0-9]{1,8}", e) and type(n) is int and n >= 0 for e, n in data.items()
    ):
        raise ValueError("its head does not say which segments count")
    return data


class Segments:
    """Stores what is appended to the local journal file: at once when told to, else every `every_s`
    seconds (EVERY_S).

    `before`: what was stored when this driver took the run over; the file begins with exactly that
    text.
    """

    def __init__(
        self,
        storage: Storage,
        epoch: int,
        path: Path,
        *,
        before: StoredJournal,
        every_s: float | None = None,
    ) -> None:
        self._storage, self._epoch, self._path, self._before = storage, epoch, path, before
        self._every_s = EVERY_S if every_s is None else every_s
        self._at = len(before.text)
        self._next, self._working = 0, threading.Lock()
        # objects that stand, and where their text is in the file
        self._kept: list[tuple[Span, int, int]] = []
        self.trouble: Exception | None = None  # why what is in the file could not be stored
        self._change, self._wake, self._done = (
            threading.Condition(),
            threading.Event(),
            threading.Event(),
        )
        self._thread = threading.Thread(target=self._follow, name="elastic-segments", daemon=True)
        self._thread.start()

    def store(self, to: int) -> bool:
        """Whole lines up to byte `to` of the file are in storage when it returns True. False =
        storage does not take them now, or not within WAIT_S: they are stored when it does. Raises
        SpecError where another driver writes the journal."""
        if self.trouble is None:
            with self._change:
                self._wake.set()
                self._change.wait_for(lambda: self._at >= to or self.trouble is not None, WAIT_S)
        return self.stored(to)

    def stored(self, to: int) -> bool:
        """The same, without waiting."""
        if isinstance(self.trouble, SpecError) and not isinstance(self.trouble, StorageRefused):
            raise self.trouble
        return self._at >= to

    def begin_anew(self, swap: Callable[[], None]) -> dict[str, int] | None:
        """`swap` lets the file, which is stored to its end, start over, while nobody reads it:
        epoch -> segments that hold what it was. None = not now, and it goes on."""
        if not self._working.acquire(blocking=False):
            return None
        try:
            swap()
            self._at, self._kept = 0, []
            return self._before.counted | {str(self._epoch): self._next}
        finally:
            self._working.release()

    def soon(self) -> None:
        """Do not wait for the next regular time."""
        self._wake.set()

    def close(self) -> None:
        """Stores what is left. Raises LostContact where that is not possible within
        CLOSE_MOST_S."""
        self._done.set()
        self._wake.set()
        self._thread.join(CLOSE_MOST_S)
        if self._thread.is_alive() or self.trouble is not None:
            self.stored(0)
            why = self.trouble or f"{self._storage.uri} does not answer"
            raise LostContact(
                f"{why}; the journal's last lines are only in {self._path}; run it again from here"
            )

    # -------------------------------------------------------------------------------- in the thread

    def _follow(self) -> None:
        while True:
            self._wake.wait(self._every_s if self.trouble is None else AGAIN_S)
            self._wake.clear()
            last = self._done.is_set()
            try:
                with self._working:
                    self._store()
                    if not last:
                        self._merge()
            except Exception as error:  # noqa: BLE001 - retried; who must be sure looks at `stored`
                self._tell(error)
            else:
                self._tell(None)
            if last:
                return

    def _tell(self, trouble: Exception | None) -> None:
        where = f"{self._storage.uri}/{PREFIX}"
        if trouble is not None and self.trouble is None:
            log.warning("%s: no journal can be stored (%s): training continues", where, trouble)
        elif trouble is None and self.trouble is not None:
            log.warning("%s: the journal is stored again, and nothing is missing in it", where)
        with self._change:
            self.trouble = trouble
            self._change.notify_all()

    def _store(self) -> None:
        text = self._text(self._at, None)
        text = text[: text.rfind(b"\n") + 1]
        while text:
            span = Span(self._epoch, self._next, self._next)
            n = (
                len(text)
                if self._storage.put(span.key, self._packed(span, [text]), if_absent=True)
                else self._known(span, text)
            )
            self._kept.append((span, self._at, self._at + n))
            self._next += 1
            with self._change:
                self._at += n
                self._change.notify_all()
            text = text[n:]

    def _known(self, span: Span, text: bytes) -> int:
        """Length of a segment that was stored by a try whose answer was lost. Raises SpecError when
        it is another's."""
        _, body = _parsed(self._storage.get(span.key), span)
        if not body or not text.startswith(body):
            raise SpecError(
                f"{self._storage.uri_of(span.key)}: another driver writes the journal of this epoch"
            )
        return len(body)

    def _merge(self) -> None:
        """The last FAN objects of one size become one, however large they are."""
        while len(self._kept) >= FAN and len({kept[0].n for kept in self._kept[-FAN:]}) == 1:
            last = self._kept[-FAN:]
            span = Span(self._epoch, last[0][0].first, last[-1][0].last)
            texts = [self._text(start, end) for _, start, end in last]
            if last[0][0].n > 1:
                heads = [_parsed(self._storage.get(kept.key), kept)[0] for kept, _, _ in last]
                sizes = [n for head in heads for n in head.n_bytes]
            else:
                sizes = [len(text) for text in texts]
            self._storage.put(span.key, self._packed(span, texts, sizes))
            self._kept[-FAN:] = [(span, last[0][1], last[-1][2])]
            with suppress(OSError):  # the larger one counts: the next closed part removes them
                for kept, _, _ in last:
                    self._storage.delete(kept.key)

    def _packed(
        self, span: Span, texts: Sequence[bytes], sizes: Sequence[int] | None = None
    ) -> bytes:
        head = SegmentHead(
            VERSION, span.epoch, span.first, tuple(sizes or map(len, texts)), self._before.counted
        )
        return b"\n".join(
            [json.dumps(asdict(head), separators=(",", ":")).encode(), b"".join(texts)]
        )

    def _text(self, start: int, end: int | None) -> bytes:
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(end - start)
