"""What stands behind `ray.train` in the process of a script that is restarted, which no trainer of
Ray Train has started: report, get_checkpoint, get_context and get_preemption_info."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.train

from elastic.cluster.ray import _ray_private
from elastic.cluster.ray_train.script_checkpoints import (
    ReportedCheckpoints,
    generation_for,
    key_in,
    report_of,
)
from elastic.cluster.ray_train.script_output import REPORT_LINE
from elastic.cluster.ray_train.script_questions import NOTICE, REPORT, STORED
from elastic.config.numbers.logged_names import NAMES_MOST, number_of
from elastic.errors import ProgramError
from elastic.storage import open_storage

THERE = "report, get_checkpoint, get_context and get_preemption_info are"
REFUSED = "ray.train: '{name}' is not there for a script that is restarted; {there}"
RANKS = {
    "world_rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK",
}  # fmt: skip


class ScriptTrainWorker:
    """Its methods are what Ray Train asks of a worker. `ask`: the supervisor. `told`: the run's
    URI, the generation, whether it resumes, the newest checkpoint, as all ranks have it, and where
    a copy of it may lie."""

    def __init__(self, ask: Callable[..., Any], told: Mapping[str, Any]) -> None:
        self._ask, self._run_uri = ask, told["run_uri"]
        self._ranks = {name: int(os.environ[variable]) for name, variable in RANKS.items()}
        self._stored = ReportedCheckpoints(open_storage(self._run_uri))
        self._copies = Path(told["copies"])
        self._resumed: bool = told["resumed"]
        self._newest: str = told["checkpoint"]
        self._generation = generation_for(told["generation"], self._newest)
        self._n_reports = report_of(self._newest) if self._newest else 0
        self._names: set[str] = set()
        self._has_reported = False

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: ray.train.Checkpoint | None = None,
        **more: Any,
    ) -> None:
        """Of all ranks. Rank 0's metrics go into its output, where they are read as other lines
        are; the files of all ranks become one checkpoint."""
        folder, delete = more.pop("checkpoint_dir_name", None), self._taken(more)
        self._n_reports += 1
        if self._ranks["world_rank"] == 0 and not self._has_reported:  # all others wait for it
            with suppress(OSError):
                self._stored.remove_older(f"{self._generation:08d}")
        self._has_reported = True
        folder = folder or f"checkpoint_{self._n_reports:06d}"
        folder, n_given = self._agreed(REPORT, said=folder, given=checkpoint is not None)
        if self._ranks["world_rank"] == 0:
            # of a script that has saved otherwise nobody knows with which one it continues
            n = f" {self._n_reports}" if self._newest or not self._resumed else ""
            print(REPORT_LINE.format(n=n, told=self._numbers(metrics)), flush=True)
        if not n_given:
            return
        key = key_in(self._generation, self._n_reports, folder.replace("/", "_"))
        if checkpoint is not None:
            with checkpoint.as_directory() as place:
                self._stored.add(key, Path(place))
                if delete and place == checkpoint.path:
                    shutil.rmtree(place, ignore_errors=True)
        self._agreed(STORED, given=True)
        if self._ranks["world_rank"] == 0:
            self._stored.commit(key)
        self._newest = key

    def _taken(self, more: dict[str, Any]) -> bool:
        """Is the script's own copy to be removed? Raises RuntimeError for what has no meaning
        here. What may be uploaded later is uploaded at once."""
        mode = more.pop("checkpoint_upload_mode", None)
        delete = bool(more.pop("delete_local_checkpoint_after_upload", False))
        if getattr(mode, "name", "") == "NO_UPLOAD":
            more["checkpoint_upload_mode"] = "NO_UPLOAD"
        if refused := next((name for name, value in more.items() if value), ""):
            raise RuntimeError(
                f"ray.train.report({refused}=...) is not there for a script that is restarted; "
                "leave it out: the checkpoint's files are copied into the run's storage"
            )
        return delete

    def _numbers(self, metrics: Mapping[str, Any]) -> str:
        """What of the metrics a line of output can tell."""
        found = {}
        for name, value in metrics.items():
            with suppress(ProgramError):
                number = number_of(value, name, "")
                if name in self._names or len(self._names) < NAMES_MOST:
                    self._names.add(name)
                    found[str(name)] = value if isinstance(value, int) else number
        return json.dumps(found)

    def _agreed(self, ask: str, **more: Any) -> Any:
        if (found := self._ask(ask=ask, **more)) is None:
            raise RuntimeError("ray.train.report(): the worker of rank 0 is gone")
        return found

    def get_checkpoint(self) -> ray.train.Checkpoint | None:
        """The newest whole one."""
        if not self._newest:
            return None
        place = self._stored.local(self._newest, self._copies)
        return ray.train.Checkpoint.from_directory(place)

    def get_context(self) -> ray.train.TrainContext:
        """The ranks are those of the environment, as torchrun sets it."""
        found: ray.train.TrainContext = _ray_private.train_context(self._run_uri, self._ranks)
        return found

    def get_preemption_info(self) -> Any:
        """None, or what is known of a notice, on all ranks the same."""
        found = self._ask(ask=NOTICE)
        return found and ray.train.PreemptionInfo(found["deadline_ms"], found["ranks"])

    def is_distributed(self) -> bool:
        """False: `ray.train.torch.get_device()`, which asks it, then gives torch's current device;
        that of a worker of Ray Train is known to Ray alone."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(self._ranks["local_rank"])
        return False

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(REFUSED.format(name=name, there=THERE))
