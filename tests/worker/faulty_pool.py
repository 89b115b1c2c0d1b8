"""Worker processes that may be killed: a dead one is replaced by a fork of a process that has torch imported."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from faults import Fault
from worker_pool import Pool, _serve

from elastic.types import WorkerId

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["faults", "loop_faults", "worker_pool"])


def _serve_faulty(pipe: Connection) -> None:
    import faults  # noqa: F401 - gives the session `arm`
    import loop_faults  # noqa: F401 - gives the session `arm_loop`

    _serve(pipe)


class FaultyPool(Pool):
    """`arm` puts a fault into one worker."""

    def _start(self, spawn: Any, i: int) -> None:
        mine, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve_faulty, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.pipes.insert(i, mine)
        self.processes.insert(i, process)
        self.pids.insert(i, process.pid)

    def arm(self, worker: WorkerId, fault: Fault) -> None:
        self.call(worker, "arm", fault)

    def gone(self) -> list[WorkerId]:
        return [worker for worker, process in zip(self.workers, self.processes, strict=False) if not process.is_alive()]
