"""Where the checks with worker processes are made: one warm worker pool, and a folder that is gone
afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.certify.harness.place import Place
from elastic.certify.harness.worker_pool import WorkerPool
from elastic.certify.tasks import Limit, OutOfTime
from elastic.ledger.run_folder import RunFolder
from elastic.storage import Storage, open_storage
from elastic.worker.hosting.served_session import SERVED, SESSION
from elastic.worker.hosting.session_processes import ChildProcess, SessionProcess, SessionProcesses

if TYPE_CHECKING:
    from elastic.cluster.workers.remote_processes import ProcessSignals


def remove(storage: Storage) -> None:
    """All that lies in it; of a local one the folders too, object storage has none."""
    for key in storage.list():
        storage.delete(key)
    if not storage.remote:
        shutil.rmtree(storage.uri, ignore_errors=True)


@dataclass
class Lab:
    """Use as a `with` block. `session`: what each worker process runs, as module:class; `storage`:
    the configured one."""

    place: Place
    session: str = SESSION
    storage: str = ""
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="elastic-certify-")))
    _worker_pool: WorkerPool | None = None
    _runs: int = 0
    _hands: ProcessSignals | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()
        if self._hands is not None:
            self._hands.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def worker_pool(self, limit: Limit) -> Iterator[WorkerPool]:
        """The warm worker pool; a new one where there is none, or where the last use of it was
        aborted."""
        if self._worker_pool is None:
            self._worker_pool = self._made(limit).__enter__()
        self._worker_pool.limit = limit
        try:
            yield self._worker_pool
        except OutOfTime:
            if self._worker_pool.entered_any:
                self.drop()
            raise  # else its processes are still starting: the next task need not wait for new ones
        except BaseException:
            self.drop()
            raise

    def _made(self, limit: Limit) -> WorkerPool:
        environments = self.place.environments()
        if not self.place.address:
            here = SessionProcesses(
                len(environments), lambda i: ChildProcess(environments[i], (self.session,))
            )
            return WorkerPool(here, limit)
        from elastic.cluster.workers import remote_processes

        if self._hands is None:
            self._hands = remote_processes.ProcessSignals(self.place.seats)
        hands, seats = self._hands, self.place.seats

        def start(i: int) -> SessionProcess:
            order = remote_processes.ProcessOrder(SERVED, (self.session,), environments[i])
            return remote_processes.RemoteProcess(seats[i], hands, order)

        there = SessionProcesses(len(seats), start, remote_processes.own_address())
        return WorkerPool(there, limit)

    def make_room(self) -> None:
        """For other processes on the same GPUs: Ray gives a GPU to one at a time."""
        if self.place.address and self.place.gpus:
            self.drop()

    def drop(self) -> None:
        """Ends the processes of the worker pool."""
        if self._worker_pool is not None:
            self._worker_pool.__exit__()
            self._worker_pool = None

    @contextmanager
    def room(self, configured: bool = False) -> Iterator[tuple[str, str]]:
        """Name of a run, and its storage: the `configured` one, always on a cluster, where all
        nodes must reach it. Emptied afterwards."""
        name = f"certify-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._runs}"
        self._runs += 1
        storage = self.storage if configured or self.place.address else str(self.folder / "runs")
        try:
            yield name, storage
        finally:
            run = open_storage(f"{storage}/{name}")
            if run.remote:
                shutil.rmtree(RunFolder.of(run).folder, ignore_errors=True)
            remove(run)

    def run_folder(self) -> str:
        """A new one, on this machine's own disk."""
        self._runs += 1
        return str(self.folder / f"run-{self._runs}")
