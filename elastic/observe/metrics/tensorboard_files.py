"""TensorBoard's files of a run: `tensorboard --logdir RUN/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.observe.metrics.step_rows import COLUMNS

FOLDER = "tensorboard"
NOT_DRAWN = ("step", "at_s")  # the axes


class TensorBoardFiles:
    """Events are only ever added; where steps are undone or resumed from, a new file says from
    which step on the older ones do not count (`purge_step`). `known`: there are older ones. Raises
    ImportError where tensorboardX is not installed."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._make = SummaryWriter
        self._folder = folder / FOLDER
        self._writer: Any = None
        self.known = any(self._folder.glob("events.*"))  # an earlier driver's

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.add_values(row["step"], row["at_s"], row)
        if rows:
            self._writer.flush()

    def add_values(self, step: int, at_s: float, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            purge = step if self.known else None
            suffix = f".{len(self.names()):04d}"  # two of one second have one name otherwise
            self._writer = self._make(str(self._folder), purge_step=purge, filename_suffix=suffix)
            self.known = True
        for name, value in values.items():
            if name not in NOT_DRAWN:
                part = "train" if name in COLUMNS else "evaluated"
                self._writer.add_scalar(f"{part}/{name}", value, step, walltime=at_s)

    def cut(self) -> None:
        """What came after the next step that is added was undone."""
        self.close()

    def names(self) -> list[str]:
        """The files, by their names in the run's folder."""
        return sorted(f"{FOLDER}/{path.name}" for path in self._folder.glob("events.*"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
