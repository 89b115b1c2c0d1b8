"""The Ray actor around one worker session: passes orders on, fences them by the driver's epoch, and
ends itself when orphaned.

Nothing here imports torch: the environment that NCCL needs is set first, then the session's module
is imported.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from elastic.cluster.ray import processes
from elastic.cluster.workers.output import CALLS, Output, file_of
from elastic.errors import ElasticError, SpecError
from elastic.types import (
    DigestPart,
    EnterPlan,
    Event,
    FormGroups,
    NodePrepared,
    Plan,
    Quiesce,
    Quiesced,
    StepDone,
    WorkerId,
    WrongNumbers,
)
from elastic.types.orders import WorkerOrder
from elastic.version import versions
from elastic.worker.hosting.served_session import imported
from elastic.worker.process.environment import settle

log = logging.getLogger(__name__)

SESSION = "elastic.worker.session.session:Session"
MAX_CONCURRENCY = 6  # one long poll, the others for orders
STEPS_KEPT = 500  # for the next driver
FINDINGS, FINDINGS_KEPT = (DigestPart, WrongNumbers), 16
PLANS_KEPT = 16  # likewise
ORPHAN_LEAVE_S = 120.0  # an orphan that has not stopped by then exits as it is


@dataclass(frozen=True)
class WorkerSetup:
    """What an actor needs to build its session. `outlives`: the actor is detached and ends itself
    when orphaned. `logs`: a folder for what it prints; None = where Ray puts it. `ray_id`: of its
    node."""

    me: WorkerId
    incarnation: int
    pool: str
    job: dict[str, Any]
    run_uri: str
    epoch: int
    session: str = SESSION
    python_path: tuple[str, ...] = ()
    orphan_lease_s: float = 900.0
    outlives: bool = False
    logs: str | None = None
    train_function: bytes = b""  # of an ElasticTrainer, instead of the job's script
    ray_id: str = ""


@dataclass(frozen=True)
class WorkerInfo:
    """What a new driver asks an actor that it finds."""

    me: WorkerId
    incarnation: int
    pool: str
    pid: int
    prepared: bool
    generation: int
    # of what must be the same in all processes of a run; () = an older one's
    versions: tuple[tuple[str, str], ...] = ()
    ray_id: str = ""  # of its node


class Worker:
    """See the module. Methods run in several threads at once; the session is thread-safe."""

    def __init__(self, setup: WorkerSetup) -> None:
        if not setup.job.get("restarted"):  # a script has the environment of torchrun
            settle()  # before torch is imported
        for folder in reversed((setup.job.get("folder", ""), *setup.python_path)):
            if folder and folder not in sys.path:
                sys.path.insert(0, folder)
        processes.end_with(processes.raylet())
        self.output = _output(setup)
        # embedded: the others train on the same cores
        self.stands_back = not setup.outlives and processes.stand_back()
        self.setup, self.epoch = setup, setup.epoch
        self.session = _imported(setup.session)(setup.me, setup.job, setup.run_uri)
        if self.output is not None:
            folder = self.output.path.parent
            self.session.calls_file = file_of(folder, str(setup.me), os.getpid(), end=CALLS)
        if setup.train_function:  # each start of the function is another copy of it
            from elastic.cluster.workers import train_function

            train_function.keep_as_they_are()
            data = setup.train_function
            self.session.train_function = lambda: train_function.loaded(data)
        self.lock = threading.Lock()
        self.versions = tuple(versions().items())
        self.prepared = False
        self.plans: deque[Plan] = deque(maxlen=PLANS_KEPT)
        self.ordered, self.left = 0, 0  # newest generation that was ordered, that was left
        self.polled_at = time.monotonic()
        self.steps: deque[tuple[int, Event]] = deque(maxlen=STEPS_KEPT)
        self.findings: deque[tuple[int, Event]] = deque(maxlen=FINDINGS_KEPT)
        self.told_epoch = setup.epoch
        if setup.outlives:
            threading.Thread(target=self._watch_driver, name="orphan-watch", daemon=True).start()

    def worker_info(self, epoch: int) -> WorkerInfo:
        self._fence(epoch)
        setup = self.setup
        return WorkerInfo(
            setup.me, setup.incarnation, setup.pool, os.getpid(), self.prepared, self.ordered,
            self.versions, setup.ray_id,
        )  # fmt: skip

    def newest_plans(self, epoch: int) -> tuple[Plan, ...]:
        """That it was given, the newest last: a driver may have given one while storage did not
        take its line."""
        self._fence(epoch)
        return tuple(self.plans)

    def order(self, epoch: int, order: WorkerOrder) -> None:
        """To the session. Of those to enter a generation, or to make its groups, only the first
        counts."""
        self._fence(epoch)
        action = order.action
        if isinstance(action, EnterPlan | FormGroups) and action.plan.generation <= self.ordered:
            return
        if isinstance(action, EnterPlan):
            self._begin(action.plan)
        self.session.order(order)

    def hear(self) -> Any:
        """A neighbor that is being admitted measures its link to here: a Door. That is no word of
        the driver."""
        from elastic.cluster.workers.neighbor_links import open_door

        return open_door(self.setup.me.node_id)

    def poll(self, epoch: int, ack: int, wait_s: float) -> Any:
        """The session's Beat. A driver writes down what it hears up to a second late, and later
        where storage is away: its successor hears the newest steps again, and what was found of
        their content."""
        self._fence(epoch)
        beat = self.session.poll(ack, wait_s)
        self.polled_at = time.monotonic()
        if self.output is not None and (said := self.output.take()):
            beat = replace(beat, said=said)
        for _, event in beat.messages:
            self.prepared |= isinstance(event, NodePrepared)
            if isinstance(event, Quiesced):
                self.left = max(self.left, event.generation)
        with self.lock:
            if epoch > self.told_epoch:
                self.told_epoch = epoch
                told = {**dict(self.steps), **dict(self.findings), **dict(beat.messages)}
                beat = replace(beat, messages=tuple(sorted(told.items())))
            for kept, kinds in ((self.steps, StepDone), (self.findings, FINDINGS)):
                known = kept[-1][0] if kept else 0
                kept.extend(
                    (n, event)
                    for n, event in beat.messages
                    if n > known and isinstance(event, kinds)
                )
        return beat

    def _begin(self, plan: Plan) -> None:
        self.ordered = plan.generation
        self.plans.append(plan)
        if self.output is not None:
            me = self.setup.me
            rank = plan.ranks.index(me) if me in plan.ranks else -1
            what = f"rank {rank} of {len(plan.ranks)}"
            what = what if rank >= 0 else "gives its state to the others"
            text = f"generation {plan.generation} after step {plan.resume.step}: {what}"
            self.output.begin(text, tells=rank == 0)
        if self.stands_back:
            self.stands_back = False
            processes.step_forward()

    def _fence(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise SpecError(
                f"the driver of epoch {epoch} has been replaced by that of epoch {self.epoch}; it "
                "must end"
            )
        self.epoch = epoch
        self.polled_at = max(self.polled_at, time.monotonic())

    # ----------------------------------------------------------------------------- without a driver

    def _watch_driver(self) -> None:
        """A time in which this process itself did not run does not count: the driver may have
        called all the while."""
        lease_s = self.setup.orphan_lease_s
        look_s = min(1.0, lease_s / 4)
        alone_s, looked_at, polled_at = 0.0, time.monotonic(), self.polled_at
        while True:
            time.sleep(look_s)
            now = time.monotonic()
            alone_s += min(2 * look_s, now - looked_at)
            alone_s = alone_s if self.polled_at == polled_at else 0.0
            looked_at, polled_at = now, self.polled_at
            if alone_s > lease_s and self._left_as_orphan():
                os._exit(0)

    def _left_as_orphan(self) -> bool:
        """Stops at the next boundary, saves, and waits for that. False: a driver came back
        meanwhile."""
        since, generation = self.polled_at, self.ordered
        if generation > self.left:
            self.session.order(WorkerOrder(Quiesce(generation)))
        deadline = time.monotonic() + ORPHAN_LEAVE_S
        while time.monotonic() < deadline:
            if self.polled_at != since:
                return False
            beat = self.session.poll(0, 0.0)
            if beat.phase == "idle" or any(
                isinstance(e, Quiesced) and e.generation >= generation for _, e in beat.messages
            ):
                break
            time.sleep(0.2)
        self._store_alone(max(1.0, deadline - time.monotonic()))
        return self.polled_at == since

    def _store_alone(self, wait_s: float) -> None:
        """The checkpoint is committed by the lowest rank; where it cannot be, the worker still
        leaves."""
        try:
            uri = self.session.store_alone(self.epoch, wait_s)
        except (ElasticError, OSError, TimeoutError) as error:
            log.warning("the last checkpoint was not committed: %s", error)
            return
        if uri:
            log.warning(
                "no driver for %.0f s: the state was stored as %s", self.setup.orphan_lease_s, uri
            )


def _imported(path: str) -> Any:
    """What `module:name` is. No garbage is looked for meanwhile: an import leaves none, and the
    looking took a tenth of it."""
    gc.disable()
    try:
        return imported(path)
    finally:
        gc.enable()


def _output(setup: WorkerSetup) -> Output | None:
    """None: it stays where Ray puts it, since that was asked for, or since the folder cannot be
    written from here."""
    if setup.logs is None:
        return None
    try:
        return Output(setup.logs, str(setup.me))
    except OSError as error:
        text = "%s cannot be written (%s): what this worker prints stays in Ray's own log"
        log.warning(text, setup.logs, error)
        return None
