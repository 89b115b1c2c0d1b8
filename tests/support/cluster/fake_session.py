"""A worker session without torch: steps are naps. Same interface as
elastic.worker.session.session.Session.

Job keys that steer it: `nap_s` (length of a step), `slow_quiesce_s`, `prepare_raises`, `imports`,
`prints`, `unreached` (a node and the neighbor that it does not reach when it is prepared for the
first time).
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from elastic.types import (
    Abort,
    EnterPlan,
    Event,
    Holding,
    NodePrepared,
    NodeRefused,
    Plan,
    PlanEntered,
    Prepare,
    Quiesce,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.process.beat import Beat


class FakeSession:
    def __init__(self, me: WorkerId, job: dict[str, Any], run_uri: str) -> None:
        self.me, self.job, self.run_uri = me, job, run_uri
        for name in job.get("imports", ()):
            importlib.import_module(name)
        self.lock = threading.Condition()
        self.outbox: list[tuple[int, Event]] = []
        self.n = self.generation = self.step = self.progress = self.stop_at = self.aborted = 0
        self.phase = "idle"

    def put(self, event: Event) -> None:
        with self.lock:
            self.n += 1
            self.outbox.append((self.n, event))
            self.lock.notify_all()

    def order(self, order: WorkerOrder) -> None:
        match order.action:
            case Prepare():
                self.prepare(order)
            case EnterPlan(plan):
                threading.Thread(target=self.run, args=(plan, order), daemon=True).start()
            case Quiesce(generation):
                self.stop_at = max(self.stop_at, generation)
            case Abort(generation):
                self.abort(generation)

    def prepare(self, order: WorkerOrder) -> None:
        if self.job.get("prepare_raises"):
            self.put(WorkerFailed(self.me, 0, "program", "ValueError: the program is wrong"))
        elif self.me.node_id in self.job.get("unreached", {}) and not self.n:
            neighbor = self.job["unreached"][self.me.node_id]
            self.put(
                NodeRefused(self.me.node_id, f"{neighbor} cannot be reached", neighbors=(neighbor,))
            )
        else:
            self.put(NodePrepared(self.me.node_id, (os.getpid(),)))

    def run(self, plan: Plan, order: WorkerOrder) -> None:
        assert order.rendezvous is not None
        me = order.rendezvous.participants.index(self.me)
        with self.lock:
            self.stop_at = max(self.stop_at, plan.generation - 1)
            while self.generation:
                self.lock.wait(0.02)
            self.generation, self.phase, self.step = plan.generation, "stepping", plan.resume.step
        first = me == 0
        if first:
            self.put(PlanEntered(plan.generation, self.step))
        while max(self.stop_at, self.aborted) < plan.generation:
            time.sleep(self.job.get("nap_s", 0.05))  # sleeps: a step
            self.step += 1
            self.progress += 1
            if self.job.get("prints"):
                print(f"printed in step {self.step} by {me}")
            if first:
                self.put(StepDone(plan.generation, self.step, 1.0, 8, self.job.get("nap_s", 0.05)))
        if self.stop_at >= plan.generation:
            time.sleep(self.job.get("slow_quiesce_s", 0.0))  # sleeps: a slow end
            Path(self.run_uri, f"saved-{self.me.local_rank}-{self.step}").touch()
        held = (Holding(self.me, plan.generation, me, self.step, "live"),)
        with self.lock:
            self.generation, self.phase = 0, "idle"
        self.put(Quiesced(self.me, plan.generation, self.step, held))

    def store_alone(self, epoch: int, wait_s: float) -> str | None:
        return None

    def abort(self, generation: int) -> None:
        self.aborted = max(self.aborted, generation)
        if not self.generation:
            self.put(Quiesced(self.me, generation, self.step))

    def poll(self, ack: int, wait_s: float) -> Beat:
        deadline = time.monotonic() + wait_s
        with self.lock:
            self.outbox = [(n, e) for n, e in self.outbox if n > ack]
            while not self.outbox and (left := deadline - time.monotonic()) > 0:
                self.lock.wait(left)
            return Beat(
                tuple(self.outbox),
                self.generation,
                self.phase,
                self.step,
                self.progress,
                os.getpid(),
            )

    def close(self) -> None:
        self.aborted = 1 << 30
