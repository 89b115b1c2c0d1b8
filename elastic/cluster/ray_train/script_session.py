"""The session of a worker whose script is restarted: the script runs in a process below this one,
with torchrun's environment, and a new one runs for each generation. Thread-safe, as the training
session is, and takes the same orders.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic.cluster.ray_train.rank_process import GPUS, RankProcess
from elastic.types import Abort, EnterPlan, Job, NodePrepared, Prepare, Quiesce, Quiesced, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process.beat import Beat, Outbox

if TYPE_CHECKING:
    from elastic.worker.profile.node_load import LoadReports

GRACE_S, GRACE_LOSS_S = 30.0, 3.0  # from SIGTERM to SIGKILL, unless the order says another time


class ScriptSession:
    """See the module. What a script cannot do (a copy, other shares) is ordered in vain."""

    def __init__(self, me: WorkerId, job: dict[str, Any], run_uri: str) -> None:
        self.me, self.job = me, Job.from_plain(job)
        self._run_uri = run_uri.rstrip("/")
        self._lock = threading.Condition()
        self._outbox = Outbox(self._lock)
        self._put = self._outbox.put
        self._aborted = 0  # generations up to this one are
        self._process: RankProcess | None = None  # of the newest generation
        # steps between two lines of the script, and before each of its epochs
        self._gap, self._epochs = 1, [0]
        self._load: LoadReports | None = None
        self._closed = False
        threading.Thread(target=self._begin, name="load", daemon=True).start()

    def _begin(self) -> None:
        """What takes a second to import: the first generation needs the one, and nothing waits for
        the other."""
        import_module("elastic.worker.process_groups.rendezvous")
        if self.me.local_rank:
            return
        reports = import_module("elastic.worker.profile.node_load").LoadReports
        on_gpu = bool(os.environ.get(GPUS))
        with self._lock:
            if not self._closed:
                self._load = reports(
                    self.me.node_id, self._put, on_gpu=on_gpu, worker_bytes=self._script_bytes
                )

    def _script_bytes(self) -> int:
        """Of the newest script's own process; 0 = there is none."""
        process = self._process
        return process.resident_bytes() if process is not None else 0

    def order(self, order: WorkerOrder) -> None:
        """Takes an order; its outcome is a message."""
        match order.action:
            case Prepare():
                self._put(NodePrepared(self.me.node_id, (os.getpid(),)))
            case EnterPlan():
                threading.Thread(
                    target=self._enter, args=(order,), name="script", daemon=True
                ).start()
            case Quiesce(generation) as asked:
                if (process := self._running(generation)) is not None:
                    process.quiesce(asked, asked.grace_s or GRACE_S)
            case Abort(generation):
                with self._lock:
                    self._aborted = max(self._aborted, generation)
                if (process := self._running(generation)) is not None:
                    process.end(GRACE_LOSS_S)
            case _:
                pass

    def _running(self, generation: int) -> RankProcess | None:
        """The process of a generation that is to end. Where there is none that runs, this worker
        has left it already."""
        with self._lock:
            process = self._process
            if process is not None and not process.over:
                return process if process.plan.generation <= generation else None
            self._put(Quiesced(self.me, generation, process.step if process is not None else 0))
            return None

    def _enter(self, order: WorkerOrder) -> None:
        """Runs the script; what runs still is ended first."""
        assert isinstance(order.action, EnterPlan) and order.rendezvous is not None
        plan = order.action.plan
        process = RankProcess(
            self.me,
            self.job,
            self._run_uri,
            plan,
            order.rendezvous,
            self._put,
            gap=self._gap,
            epochs=self._epochs,
        )
        with self._lock:
            before, self._process = self._process, process
            if self._load is not None:
                self._load.n_nodes = len(plan.nodes)
            aborted = plan.generation <= self._aborted
        if aborted:
            process.end(0.0)
        if before is not None and not before.over:
            before.end(GRACE_S)
            before.join()
        process.run()
        self._gap = process.gap

    def poll(self, ack: int, wait_s: float) -> Beat:
        """Messages after `ack`, as soon as there are any; older ones are forgotten."""
        with self._lock:
            messages, process = self._outbox.after(ack, wait_s), self._process
        if process is None or process.over:
            return Beat(messages, 0, "idle", process.step if process else 0, 0, os.getpid())
        # its own progress: whether the script gets on says nothing of who supervises it
        generation, step = process.plan.generation, process.step
        return Beat(messages, generation, "supervising", step, 0, os.getpid())

    def store_alone(self, epoch: int, wait_s: float) -> str | None:
        """What it has saved is where the script has put it."""
        return None

    def close(self, wait_s: float = 0.0) -> None:
        """Ends the script."""
        with self._lock:
            self._closed, load = True, self._load
        if load is not None:
            load.close()
        if (process := self._process) is not None:
            process.end(0.0)
            process.join(wait_s)
