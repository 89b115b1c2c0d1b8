"""One warm set of worker processes for a whole test session: each case is a generation (or several)
in it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from support.waiting import until
from support.worker.forks import FORKS
from support.worker.prepared_once import VARIABLE, folder, prepare_once

from elastic.certify.harness.place import Place
from elastic.types import (
    Abort,
    Action,
    DigestPart,
    EnterPlan,
    Event,
    FormGroups,
    Plan,
    PlanEntered,
    Quiesced,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.hosting.served_session import Said, ServedSession
from elastic.worker.hosting.session_processes import ChildProcess, SessionProcesses
from elastic.worker.process.beat import Beat
from elastic.worker.session.workplace import host_rendezvous

# of a generation's groups: what a survivor waits where nothing tells it that a peer is gone
TIMEOUT_S = 60.0
WAIT_S = 300.0  # for anything that comes by itself, on a machine however busy

ON_GPU = "ELASTIC_TEST_GPU"  # `shared`: all workers on the first GPU, through NCCL's sockets


def environment_of(i: int) -> dict[str, str]:
    """Of worker i of a pool: on the CPU, also on a machine that has GPUs, unless it is asked for
    them."""
    own = {"OMP_NUM_THREADS": "1", VARIABLE: folder()}
    if os.environ.get(ON_GPU) != "shared":
        return {"CUDA_VISIBLE_DEVICES": ""} | own
    shared = Place("one-gpu", i + 1, ("0",)).environments()[i]
    return shared | own | {"NCCL_HOSTID": f"{os.getpid()}-{i}"}


@dataclass(frozen=True)
class Call:
    """What a test lets happen in a worker's process."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A beat that was asked for."""

    beat: Beat


class ServedInTests(ServedSession):
    def __init__(self, put: Any) -> None:
        gc.freeze()  # what was there before the fork is not looked at again, and so not copied
        super().__init__(put)
        prepare_once()

    def __call__(self, word: Any) -> None:
        if not isinstance(word, Call):
            super().__call__(word)
        elif word.name == "patch":
            getattr(import_module(word.arguments[0]), word.arguments[1])()
        elif word.name == "beat":
            self.put(Said(self.serial, Asked(self.session.poll(0, 0.0))))
        else:
            getattr(self.session, word.name)(*word.arguments)


@dataclass
class Pool:
    """`n` processes; worker i stands on node `nodes[i]`."""

    n: int
    log: list[tuple[float, WorkerId, Event]] = field(default_factory=list)
    hosted: SessionProcesses = field(init=False)
    # where the ranks of a generation meet; dropping one frees who waits there
    stores: dict[int, Any] = field(default_factory=dict)
    served: ClassVar[type] = ServedInTests

    def __post_init__(self) -> None:
        name = f"{self.served.__module__}:{self.served.__qualname__}"
        self.hosted = SessionProcesses(
            self.n, lambda i: ChildProcess(environment_of(i), served=name, start=FORKS)
        )
        self.hosted.begin()

    @property
    def workers(self) -> list[WorkerId]:
        return self.hosted.workers

    @property
    def processes(self) -> list[Any]:
        return [one.process for one in self.hosted.processes]  # type: ignore[attr-defined]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def open(
        self, job: dict[str, Any], run: Path, per_node: int = 1, n: int | None = None
    ) -> list[WorkerId]:
        """New sessions for a job; the processes stay, but for those that have died. What still runs
        is aborted: else it would wait for those that are through with it until the groups'
        timeout."""
        self.revive()
        self.rest()
        self.log.clear()
        n = n or self.n
        self.stores.clear()
        self.hosted.renew([WorkerId(f"node{i // per_node}", i % per_node) for i in range(n)])
        for i in range(n):
            self.hosted.open(i, job, str(run))
        self.wait(
            lambda: sum(type(e).__name__ == "NodePrepared" for _, _, e in self.log) == n, "prepare"
        )
        return self.workers

    def rest(self) -> None:
        """What still runs is aborted: it would take its time from whatever comes next."""
        if self.stores:
            self.hosted.order_all(Abort(max(self.stores)))

    def order(self, worker: WorkerId, action: Action, rendezvous: Rendezvous | None = None) -> None:
        self.hosted.order(worker, WorkerOrder(action, rendezvous))

    def call(self, worker: WorkerId, name: str, *arguments: Any) -> None:
        """What a test lets happen there."""
        self.hosted.process(worker).send(Call(name, arguments))

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
        self, action: EnterPlan | FormGroups, rendezvous: Rendezvous, leave_out: Iterable[WorkerId]
    ) -> Rendezvous:
        left_out = set(leave_out)
        for worker in rendezvous.participants:
            if worker not in left_out:
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
        for heard in self.hosted.collect(0.02):
            now_s, said = time.monotonic(), heard.said
            events = (
                [said.beat]
                if isinstance(said, Asked)
                else [event for _, event in said.messages]
                if said is not None
                else []
            )
            self.log += [(now_s, heard.worker, event) for event in events]

    def wait(self, done: Any, what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self.drain()
            bad = [e for e in self.events(WorkerFailed) if e.kind == "program"]
            if bad and what != "failure":
                raise AssertionError(f"while waiting for {what}: {bad[0].error}")
            if time.monotonic() > deadline:
                tail = "\n".join(str(e)[:300] for _, _, e in self.log[-12:])
                dead = [
                    str(worker) for i, worker in enumerate(self.workers) if self.hosted.is_gone(i)
                ]
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
        self.hosted.kill(worker)

    def revive(self) -> None:
        """New processes in the place of those that have died."""
        self.drain()
        self.hosted.revive(range(self.n))

    def close(self) -> None:
        self.hosted.end()
        self.stores.clear()
