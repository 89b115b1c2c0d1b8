"""RayRun: what the backend on Ray is given of a run: its name, job, pools, storage, epoch, and what
an earlier driver left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.cluster.workers.worker_actor import SESSION
from elastic.config.fingerprint import KEY
from elastic.ledger.run_folder import key_of
from elastic.types import Plan, Pool


@dataclass(frozen=True)
class RayRun:
    """What the backend needs to know of a run.

    `job`: as plain data, which its workers get. `uri`: the run's folder. `address`: of an existing
    cluster, as ray.init takes it; without meaning for the embedded one. `spared`: drills leave the
    nodes of an existing cluster alone and take their workers only.
    `attach`: a driver was here before, its actors may live; `plans`: those that they may still run,
              the newest last; `step`:
    the last one of them that is written down. `logs`: a folder for what the workers print; None =
    where Ray puts it. `digests`: step -> running digest of the sample ids, as far as earlier
    drivers knew them; `known`: URIs of checkpoints that they have committed. `default_pools`:
    nobody has said what the nodes are. `lengths`: of the datasets, as nodes have told them;
    `may_change`: they, and the program, may be others now. `begun_at_s`: when a person started it,
    None = nobody did.
    """

    name: str
    uri: str
    job: dict[str, Any]
    pools: tuple[Pool, ...]
    epoch: int = 1
    address: str = "auto"
    attach: bool = False
    plans: tuple[Plan, ...] = ()
    step: int = 0
    session: str = SESSION
    python_path: tuple[str, ...] = ()
    logs: str | None = None
    spared: bool = False
    digests: Mapping[int, str] = field(default_factory=dict)
    known: Collection[str] = ()
    train_function: bytes = b""
    default_pools: bool = False
    lengths: tuple[int, ...] = ()
    may_change: bool = False
    begun_at_s: float | None = None

    @property
    def meta(self) -> dict[str, Any]:
        """What each checkpoint says of it."""
        return {"run": self.name, KEY: self.job.get(KEY)}

    @property
    def namespace(self) -> str:
        return namespace_of(self.uri)


def namespace_of(uri: str) -> str:
    """Ray's, of the run that is stored there; it also stands for the run where the autoscaler's
    watcher counts nodes."""
    return f"elastic-{key_of(uri)}"
