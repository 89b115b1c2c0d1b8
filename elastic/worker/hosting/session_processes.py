"""Sessions in processes that connections lead to, as a driver sees them: start, order, hear, stop,
kill. What the processes are is the caller's: children of this one, actors of a cluster, ranks that
somebody else has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol

from elastic.types import Action, Prepare, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.served_session import SERVED, Opening, serve


class SessionProcess(Protocol):
    """`pipe`: its messages, closed at its end."""

    pipe: Any

    @property
    def ended(self) -> bool: ...
    def ready(self, timeout_s: float) -> str:
        """Waits until it has its place; why it has none, '' = it has."""
        return ""

    def send(self, word: Any) -> None: ...
    def signal(self, number: int) -> None:
        return

    def end(self) -> None:
        """SIGKILL, also where it is stopped."""
        return

    def join(self) -> None:
        """Waits until it is gone, and lets go of it."""
        return


class ChildProcess(SessionProcess):
    """A process of this host. `served`: what it makes of the words, as module:name; `start`: how
    multiprocessing starts it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: tuple[str, ...] = (),
        *,
        served: str = SERVED,
        start: Any = None,
    ) -> None:
        made = start or get_context("spawn")
        mine, theirs = made.Pipe()
        self.process = made.Process(
            target=serve,
            args=(theirs, dict(environment), served),
            kwargs={"arguments": arguments},
            daemon=True,
        )
        # what is started here never sees Ctrl-C: this process ends it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.pipe: Any = mine

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def send(self, word: Any) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()

    def join(self) -> None:
        self.process.join()


@dataclass(frozen=True)
class Heard:
    """What a worker's session has said; None = its process has hung up."""

    worker: WorkerId
    said: Any


@dataclass
class SessionProcesses:
    """`n` processes; `start` starts the i-th. `host`: this one as they reach it. `workers`: who the
    processes are; there may be more processes than workers. Beats of earlier sessions are not
    heard."""

    n: int
    start: Callable[[int], SessionProcess]
    host: str = "127.0.0.1"
    workers: list[WorkerId] = field(default_factory=list)
    processes: list[SessionProcess] = field(default_factory=list)
    serial: int = 0

    def begin(self) -> None:
        try:
            for i in range(self.n):
                self.processes.append(self.start(i))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        for process in self.processes:
            process.end()
        for process in self.processes:
            process.join()
            process.pipe.close()
        self.processes = []

    # --------------------------------------------------------------------------------------- orders

    def renew(self, workers: Sequence[WorkerId]) -> None:
        """From now on the processes are those workers, each to be opened."""
        self.serial += 1
        self.workers = list(workers)

    def open(self, i: int, job: Mapping[str, Any], run: str) -> None:
        """Worker `i` gets a new session, in a new process where the old one is gone."""
        self.revive([i])
        me = self.workers[i]
        self.processes[i].send(Opening(self.serial, me, dict(job), run))
        self.order(me, WorkerOrder(Prepare(me.node_id)))

    def revive(self, which: Collection[int]) -> None:
        """New processes in the place of those that have died, or have hung up."""
        for i in which:
            if self.is_gone(i):
                self.processes[i].end()
                self.processes[i].join()
                self.processes[i].pipe.close()
                self.processes[i] = self.start(i)

    def is_gone(self, i: int) -> bool:
        return self.processes[i].ended or self.processes[i].pipe.closed

    def process(self, worker: WorkerId) -> SessionProcess:
        return self.processes[self.workers.index(worker)]

    def order(self, worker: WorkerId, order: Any) -> bool:
        """Gives a worker an order; False = there is no such worker any more."""
        if worker not in self.workers or self.is_gone(self.workers.index(worker)):
            return False
        try:
            self.process(worker).send(order)
        except OSError:  # it ends just now: its pipe says so
            return False
        return True

    def order_all(self, action: Action) -> None:
        for worker in self.workers:
            self.order(worker, WorkerOrder(action))

    def address(self) -> str:
        return self.host

    def shared(self, order: WorkerOrder, n: int) -> WorkerOrder:
        return order

    def stop(self, worker: WorkerId) -> None:
        """SIGSTOP: it hangs."""
        self.process(worker).signal(signal.SIGSTOP)

    def kill(self, worker: WorkerId) -> None:
        """SIGKILL; returns when it is gone."""
        self.process(worker).end()
        self.process(worker).join()

    # ----------------------------------------------------------------------------------------- news

    def living(self) -> list[WorkerId]:
        return [worker for i, worker in enumerate(self.workers) if not self.is_gone(i)]

    def collect(self, wait_s: float) -> list[Heard]:
        """What has come, waiting for the first at most so long."""
        pipes = {
            process.pipe: worker
            for worker, process in zip(self.workers, self.processes, strict=False)
            if not process.pipe.closed
        }
        found: list[Heard] = []
        ready: list[Any] = wait_for(list(pipes), timeout=wait_s)
        for pipe in ready:
            try:
                while pipe.poll():
                    said = pipe.recv()
                    if said.serial == self.serial:
                        found.append(Heard(pipes[pipe], said.what))
            except (EOFError, OSError):
                pipe.close()
                found.append(Heard(pipes[pipe], None))
        return found
