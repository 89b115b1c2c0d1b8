"""Weights & Biases. Where and how it stores is as its own documentation says: WANDB_MODE,
WANDB_DIR, WANDB_API_KEY ..."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_run import TrackedRun


class WandbRun:
    """It takes no step that is not above its newest one."""

    def open(self, run: TrackedRun) -> None:
        # its service, written in Go: fewer threads wake each other up, ten times a second
        os.environ.setdefault("GOMAXPROCS", "1")
        import wandb

        mine = run.settings
        # the machine of the driver is none of those that train
        quiet = wandb.Settings(
            console="off", x_disable_stats=True, disable_git=True, disable_code=True
        )
        self._run: Any = wandb.init(
            id=run.key,
            resume="allow",
            name=None if "WANDB_NAME" in os.environ else run.name,
            project=mine.get("project") or (None if "WANDB_PROJECT" in os.environ else run.job),
            entity=mine.get("entity"),
            group=mine.get("group"),
            tags=mine.get("tags") or None,
            config=dict(run.config),
            settings=quiet,
        )

    def log(self, points: Sequence[TrackerPoint]) -> None:
        for point in points:
            self._run.log({**point.numbers, "_timestamp": point.at_s}, step=point.step)

    def end(self, outcome: str) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)
