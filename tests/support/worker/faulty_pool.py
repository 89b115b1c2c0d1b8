"""Worker processes that may be killed, armed with faults."""

from __future__ import annotations

from typing import Any, ClassVar

from support.worker.faults import Fault
from support.worker.worker_pool import Pool, ServedInTests

from elastic.types import WorkerId


class ServedFaulty(ServedInTests):
    def __init__(self, put: Any) -> None:
        from support.worker import (
            faults,  # noqa: F401 - gives the session `arm`
            loop_faults,  # noqa: F401 - gives the session `arm_loop`
        )

        super().__init__(put)


class FaultyPool(Pool):
    """`arm` puts a fault into one worker."""

    served: ClassVar[type] = ServedFaulty

    def arm(self, worker: WorkerId, fault: Fault) -> None:
        self.call(worker, "arm", fault)

    def gone(self) -> list[WorkerId]:
        return [
            worker
            for worker, process in zip(self.workers, self.processes, strict=False)
            if not process.is_alive()
        ]
