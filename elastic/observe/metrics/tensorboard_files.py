"""TensorBoard's files of a run: `tensorboard --logdir RUN/tensorboard`.

Written here, by the protocol buffers of tensorboardX, whose own writer has threads that a full disk
leaves behind.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.observe.metrics.step_rows import COLUMNS

FOLDER = "tensorboard"
NOT_DRAWN = ("step", "at_s")  # the axes


class TensorBoardFiles:
    """Records are only ever added; where steps are undone or resumed from, a new file says from
    which step on the older ones do not count (a session that starts there). `known`: there are
    older ones. Raises ImportError where tensorboardX is not installed, OSError where a file cannot
    be written."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._start, self._crc = Event, SessionLog.START, masked_crc32c
        self._folder = folder / FOLDER
        self._path: Path | None = None
        self.logged: set[str] = set()  # names that the user's code tells of steps
        self.known = bool(self.names())  # an earlier driver's

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
        self._path = None

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
        if self._path is None:
            # the number: two of one second would have one name
            name = (
                f"events.out.tfevents.{at_s:010.0f}.{socket.gethostname()}.{len(self.names()):04d}"
            )
            head = [self._event(wall_time=at_s, file_version="brain.Event:2")]
            if self.known:
                start = self._event(wall_time=at_s, step=step)
                start.session_log.status = self._start
                head.append(start)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path, self.known, events = self._folder / name, True, [*head, *events]
        data = b"".join(self._record(event.SerializeToString()) for event in events)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)

    def _record(self, data: bytes) -> bytes:
        """With length and checksums, as TFRecord has them."""
        length = struct.pack("<Q", len(data))
        crcs = [struct.pack("<I", self._crc(part)) for part in (length, data)]
        return length + crcs[0] + data + crcs[1]
