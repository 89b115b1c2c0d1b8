"""TensorBoard's files of a run: `tensorboard --logdir RUN/tensorboard`.

Written here, by the protocol buffers of tensorboardX, whose own writer has threads that a full disk
leaves behind.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic.observe.metrics.step_rows import COLUMNS

FOLDER = "tensorboard"
NOT_DRAWN = ("step", "at_s")  # the axes
MOST_BYTES, MOST_S = 8 << 20, 86400.0  # of one file


class TensorBoardFiles:
    """Records are only ever added; where steps are undone or resumed from, a new file says from
    which step on the older ones do not count (a session that starts there). A file that has become
    large or old is followed by a new one, and is never written again. `known`: there are older
    ones. Raises ImportError where tensorboardX is not installed, OSError where a file cannot be
    written: then nothing of that is in it."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._start, self._crc = Event, SessionLog.START, masked_crc32c
        self._folder = folder / FOLDER
        self._path: Path | None = None
        self.logged: set[str] = set()  # names that the user's code tells of steps
        self.known = self._undone = bool(self.names())  # an earlier driver's
        self._n_bytes, self._begun_s = 0, 0.0  # of the file that is written

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            values = [(one["step"], one["at_s"], one) for one in rows]
            self._write(rows[0]["step"], rows[0]["at_s"], [self._values(*one) for one in values])

    def add_values(
        self, step: int, at_s: float, values: Mapping[str, Any], *, part: str = "evaluated"
    ) -> None:
        self._write(step, at_s, [self._values(step, at_s, values, others=part)])

    def cut(self) -> None:
        """What came after the next step that is added was undone."""
        self._path, self._undone = None, self.known

    def names(self) -> list[str]:
        """The files, by their names in the run's folder."""
        return sorted(f"{FOLDER}/{path.name}" for path in self._folder.glob("events.*"))

    def _values(
        self, step: int, at_s: float, values: Mapping[str, Any], *, others: str = "evaluated"
    ) -> Any:
        event = self._event(wall_time=at_s, step=step)
        for name, value in values.items():
            if name not in NOT_DRAWN:
                part = "train" if name in COLUMNS else others
                part = "logged" if name in self.logged else part
                event.summary.value.add(tag=f"{part}/{name}", simple_value=value)
        return event

    def _write(self, step: int, at_s: float, events: Sequence[Any]) -> None:
        if self._n_bytes >= MOST_BYTES or at_s - self._begun_s >= MOST_S:
            self._path = None
        path = self._path
        if path is None:
            # the number: two of one second would have one name
            name = (
                f"events.out.tfevents.{at_s:010.0f}.{socket.gethostname()}.{len(self.names()):04d}"
            )
            head = [self._event(wall_time=at_s, file_version="brain.Event:2")]
            if self._undone:
                start = self._event(wall_time=at_s, step=step)
                start.session_log.status = self._start
                head.append(start)
            self._folder.mkdir(parents=True, exist_ok=True)
            path, events = self._folder / name, [*head, *events]
        size = self._append(path, b"".join(self._record(e.SerializeToString()) for e in events))
        if self._path is None:
            self._path, self.known, self._undone, self._begun_s = path, True, False, at_s
        self._n_bytes = size

    def _append(self, path: Path, data: bytes) -> int:
        """The size of the file after it."""
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(file).st_size
            whole = size + len(data)
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                self._path = None  # what is next goes elsewhere: nobody reads behind a torn record
                with suppress(OSError):
                    os.ftruncate(file, size)
                    if not size:
                        path.unlink()
                raise
            return whole
        finally:
            os.close(file)

    def _record(self, data: bytes) -> bytes:
        """With length and checksums, as TFRecord has them."""
        length = struct.pack("<Q", len(data))
        crcs = [struct.pack("<I", self._crc(part)) for part in (length, data)]
        return length + crcs[0] + data + crcs[1]
