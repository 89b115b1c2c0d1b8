"""MLflow. Where it stores is as its own documentation says: MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME ... A run is found again by its tag."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_run import TrackedRun

TAG = "elastic.run"
LOSS = "train/train_loss"  # each point has it
BATCH_MOST = 1000  # metrics in one request, as MLflow has it
STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowRun:
    def open(self, run: TrackedRun) -> int | None:
        # who names a folder means it, although MLflow would rather have a database
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(run.settings.get("tracking_uri"))
        name = run.settings.get("experiment") or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        known = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.key}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            history = self._client.get_metric_history(self._id, LOSS)
            return max((one.step for one in history), default=0)
        made = self._client.create_run(experiment, run_name=run.name, tags={TAG: run.key})
        self._id = made.info.run_id
        params = [Param(key, str(value)) for key, value in run.config.items()]
        self._client.log_batch(self._id, params=params)
        return 0

    def log(self, points: Sequence[TrackerPoint]) -> None:
        from mlflow.entities import Metric

        found = [
            Metric(name, value, round(point.at_s * 1000), point.step)
            for point in points
            for name, value in point.numbers.items()
        ]
        for start in range(0, len(found), BATCH_MOST):
            self._client.log_batch(self._id, metrics=found[start : start + BATCH_MOST])

    def end(self, outcome: str) -> None:
        if outcome:
            self._client.set_terminated(self._id, STATUS[outcome])
