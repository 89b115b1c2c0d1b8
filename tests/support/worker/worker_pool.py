"""One warm set of worker processes for a whole test session: each case is a generation (or several)
in it."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from support.waiting import until
from support.worker.forks import FORKS

from elastic.types import (
    Abort,
    Action,
    DigestPart,
    EnterPlan,
    Event,
    FormGroups,
    Plan,
    PlanEntered,
    Prepare,
    Quiesced,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.process.beat import Beat
from elastic.worker.session.workplace import host_rendezvous

# of a generation's groups: what a survivor waits where nothing tells it that a peer is gone
TIMEOUT_S = 60.0
WAIT_S = 300.0  # for anything that comes by itself, on a machine however busy


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import threading

    from elastic.worker.session.session import Session

    session: Session | None = None
    lock = threading.Lock()

    def forward(mine: Session, serial: int) -> None:
        ack = 0
        while not mine._closed:
            beat = mine.poll(ack, 0.5)
            for number, event in beat.messages:
                ack = number
                with lock:
                    pipe.send((serial, mine.me, event))

    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        if name == "open":
            if session is not None:
                session.close()
                session._thread.join(TIMEOUT_S)  # torch's default group is one for the process
            serial, *arguments = arguments
            session = Session(*arguments)
            threading.Thread(target=forward, args=(session, serial), daemon=True).start()
        elif name == "order" and session is None:
            continue  # one that was started over
        elif name == "exit":
            os._exit(0)
        elif name == "patch":
            getattr(importlib.import_module(arguments[0]), arguments[1])()
        elif name == "beat":
            assert session is not None
            beat = session.poll(0, 0.0)
            with lock:
                pipe.send((serial, session.me, beat))
        else:
            getattr(session, name)(*arguments)


@dataclass
class Pool:
    """`n` processes; worker i stands on node `nodes[i]`."""

    n: int
    pids: list[int] = field(default_factory=list)
    log: list[tuple[float, WorkerId, Event]] = field(default_factory=list)
    serial: int = 0  # of the sessions now open: what older ones still say is not heard
    serve: ClassVar[Any] = staticmethod(_serve)

    def __post_init__(self) -> None:
        self.pipes, self.processes = [], []
        for i in range(self.n):
            self._start(i)
        self.stores: dict[int, Any] = {}
        self.workers: list[WorkerId] = []

    def _start(self, i: int) -> None:
        mine, theirs = FORKS.Pipe()
        process = FORKS.Process(target=self.serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.pipes.insert(i, mine)
        self.processes.insert(i, process)
        self.pids.insert(i, process.pid)

    def open(
        self, job: dict[str, Any], run: Path, per_node: int = 1, n: int | None = None
    ) -> list[WorkerId]:
        """New sessions for a job; the processes stay, but for those that have died. What still runs
        is aborted: else it would wait for those that are through with it until the groups'
        timeout."""
        self.revive()
        for pipe in self.pipes if self.stores else ():
            with suppress(OSError):
                pipe.send(("order", (WorkerOrder(Abort(max(self.stores))),)))
        self.serial += 1
        self.log.clear()
        self.stores.clear()
        n = n or self.n
        self.workers = [WorkerId(f"node{i // per_node}", i % per_node) for i in range(n)]
        for pipe, worker in zip(self.pipes, self.workers, strict=False):
            pipe.send(("open", (self.serial, worker, job, str(run))))
            pipe.send(("order", (WorkerOrder(Prepare(worker.node_id)),)))
        self.wait(
            lambda: sum(type(e).__name__ == "NodePrepared" for _, _, e in self.log) == n, "prepare"
        )
        return self.workers

    def order(self, worker: WorkerId, action: Action, rendezvous: Rendezvous | None = None) -> None:
        self.call(worker, "order", WorkerOrder(action, rendezvous))

    def call(self, worker: WorkerId, name: str, *arguments: Any) -> None:
        """What a test lets happen there."""
        self.pipes[self.workers.index(worker)].send((name, arguments))

    def patch(self, worker: WorkerId, function: Any) -> None:
        """Runs a function of a test module in the worker's process, before any later call."""
        self.call(worker, "patch", function.__module__, function.__name__)

    def enter(
        self, plan: Plan, leave_out: Iterable[WorkerId] = (), formed: Rendezvous | None = None
    ) -> None:
        """Orders the generation; `leave_out`: workers that are not told; `formed`: what `form` has
        returned."""
        self._meet(EnterPlan(plan), formed or self._rendezvous(plan), leave_out)

    def form(self, plan: Plan, leave_out: Iterable[WorkerId] = ()) -> Rendezvous:
        """Orders that the groups of the generation are made ahead."""
        return self._meet(FormGroups(plan), self._rendezvous(plan), leave_out)

    def _rendezvous(self, plan: Plan) -> Rendezvous:
        rendezvous, self.stores[plan.generation] = host_rendezvous(plan, "127.0.0.1", TIMEOUT_S)
        return rendezvous

    def _meet(
        self, action: Action, rendezvous: Rendezvous, leave_out: Iterable[WorkerId]
    ) -> Rendezvous:
        for worker in rendezvous.participants:
            if worker not in tuple(leave_out):
                self.order(worker, action, rendezvous)
        return rendezvous

    def beats(self, of: Sequence[WorkerId] = ()) -> dict[WorkerId, Any]:
        """What each worker (of those) says of itself just now."""
        asked, of = len(self.log), of or self.workers
        for worker in of:
            self.call(worker, "beat")
        told = (  # noqa: E731
            lambda: {worker: said for _, worker, said in self.log[asked:] if isinstance(said, Beat)}
        )
        self.wait(lambda: len(told()) == len(of), "beats")
        return told()

    def stuck(self, workers: Sequence[WorkerId]) -> None:
        """Waits until each of them stands in a collective, as in the look before, or has left its
        generation."""

        def look() -> bool:
            beats = self.beats(workers).values()
            return all(
                not b.generation or b.doing == "others" or b.where.startswith("nccl_like.py")
                for b in beats
            )

        until(look, "workers that wait in collectives")

    def drain(self) -> None:
        from multiprocessing.connection import wait

        for pipe in wait([p for p in self.pipes if not p.closed], timeout=0.02):
            try:
                while pipe.poll():
                    serial, worker, event = pipe.recv()
                    if serial == self.serial:
                        self.log.append((time.monotonic(), worker, event))
            except (EOFError, ConnectionResetError):
                pipe.close()

    def wait(self, done: Any, what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self.drain()
            bad = [e for e in self.events(WorkerFailed) if e.kind == "program"]
            if bad and what != "failure":
                raise AssertionError(f"while waiting for {what}: {bad[0].error}")
            if time.monotonic() > deadline:
                tail = "\n".join(str(e)[:300] for _, _, e in self.log[-12:])
                dead = [str(worker) for i, worker in enumerate(self.workers) if self._is_dead(i)]
                raise AssertionError(
                    f"no {what} within {timeout_s} s; processes that died: {dead}; last "
                    f"messages:\n{tail}"
                )

    def events(self, kind: type, generation: int | None = None) -> list[Any]:
        return [
            e
            for _, _, e in self.log
            if isinstance(e, kind) and (generation is None or e.generation == generation)
        ]

    def entered(self, generation: int) -> PlanEntered:
        self.wait(lambda: self.events(PlanEntered, generation), f"PlanEntered({generation})")
        return self.events(PlanEntered, generation)[0]

    def quiesced(self, generation: int, n: int) -> list[Quiesced]:
        self.wait(
            lambda: len({e.worker for e in self.events(Quiesced, generation)}) >= n,
            f"{n} x Quiesced({generation})",
        )
        return self.events(Quiesced, generation)

    def digests(self, generation: int) -> list[DigestPart]:
        """Those of a transition, from all who took part: they come behind the steps, the last of a
        run at its end."""
        found = lambda: self.events(DigestPart, generation)  # noqa: E731
        self.wait(
            lambda: found() and len(found()) == found()[0].n_participants,
            f"digests of generation {generation}",
        )
        return found()

    def kill(self, worker: WorkerId) -> None:
        process = self.processes[self.workers.index(worker)]
        process.kill()
        process.join()

    def _is_dead(self, i: int) -> bool:
        """Or it is about to be: its end of the pipe is closed."""
        return self.pipes[i].closed or not self.processes[i].is_alive()

    def revive(self) -> None:
        """New processes in the place of those that have died."""
        self.drain()
        for i in range(self.n):
            if self._is_dead(i):
                self.pipes.pop(i).close()
                process = self.processes.pop(i)
                process.kill()
                process.join()
                self.pids.pop(i)
                self._start(i)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
