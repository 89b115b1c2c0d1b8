"""Appends lines to a file in a thread of its own: who writes is never held up for long by a disk
that is full or silent."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from elastic.errors import unwritten
from elastic.storage.local import NO_LINKS

log = logging.getLogger(__name__)

WAIT_S = 10.0  # the longest that a write holds its caller up
AGAIN_S = 1.0  # between tries
CLOSE_MOST_S = 10.0
MOST_BYTES = 256 << 20  # of lines that wait in memory


class Appender:
    """Lines that cannot be written wait in memory, and follow in order once they can be. `end`: the
    length of the file with all of them in it. `trouble`: why the last try failed, None = it did
    not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.end = os.fstat(self._fd).st_size
        self._owed: deque[tuple[bytes, bool]] = deque()  # text, and whether it is to be synced
        self._owed_bytes = self._n_taken = self._n_written = 0
        self._change, self.closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def owes(self) -> bool:
        """Some of it is not in the file yet."""
        return bool(self._owed)

    def write(self, data: bytes, sync: bool) -> None:
        """Waits until it is in the file (`sync`: on the disk), at most WAIT_S; not at all while
        there is trouble. Raises what `close` raises where too much waits already."""
        with self._change:
            if self._owed_bytes + len(data) > MOST_BYTES:
                text = (
                    f"{self.path}: {len(self._owed)} lines wait to be written, and memory holds "
                    "no more"
                )
                raise unwritten(self.trouble or TimeoutError("it does not answer"), text)
            self._owed.append((data, sync))
            self._owed_bytes += len(data)
            self.end += len(data)
            self._n_taken += 1
            mine = self._n_taken
            self._change.notify_all()
            if self.trouble is None and not self._change.wait_for(
                lambda: self._n_written >= mine or self.trouble, WAIT_S
            ):
                self._failed(TimeoutError(f"it has not answered for {WAIT_S:.0f} s"))

    def begin_anew(self, closed: Path) -> None:
        """What is in the file, all of it written, stands in `closed` from then on; the file is
        empty. Raises OSError, and all is as it was."""
        with self._change:
            assert not self._owed
            fresh = closed.with_name(f".tmp-{closed.name}")
            fd = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                _swap(self.path, closed, fresh)
            except OSError:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(fresh)
                raise
            os.close(self._fd)
            self._fd, self.end = fd, 0

    def close(self) -> None:
        """Raises StorageFull where the disk is full, LostContact where it does not answer: the file
        lacks its end."""
        if self.closed:
            return
        with self._change:
            self.closed = True
            self._change.notify_all()
        self._thread.join(CLOSE_MOST_S)
        if self._owed:
            error = self.trouble or TimeoutError("it does not answer")
            raise unwritten(
                error, f"{self.path}: its last {len(self._owed)} lines could not be written"
            )
        os.close(self._fd)

    # -------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._owed or self.closed)
                if not self._owed:
                    return
                last_try = self.closed
            try:
                self._write_first()
            except OSError as error:
                with self._change:
                    self._failed(error)
                    if last_try:
                        return
                    self._change.wait_for(lambda: self.closed, AGAIN_S)

    def _write_first(self) -> None:
        data, sync = self._owed[0]
        while data:
            n = os.write(self._fd, data)
            data = data[n:]
            with self._change:  # a disk that fills up takes a part of it
                self._owed[0] = (data, sync)
                self._owed_bytes -= n
        if sync:
            os.fsync(self._fd)
        with self._change:
            self._owed.popleft()
            self._n_written += 1
            if self.trouble is not None and not self._owed:
                log.warning("%s: it can be written again, and nothing is missing in it", self.path)
                self.trouble = None
            self._change.notify_all()

    def _failed(self, error: OSError) -> None:
        if self.trouble is None:
            log.warning(
                "%s cannot be written (%s): its lines wait in memory, training continues",
                self.path,
                error,
            )
        self.trouble = error
        self._change.notify_all()


def _swap(path: Path, closed: Path, fresh: Path) -> None:
    """`path` becomes `closed`, `fresh` becomes `path`. Readers see the text in one of the two at
    each moment; where the file system has no hard links, for a moment in `closed` alone. Raises
    OSError, and all is as it was."""
    linked = True
    try:
        os.link(path, closed)
    except OSError as error:
        if error.errno in NO_LINKS:
            os.rename(path, closed)
            linked = False
        elif error.errno != errno.EEXIST or not os.path.samefile(path, closed):
            raise
    try:
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            os.unlink(closed) if linked else os.rename(closed, path)
        raise
