"""The closed parts of a journal: packed without loss, in the run's storage, each with the State
that it ends with.

`journal-parts/<number>-<epoch>.xz` holds the text of a part: a head line, then lines of one form
column by column, all of it compressed (xz, which has a checksum).
`journal-parts/<number>-<epoch>.state` is one journal line that holds the State after it; of these
the newest are kept. Of two parts with one number that of the newer epoch counts.
"""

from __future__ import annotations

import json
import logging
import lzma
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from zlib import crc32

from elastic.errors import JournalDamaged, SpecError
from elastic.ledger.journal import NO_LINE, SEAL, SEALED, Line, crc_of, newest_of, parse_state
from elastic.ledger.segments import AGAIN_S, CLOSE_MOST_S, GO_ON, counts_of, remove_covered
from elastic.storage import Storage

log = logging.getLogger(__name__)

PREFIX = "journal-parts/"
VERSION = 1
PART_BYTES = 8 << 20  # of text: a resume reads and folds about so much
UNPACKED_MOST_BYTES = 1 << 30  # of a part, which storage that was away has let grow
DICTIONARY_MOST_BYTES = 128 << 20  # that its head may ask of whoever unpacks it; preset 6: 9 MB
TOO_LARGE = f"it stands for more than {UNPACKED_MOST_BYTES >> 20} MiB"
KEPT_STATES = 3
_NAME = re.compile(re.escape(PREFIX) + r"(\d{8})-(\d{8})\.(xz|state)")
# what differs between lines of one form
_TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|"[0-9a-f]{8,}"')
_HOLE, _NEWLINE = b"\0", b"\n"


# ------------------------------------------------------------------------------------------ packing


def pack(text: bytes, counted: dict[str, int] | None = None) -> bytes:
    """Whole lines, compressed. `counted`: epoch -> segments that this part and those before it
    stand for."""
    head = {
        "v": VERSION,
        "n_bytes": len(text),
        "crc": crc32(text),
        "counted": counted or {},
        "forms": None,
    }
    if _HOLE in text or not text.endswith(_NEWLINE):
        body = text
    else:
        head["forms"], body = _columns(text)
    whole = json.dumps(head).encode() + _NEWLINE + body
    if max(len(text), len(whole)) > UNPACKED_MOST_BYTES:
        raise ValueError(TOO_LARGE)  # its segments stay, and hold it
    return lzma.compress(whole, preset=6)


def _columns(text: bytes) -> tuple[list[tuple[int, int, bool]], bytes]:
    """Per form: how many lines, values in each, and whether their checksum follows from the
    rest."""
    numbers: dict[tuple[bytes, bool], int] = {}
    rows: list[list[list[bytes]]] = []
    order = []
    for line in text[:-1].split(_NEWLINE):
        seal = SEAL.search(line)
        sealed = seal is not None and crc_of(line[: seal.start()] + b"}") == seal[1].decode()
        body = line[: seal.start()] if sealed and seal is not None else line
        form = (_TOKEN.sub(_HOLE, body), sealed)
        number = numbers.setdefault(form, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(_TOKEN.findall(body))
        order.append(b"%d" % number)
    out = list[bytes]()
    for (form_text, _), found in zip(numbers, rows, strict=True):
        out.append(form_text)
        for column in zip(*found, strict=True):
            out += column
    forms = [
        (len(found), len(found[0]), sealed)
        for (_, sealed), found in zip(numbers, rows, strict=True)
    ]
    return forms, _NEWLINE.join(out + order)


def unpack(data: bytes) -> tuple[dict[str, int], bytes]:
    """`counted` and the text. Raises ValueError when it is not as it was packed, SpecError when a
    newer version packed it."""
    try:
        line, _, body = _decompressed(data).partition(_NEWLINE)
        head = json.loads(line)
        if head["v"] > VERSION:
            raise SpecError(
                f"journal part: version {head['v']} is newer than {VERSION}, the newest that this "
                "elastic reads"
            )
        text = body if head["forms"] is None else _joined(head["forms"], body.split(_NEWLINE))
        if (len(text), crc32(text)) != (head["n_bytes"], head["crc"]):
            raise ValueError("its checksum is another")
        return counts_of(head["counted"]), text
    except (
        lzma.LZMAError,
        EOFError,
        KeyError,
        TypeError,
        IndexError,
        StopIteration,
        RecursionError,
    ) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decompressed(data: bytes) -> bytes:
    """A few bytes may stand for any number. Raises LZMAError, ValueError."""
    one = lzma.LZMADecompressor(lzma.FORMAT_XZ, DICTIONARY_MOST_BYTES)
    text = one.decompress(data, UNPACKED_MOST_BYTES)
    if one.unused_data:
        raise ValueError("something stands behind it")
    if not one.eof:
        raise ValueError(TOO_LARGE if len(text) == UNPACKED_MOST_BYTES else "it ends too early")
    return text


def _joined(forms: list[tuple[int, int, bool]], rows: list[bytes]) -> bytes:
    at, found = 0, list[Iterator[bytes]]()
    for n_lines, n_values, sealed in forms:
        if (
            not 0 < n_lines <= len(rows)
            or not 0 <= n_values <= len(rows)
            or at + n_lines * n_values >= len(rows)
        ):
            raise ValueError("its head counts lines that are not there")
        form = rows[at].replace(b"%", b"%%").replace(_HOLE, b"%s")
        columns = [rows[at + 1 + k * n_lines : at + 1 + (k + 1) * n_lines] for k in range(n_values)]
        at += 1 + n_lines * n_values
        values = zip(*columns, strict=True) if n_values else repeat((), n_lines)
        found.append(_lines(form, values, sealed))
    lines, n_bytes = list[bytes](), 0
    for number in rows[at:]:
        lines.append(next(found[int(number)]) + _NEWLINE)
        n_bytes += len(lines[-1])
        if n_bytes > UNPACKED_MOST_BYTES:
            raise ValueError(TOO_LARGE)
    return b"".join(lines)


def _lines(form: bytes, values: Iterable[tuple[bytes, ...]], sealed: bool) -> Iterator[bytes]:
    for row in values:
        text = form % row
        yield text + SEALED.format(crc_of(text + b"}")).encode() if sealed else text


# --------------------------------------------------------------------------------------- in storage


@dataclass(frozen=True)
class Name:
    number: int
    epoch: int

    def key(self, what: str) -> str:
        return f"{PREFIX}{self.number:08d}-{self.epoch:08d}.{what}"


@dataclass(frozen=True)
class JournalParts:
    """Those of a run, as they were listed. `states`: of which of them there is the State."""

    storage: Storage
    names: tuple[Name, ...] = ()
    states: frozenset[Name] = frozenset()
    # the newest that was read
    _texts: dict[Name, tuple[dict[str, int], bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: Storage) -> JournalParts:
        """Raises JournalDamaged where one is missing."""
        found = [match for key in storage.list(PREFIX) if (match := _NAME.fullmatch(key))]
        newest: dict[int, Name] = {}
        for name in sorted(
            (Name(int(m[1]), int(m[2])) for m in found if m[3] == "xz"), key=lambda name: name.epoch
        ):
            newest[name.number] = name
        for number in range(len(newest)):
            if number not in newest:
                raise JournalDamaged(
                    f"{storage.uri_of(PREFIX)}: part {number} of the journal is missing; {GO_ON}"
                )
        names = tuple(newest[number] for number in sorted(newest))
        states = {Name(int(m[1]), int(m[2])) for m in found if m[3] == "state"}
        return cls(storage, names, frozenset(states & set(names)))

    def read(self, name: Name) -> tuple[dict[str, int], bytes]:
        """`counted` and the text of a part. Raises JournalDamaged."""
        if name not in self._texts:
            try:
                found = unpack(self.storage.get(name.key("xz")))
            except (ValueError, FileNotFoundError) as error:
                where = self.storage.uri_of(name.key("xz"))
                raise JournalDamaged(
                    f"{where}: it was altered after it was written ({error}); {GO_ON}"
                ) from error
            self._texts.clear()
            self._texts[name] = found
        return self._texts[name]

    def newest_state(self) -> tuple[Line | None, str, int]:
        """The newest State that is whole, the checksum of the line before, and how many parts it
        stands for."""
        for name in reversed([name for name in self.names if name in self.states]):
            try:
                return *parse_state(self.storage.get(name.key("state"))), name.number + 1
            except (ValueError, OSError) as error:
                where = self.storage.uri_of(name.key("state"))
                log.warning(
                    "%s is damaged (%s): an older one counts, with the lines since", where, error
                )
        return None, NO_LINE, 0

    def last(self) -> str:
        """Checksum of the last line in them."""
        lines = self.read(self.names[-1])[1].split(_NEWLINE) if self.names else []
        return newest_of(lines) or NO_LINE

    def counted(self) -> dict[str, int]:
        """Epoch -> segments that they stand for."""
        return self.read(self.names[-1])[0] if self.names else {}

    def shorter(self) -> JournalParts:
        """Without the last one."""
        return JournalParts(self.storage, self.names[:-1], self.states)


class Packing:
    """Packs what the journal has closed and puts it into the run's storage; tries again until it
    can. `number`: of the next part; `counted`: what the parts before stand for."""

    def __init__(
        self, storage: Storage, epoch: int, number: int, *, counted: dict[str, int]
    ) -> None:
        self.most_bytes = PART_BYTES
        self._storage, self._epoch, self._number, self._counted = storage, epoch, number, counted
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    @property
    def free(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def begin(self, path: Path, line: Callable[[], str], counted: dict[str, int]) -> None:
        name = Name(self._number, self._epoch)
        self._number += 1
        self._thread = threading.Thread(
            target=self._run, args=(name, path, line, counted), name="pack-journal", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(CLOSE_MOST_S)

    def _run(
        self, name: Name, path: Path, line: Callable[[], str], counted: dict[str, int]
    ) -> None:
        said = False
        while True:
            try:
                self._pack(name, path, line, counted=counted)
                return
            except Exception as error:  # noqa: BLE001 - the text is whole in its file; retried
                if not said:
                    log.warning("%s: it cannot be packed yet (%s)", path, error)
                said = True
            if self._done.wait(AGAIN_S):
                return

    def _pack(
        self, name: Name, path: Path, line: Callable[[], str], *, counted: dict[str, int]
    ) -> None:
        self._storage.put(name.key("xz"), pack(path.read_bytes(), counted))
        self._storage.put(name.key("state"), line().encode())
        path.unlink(missing_ok=True)  # a driver that took over meanwhile has put it aside
        before, self._counted = self._counted, counted
        try:
            self._tidy(before)
        except Exception as error:  # noqa: BLE001 - the next part does it
            log.warning("%s: what is packed was not removed yet (%s)", self._storage.uri, error)

    def _tidy(self, counted: dict[str, int]) -> None:
        """`counted`: of the parts before the newest: a driver that was replaced may have packed
        that."""
        states = [key for key in self._storage.list(PREFIX) if key.endswith(".state")]
        for key in states[:-KEPT_STATES]:
            self._storage.delete(key)
        remove_covered(self._storage, counted)
