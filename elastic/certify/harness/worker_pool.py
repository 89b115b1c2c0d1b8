"""Worker processes without a RayBackend, and what a driver does with them: one warm set, each case
is a generation."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from typing import Any, TypeVar

from elastic.certify.harness.member import Member
from elastic.certify.harness.worker_process import Opening
from elastic.certify.tasks import Failed, Limit, TaskRefused
from elastic.types import (
    Abort,
    Action,
    EnterPlan,
    Event,
    NodePrepared,
    Plan,
    PlanEntered,
    Prepare,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.session.workplace import host_rendezvous

# for anything that is waited for; a worker's bound in elastic.cluster.workers.liveness
MOST_S = 60.0
MEETS_S = 30.0  # that a worker waits for another at the store of a generation
PLACED_S = 60.0  # for a place on a node of a cluster
LOOK_S = 0.02
E = TypeVar("E", bound=Event)


@dataclass
class WorkerPool:
    """`n` workers; `start` starts the i-th. `host`: this host as they reach it. Use as a `with`
    block; everything is gone afterwards."""

    n: int
    start: Callable[[int], Member]
    host: str = "127.0.0.1"
    limit: Limit = field(default_factory=lambda: Limit.after(float("inf")))
    # of the sessions that are open now
    log: list[tuple[float, WorkerId, Event]] = field(default_factory=list)
    workers: list[WorkerId] = field(default_factory=list)
    started_s: float = 0.0  # when the processes were started
    _members: list[Member] = field(default_factory=list)
    _stores: dict[int, Any] = field(default_factory=dict)
    _serial: int = 0
    _begun: bool = False

    @property
    def entered_any(self) -> bool:
        """Has a generation been ordered since the sessions were opened?"""
        return self._begun

    def __enter__(self) -> WorkerPool:
        self.started_s = time.monotonic()
        try:
            for i in range(self.n):
                self._members.append(self.start(i))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self._members:
            member.end()
        for member in self._members:
            member.join()
            member.pipe.close()
        self._members, self._stores = [], {}

    # --------------------------------------------------------------------------------------- orders

    def open(self, job: Mapping[str, Any], run: str) -> None:
        """New sessions for a job, each a node of its own; those that ended are started again.
        Returns when all are prepared.

        Raises Refused where there is no place for one of them.
        """
        self._serial += 1
        self._begun = False
        self.log.clear()
        self._stores.clear()
        self.workers = [WorkerId(f"node{i}", 0) for i in range(self.n)]
        for i in range(self.n):
            self._wait_for_place(self._members[i])
            self.reopen(i, job, run)
        self.until(lambda: len(self.events(NodePrepared)) >= self.n, "all workers prepared")

    def _wait_for_place(self, member: Member) -> None:
        why = member.ready(min(PLACED_S, max(0.0, self.limit.left_s)))
        self.limit.look("a place for each worker")
        if why:
            raise Failed(why) if member.ended else TaskRefused(why)

    def reopen(self, i: int, job: Mapping[str, Any], run: str) -> None:
        """Worker `i` gets a new session, in a new process where the old one is gone."""
        if self._members[i].ended:
            self._members[i].pipe.close()
            self._members[i] = self.start(i)
        me = self.workers[i]
        self._members[i].send(Opening(self._serial, me, dict(job), run))
        self.order(me, Prepare(me.node_id))

    def order(self, worker: WorkerId, action: Action, rendezvous: Rendezvous | None = None) -> None:
        self._member(worker).send(WorkerOrder(action, rendezvous))

    def enter(self, plan: Plan) -> None:
        """Orders the generation to its ranks and to those that only hold state."""
        rendezvous, self._stores[plan.generation] = host_rendezvous(
            plan, self.host, MOST_S, store_s=MEETS_S
        )
        self._begun = True
        for worker in rendezvous.participants:
            self.order(worker, EnterPlan(plan), rendezvous)

    def abort(self, generation: int, workers: Iterable[WorkerId]) -> None:
        self._stores.pop(generation, None)
        for worker in workers:
            self.order(worker, Abort(generation))

    def stop(self, worker: WorkerId) -> None:
        """SIGSTOP: it hangs."""
        self._member(worker).signal(signal.SIGSTOP)

    def kill(self, worker: WorkerId) -> None:
        """SIGKILL; returns when it is gone."""
        self._member(worker).end()
        self._member(worker).join()

    def _member(self, worker: WorkerId) -> Member:
        return self._members[self.workers.index(worker)]

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
        pipes: dict[Any, WorkerId] = {
            member.pipe: self.workers[i]
            for i, member in enumerate(self._members)
            if not member.pipe.closed
        }
        ready: list[Any] = wait_for(list(pipes), timeout=LOOK_S)
        for pipe in ready:
            try:
                while pipe.poll():
                    serial, event = pipe.recv()
                    if serial == self._serial:
                        self.log.append((time.monotonic(), pipes[pipe], event))
            except (EOFError, ConnectionResetError):
                pipe.close()

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
            self._look_for_dead(what, broken)
            self.limit.look(what)
            if time.monotonic() > end_s:
                raise Failed(
                    f"'{what}' did not happen within {most_s:.0f} s; the last news: {self._tail()}"
                )

    def _look_for_dead(self, what: str, broken: bool) -> None:
        dead = [str(self.workers[i]) for i, m in enumerate(self._members) if m.ended]
        if dead and not broken:
            raise Failed(f"while waiting for '{what}': the process of {', '.join(dead)} ended")

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
