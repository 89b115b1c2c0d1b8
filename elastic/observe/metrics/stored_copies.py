"""Copies of files that grow, in the storage of a run that is no folder: of a run of weeks all of
them together are sent a few times, and not once a minute."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.ledger.run_folder import RunFolder

SMALL_BYTES = 1 << 20  # up to which a file is sent whenever it has changed
GROWN = 1.1  # times what was sent: then a larger one is sent
OLD_S = 6 * 3600.0  # after which it is sent, where it has changed at all


@dataclass(frozen=True)
class _Sent:
    n_bytes: int
    written_ns: int
    at_s: float  # monotonic


class StoredCopies:
    """`older`: files that were there before this driver, and are not written any more."""

    def __init__(self, run: RunFolder, older: Sequence[str] = ()) -> None:
        self._run, self._older = run, set(older)
        self._sent: dict[str, _Sent] = {}

    def send(self, names: Iterable[str], *, last: bool = False) -> OSError | None:
        """Those that are due; `last`: all that have changed. Why one of them was not taken: it is
        due the next time."""
        found = None
        for name in names:
            try:
                self._send(name, last)
            except FileNotFoundError:
                pass  # it could not be written yet, or somebody has removed it
            except OSError as error:
                found = error
        return found

    def _send(self, name: str, last: bool) -> None:
        seen = (self._run.folder / name).stat()
        now = _Sent(seen.st_size, seen.st_mtime_ns, time.monotonic())
        if name in self._older:
            if self._stored(name) == now.n_bytes:
                self._sent[name] = now
            self._older.discard(name)
        sent = self._sent.get(name)
        if sent is None or _is_due(sent, now, last):
            self._run.keep(name)
            self._sent[name] = now

    def _stored(self, name: str) -> int:
        """Bytes; -1 = it is not there."""
        try:
            return self._run.storage.size(name)
        except FileNotFoundError:
            return -1


def _is_due(sent: _Sent, now: _Sent, last: bool) -> bool:
    if (sent.n_bytes, sent.written_ns) == (now.n_bytes, now.written_ns):
        return False
    grown = not sent.n_bytes <= now.n_bytes < GROWN * sent.n_bytes
    return last or now.n_bytes <= SMALL_BYTES or grown or now.at_s - sent.at_s >= OLD_S
