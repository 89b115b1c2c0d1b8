"""A tracker's process that is unwell: `hangs` when it is asked to open, `hangs-full` behind that,
`dies` at once, `dies-later` after each few points. By any other name it is well."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from elastic.observe.trackers import tracker_process
from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_run import TrackedRun

HOW, MARK = sys.argv[1], Path(sys.argv[2])


class Tracker:
    def open(self, run: TrackedRun) -> int | None:
        if HOW == "hangs":
            threading.Event().wait()  # sleeps: a library that hangs
        if HOW == "dies":
            os._exit(1)
        return None

    def log(self, points: Sequence[TrackerPoint]) -> None:
        if HOW == "hangs-full":
            threading.Event().wait()  # sleeps: a library that hangs
        with MARK.with_suffix(".told").open("a") as file:
            file.writelines(f"{point.step}\n" for point in points)

    def end(self, outcome: str) -> None:
        pass


if HOW == "dies-later":
    tracker_process.AT_ONCE = 6
    write = tracker_process.write_mark

    def write_and_die(mark: Path, key: str, step: int) -> None:
        write(mark, key, step)
        if step < 18:
            os._exit(1)

    tracker_process.write_mark = write_and_die
tracker_process.LIBRARIES[HOW] = Tracker
tracker_process.main()
