"""Worker processes without a RayBackend, and what a driver does with them: one warm set, each case
is a generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic.certify.tasks import Failed, Limit, TaskRefused
from elastic.types import (
    Abort,
    Action,
    EnterPlan,
    Event,
    NodePrepared,
    Plan,
    PlanEntered,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.session_processes import SessionProcess, SessionProcesses
from elastic.worker.session.workplace import host_rendezvous

# for anything that is waited for; a worker's bound in elastic.worker.hosting.liveness
MOST_S = 60.0
MEETS_S = 30.0  # that a worker waits for another at the store of a generation
PLACED_S = 60.0  # for a place on a node of a cluster
LOOK_S = 0.02
E = TypeVar("E", bound=Event)


@dataclass
class WorkerPool:
    """Use as a `with` block; everything is gone afterwards."""

    hosted: SessionProcesses
    limit: Limit = field(default_factory=lambda: Limit.after(float("inf")))
    # of the sessions that are open now
    log: list[tuple[float, WorkerId, Event]] = field(default_factory=list)
    started_s: float = 0.0  # when the processes were started
    # where the ranks of a generation meet; dropping one frees who waits there
    stores: dict[int, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.hosted.n

    @property
    def workers(self) -> list[WorkerId]:
        return self.hosted.workers

    @property
    def entered_any(self) -> bool:
        """Has a generation been ordered since the sessions were opened?"""
        return bool(self.stores)

    def __enter__(self) -> WorkerPool:
        self.started_s = time.monotonic()
        self.hosted.begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hosted.end()
        self.stores.clear()

    # --------------------------------------------------------------------------------------- orders

    def open(self, job: Mapping[str, Any], run: str) -> None:
        """New sessions for a job, each a node of its own; those that ended are started again.
        Returns when all are prepared.

        Raises Refused where there is no place for one of them.
        """
        self.stores.clear()
        self.log.clear()
        self.hosted.renew([WorkerId(f"node{i}", 0) for i in range(self.n)])
        for i, process in enumerate(self.hosted.processes):
            self._wait_for_place(process)
            self.hosted.open(i, job, run)
        self.until(lambda: len(self.events(NodePrepared)) >= self.n, "all workers prepared")

    def _wait_for_place(self, process: SessionProcess) -> None:
        why = process.ready(min(PLACED_S, max(0.0, self.limit.left_s)))
        self.limit.look("a place for each worker")
        if why:
            raise Failed(why) if process.ended else TaskRefused(why)

    def order(self, worker: WorkerId, action: Action) -> None:
        self.hosted.order(worker, WorkerOrder(action))

    def enter(self, plan: Plan) -> None:
        """Orders the generation to its ranks and to those that only hold state."""
        rendezvous, self.stores[plan.generation] = host_rendezvous(
            plan, self.hosted.host, MOST_S, store_s=MEETS_S
        )
        for worker in rendezvous.participants:
            self.hosted.order(worker, WorkerOrder(EnterPlan(plan), rendezvous))

    def abort(self, generation: int, workers: Collection[WorkerId]) -> None:
        self.stores[generation] = None
        for worker in workers:
            self.order(worker, Abort(generation))

    # ----------------------------------------------------------------------------------------- news

    def events(self, kind: type[E], generation: int | None = None) -> list[E]:
        return [
            e
            for _, _, e in self.log
            if isinstance(e, kind) and generation in (None, getattr(e, "generation", None))
        ]

    def when(self, kind: type[Event], generation: int) -> list[float]:
        """Arrival times of such events."""
        return [
            at
            for at, _, e in self.log
            if isinstance(e, kind) and getattr(e, "generation", None) == generation
        ]

    def drain(self) -> None:
        """Takes in what has come, waiting for a moment."""
        for heard in self.hosted.collect(LOOK_S):
            if heard.said is not None:
                now_s = time.monotonic()
                self.log += [(now_s, heard.worker, event) for _, event in heard.said.messages]

    def until(
        self, holds: Callable[[], bool], what: str, most_s: float = MOST_S, *, broken: bool = False
    ) -> None:
        """Raises Failed after `most_s` or (unless `broken` is expected) when a worker fails,
        OutOfTime at the task's limit."""
        end_s = time.monotonic() + most_s
        while True:
            self.drain()
            if holds():
                return
            bad = [
                e
                for e in self.events(WorkerFailed)
                if not broken or e.kind in ("program", "layout")
            ]
            if bad:
                raise Failed(f"while waiting for '{what}': {bad[0].worker}: {bad[0].error}")
            dead = [str(worker) for worker in self.workers if self.hosted.process(worker).ended]
            if dead and not broken:
                raise Failed(f"while waiting for '{what}': the process of {', '.join(dead)} ended")
            self.limit.look(what)
            if time.monotonic() > end_s:
                raise Failed(
                    f"'{what}' did not happen within {most_s:.0f} s; the last news: {self._tail()}"
                )

    def _tail(self) -> str:
        return (
            "; ".join(f"{worker} {str(event)[:120]}" for _, worker, event in self.log[-4:])
            or "none"
        )

    def entered(self, plan: Plan) -> PlanEntered:
        """Waits for it."""
        number = plan.generation
        self.until(
            lambda: bool(self.events(PlanEntered, number)),
            f"generation {number} ({plan.layout}) entered",
        )
        return self.events(PlanEntered, number)[0]

    def stepped(self, plan: Plan, n: int) -> list[StepDone]:
        """Waits until the generation has done `n` steps."""
        number = plan.generation
        self.until(
            lambda: len(self.events(StepDone, number)) >= n,
            f"{n} steps of generation {number} ({plan.layout})",
        )
        return self.events(StepDone, number)

    def left(
        self,
        plan: Plan,
        workers: Iterable[WorkerId],
        most_s: float = MOST_S,
        *,
        broken: bool = False,
    ) -> dict[WorkerId, float]:
        """Waits until these workers have left the generation; when each did."""
        wanted, number = set(workers), plan.generation

        def done() -> dict[WorkerId, float]:
            found = [
                (w, at)
                for at, w, e in self.log
                if isinstance(e, Quiesced) and e.generation >= number
            ]
            return {w: at for w, at in reversed(found) if w in wanted}

        self.until(
            lambda: done().keys() == wanted,
            f"{len(wanted)} workers out of generation {number}",
            most_s,
            broken=broken,
        )
        return done()
