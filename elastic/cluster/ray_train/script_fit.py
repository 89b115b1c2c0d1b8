"""Ray Train's `fit`, which blocks until the training ends, in an actor of its own beside the
driver: it can be ended at any time, with all that it has started, where a thread of the driver that
waits in Ray could not."""

from __future__ import annotations

import os
from typing import Any

import ray

from elastic.cluster.ray_train.script_job import ScriptJob

RESIZE_S = 60.0  # Ray Train's own look for more nodes; the driver restarts the group much earlier
SETTINGS = {  # of Ray Train, unless the user has set them
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # default 2: until a failure is seen
    # default 60: how long it insists on a node that is not there
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "3",
    # default 5: until get_preemption_info() tells a notice
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # the script runs in the folder that elastic was called in
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
}


class Trainer:
    """The actor. `environment`: Ray Train's settings, which it reads when it is imported."""

    def __init__(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        from elastic.cluster.ray_train import script_trainer

        self._trainer = script_trainer.trainer

    def fit(self, job: ScriptJob, settings: dict[str, Any]) -> str:
        """How it ended, "" = well."""
        try:
            self._trainer(job, settings, RESIZE_S).fit()
        except Exception as error:  # noqa: BLE001 - a boundary: the run's end must reach the journal
            return f"{type(error).__name__}: {error}"
        return ""


class Fit:
    """The driver's side. `where`: the scheduling strategy of the actor."""

    def __init__(self, where: Any) -> None:
        own = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("RAY_TRAIN_") or name in SETTINGS
        }
        actor: Any = ray.remote(Trainer)
        self._actor = actor.options(num_cpus=0, scheduling_strategy=where).remote(SETTINGS | own)
        self._end: Any = None

    @property
    def started(self) -> bool:
        return self._end is not None

    def start(self, job: ScriptJob, settings: dict[str, Any]) -> None:
        self._end = self._actor.fit.remote(job, settings)

    def error(self, wait_s: float = 0.0) -> str | None:
        """How it ended, "" = well; None = it runs, or was never started."""
        if self._end is None or not ray.wait([self._end], timeout=wait_s)[0]:
            return None
        try:
            return str(ray.get(self._end))
        except ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Ends Ray Train and its workers at once."""
        ray.kill(self._actor)
