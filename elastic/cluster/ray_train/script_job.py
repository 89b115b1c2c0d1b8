"""What a script that is restarted is: its file, what it needs, and where its run lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.cluster.backend.ray_run import namespace_of
from elastic.cluster.ray_train.script_state import Needs


@dataclass(frozen=True)
class ScriptJob:
    """What to run. `uri`: the run's folder. `logs`: where each rank's output goes. `ray_storage`:
    Ray Train's own folder."""

    name: str
    file: str
    args: tuple[str, ...]
    cwd: str
    asks_ray: bool
    needs: Needs
    uri: str
    logs: str
    ray_storage: str
    address: str = ""
    drill: tuple[Mapping[str, Any], ...] = ()
    max_nodes: int | None = None

    @property
    def namespace(self) -> str:
        return namespace_of(self.uri)

    @property
    def uses_gpus(self) -> bool:
        return any(pool.accelerator_type != "CPU" for pool in self.needs.pools)
