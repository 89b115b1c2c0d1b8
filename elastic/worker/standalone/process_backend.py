"""The Backend on a fixed set of processes, which somebody else has started: each rank's session,
behind its connection.

None of them can be replaced. Where one is lost, or quarantined, all end, and whoever started them
starts them anew from the newest checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any, ClassVar

from elastic.config.fingerprint import KEY
from elastic.errors import LostContact
from elastic.ledger.lease import Lease
from elastic.policy.state.newest_steps import digested
from elastic.storage import Storage
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Event,
    Job,
    Node,
    Prepare,
    Quarantine,
    RequestFailed,
    RequestNodes,
    StepDone,
    StopAsked,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter, write_late_parts
from elastic.worker.hosting.hosting_backend import HostingBackend
from elastic.worker.hosting.served_session import Said, forward, put_into
from elastic.worker.hosting.session_processes import Heard, SessionProcess, SessionProcesses
from elastic.worker.session.session import Session
from elastic.worker.standalone.rank_link import RankLink

log = logging.getLogger(__name__)


class RankLost(LostContact):
    """A rank is gone, or of no use any more: the others end too."""


class OwnSession(SessionProcess):
    """The session of this very process, which ends by itself."""

    ended = False

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pipe, into = Pipe(duplex=False)
        threading.Thread(
            target=forward, args=(session, put_into(into)), name="own-session", daemon=True
        ).start()

    def send(self, word: Any) -> None:
        if isinstance(word, WorkerOrder):
            self.session.order(word)


class LinkedRank(SessionProcess):
    """The process of another rank: it ends when its connection does."""

    def __init__(self, pipe: RankLink) -> None:
        self.pipe: Any = pipe
        self._put = put_into(pipe)

    @property
    def ended(self) -> bool:
        return bool(self.pipe.closed)

    def send(self, word: Any) -> None:
        """From any thread."""
        self._put(Said(0, word))

    def end(self) -> None:
        self.pipe.close()


@dataclass
class ProcessBackend(HostingBackend):
    """`hear`: gets every event before the policy does. `lease`: is whose this driver is; it is not
    released here. `known`: URIs of checkpoints that earlier drivers have committed. `begun_at_s`:
    see Inbox."""

    hosted: SessionProcesses
    nodes: Sequence[Node]
    storage: Storage
    lease: Lease
    start: DriverStarted
    hear: Callable[[Event], None] = lambda event: None
    ordered: Callable[[EnterPlan], None] = lambda action: None
    digests: Mapping[int, str] = field(default_factory=dict)
    known: Collection[str] = ()
    begun_at_s: float | None = None
    _asked: list[str] = field(init=False, default_factory=list)
    _lost: str = field(init=False, default="")

    def __post_init__(self) -> None:
        job = Job.from_plain(self.start.job)
        meta = {"run": self.start.run, KEY: self.start.job.get(KEY)}
        self.copies = CheckpointCommitter(
            self.storage,
            self.start.epoch,
            meta,
            verify=job.verify_copies,
            digests=self.digests,
            known=self.known,
        )
        self._host(self.hosted, job, self.begun_at_s)
        self.copies.clean()

    def ask_stop(self, reason: str) -> None:
        """Save at the next step boundary and end. From any thread."""
        self._asked.append(reason)

    # -------------------------------------------------------------------------------------- Backend

    def _check(self) -> None:
        """Raises RankLost besides."""
        self._check_successor()
        if self._lost:
            raise RankLost(self._lost)

    def _check_successor(self) -> None:
        if self.lease.lost:
            raise LostContact(
                f"run '{self.start.run}': its lease (epoch {self.lease.epoch}) was taken over "
                "by another process"
            )

    def close(self) -> None:
        """What was ordered to be committed is waited for. The sessions are the caller's."""
        if not self._closed:
            self._closed = True
            self.inbox.close()
            self.copies.close()
            self.stores.clear()

    # --------------------------------------------------------------------------------------- orders

    def _request(self, action: RequestNodes) -> None:
        if action.count:
            why = "the ranks that were started are all that there are"
            self._early.append(RequestFailed(action.pool, action.request_id, why))

    def _quarantine(self, action: Quarantine) -> None:
        self._lose(f"{action.node_id} is quarantined: {action.reason}")

    def _prepare(self, action: Prepare) -> None:
        self.gather.forget(action.node_id)
        for worker in self.hosted.workers:
            if worker.node_id == action.node_id:
                self.hosted.order(worker, WorkerOrder(action))

    def _enter(self, action: EnterPlan) -> None:
        self.ordered(action)
        super()._enter(action)

    _orders: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        **HostingBackend._orders, RequestNodes: _request, Quarantine: _quarantine,
        Prepare: _prepare, EnterPlan: _enter,
    }  # fmt: skip

    # -------------------------------------------------------------------------------- what comes in

    def _round(self, until_s: float | None) -> list[Event]:
        events, self._early = self._early, []
        wait_s = self._pacing.wait_s(self.now_s(), until_s, self.copies.committing)
        for heard in self.hosted.collect(0.0 if events else wait_s):
            events += self._heard(heard)
        asked, self._asked = self._asked, []
        if not self._lost:  # else it is how the launcher ends who is left
            events += [StopAsked(reason) for reason in asked]
        events += self.copies.news()
        if self._pacing.looks(self.now_s()):
            events += self._look()
        for event in events:
            self.hear(event)
        return events

    def _heard(self, heard: Heard) -> list[Event]:
        worker, said = heard.worker, heard.said
        if said is None:
            self._lose(f"the process of {worker} is gone")
            return [WorkerFailed(worker, 0, "process", "its process is gone")]
        if isinstance(said, StopAsked):
            return [said]
        now_s = time.monotonic()
        self.liveness.answered(worker, said)
        self.liveness.called(worker)  # its next beat is awaited
        events: list[Event] = []
        for _, message in said.messages:
            for event in self.gather.add(worker, message, now_s):
                self._follow(event)
                events.append(event)
        return events

    def _follow(self, event: Event) -> None:
        self._noted(event)
        if isinstance(event, StepDone):
            self.copies.digests = digested(self.copies.digests, event)
        if isinstance(event, WorkerFailed) and event.do == "retry":
            self._lose(f"{event.worker}: {event.error}")  # another process would try once more

    def _look(self) -> list[Event]:
        now_s = time.monotonic()
        events: list[Event] = [*self.liveness.look(now_s)]
        events += self.liveness.stalled(self._plan) if self._plan is not None else []
        orders = self.inbox.take()
        events += orders.profiles
        if orders.stop is not None:
            events.append(StopAsked(orders.stop))
        if orders.drills:
            log.warning("drills are for a cluster; ranks that were started so have none")
        if late := self.gather.late(now_s):
            write_late_parts(late, self.hosted.living(), self.hosted.order)
        return events

    def _end(self, workers: Sequence[WorkerId]) -> None:
        for worker in workers:
            self._lose(f"{worker} does not answer any more")

    def _lose(self, why: str) -> None:
        """What was heard so far is still written down."""
        self._lost = self._lost or (
            f"run '{self.start.run}': {why}; all ranks end, and continue from the newest "
            "checkpoint where they are started anew"
        )

    def _workers_of(self, node_id: str) -> int:
        return next(node.gpus for node in self.nodes if node.node_id == node_id)
