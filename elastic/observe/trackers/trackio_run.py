"""Trackio. Where it stores is as its own documentation says: TRACKIO_DIR, or a Space of Hugging
Face."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_run import TrackedRun


class TrackioRun:
    def open(self, run: TrackedRun) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=run.settings.get("project") or run.job,
            name=run.key,
            space_id=run.settings.get("space_id"),
            config=dict(run.config),
            resume="allow",
            embed=False,
            # the machine of the driver is none of those that train
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, points: Sequence[TrackerPoint]) -> None:
        for point in points:
            self._run.log(dict(point.numbers), step=point.step)

    def end(self, outcome: str) -> None:
        self._run.finish()
