"""Worker processes that may be killed, armed with faults."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, ClassVar

from support.worker.faults import Fault
from support.worker.worker_pool import Pool, _serve

from elastic.types import WorkerId


def _serve_faulty(pipe: Connection) -> None:
    from support.worker import (
        faults,  # noqa: F401 - gives the session `arm`
        loop_faults,  # noqa: F401 - gives the session `arm_loop`
    )

    _serve(pipe)


class FaultyPool(Pool):
    """`arm` puts a fault into one worker."""

    serve: ClassVar[Any] = staticmethod(_serve_faulty)

    def arm(self, worker: WorkerId, fault: Fault) -> None:
        self.call(worker, "arm", fault)

    def gone(self) -> list[WorkerId]:
        return [
            worker
            for worker, process in zip(self.workers, self.processes, strict=False)
            if not process.is_alive()
        ]
