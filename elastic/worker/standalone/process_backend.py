"""The Backend on a fixed set of processes, which somebody else has started: each rank's session,
behind its connection.

None of them can be replaced. Where one is lost, or quarantined, all end, and whoever started them
starts them anew from the newest checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from elastic.config.fingerprint import KEY
from elastic.errors import LostContact
from elastic.ledger.lease import Lease
from elastic.policy.state.newest_steps import digested
from elastic.storage import Storage
from elastic.types import (
    Abort,
    Action,
    DriverStarted,
    EnterPlan,
    Event,
    Job,
    Node,
    PlanEntered,
    Prepare,
    Quarantine,
    Quiesce,
    RemoveCopy,
    RequestFailed,
    RequestNodes,
    RollForward,
    SetCadence,
    SetShares,
    StartProfile,
    StepDone,
    Stop,
    StopAsked,
    StoreCopy,
    WorkerFailed,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.aggregate import Gather
from elastic.worker.hosting.checkpoint_commit import CheckpointCommitter, write_late_parts
from elastic.worker.hosting.inbox import Inbox
from elastic.worker.hosting.liveness import Liveness, patience_s
from elastic.worker.hosting.poll_pacing import Pacing
from elastic.worker.hosting.rendezvous_stores import RendezvousStores
from elastic.worker.hosting.served_session import POLL_S, Said, forward, put_into
from elastic.worker.hosting.session_processes import Heard, SessionProcesses
from elastic.worker.session.session import Session
from elastic.worker.standalone.rank_link import RankLink

log = logging.getLogger(__name__)


class RankLost(LostContact):
    """A rank is gone, or of no use any more: the others end too."""


class OwnSession:
    """The session of this very process, which ends by itself."""

    ended = False

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pipe, self._into = Pipe(duplex=False)
        threading.Thread(target=self._forward, name="own-session", daemon=True).start()

    def _forward(self) -> None:
        with suppress(OSError):  # nobody reads any more
            forward(self.session, put_into(self._into))

    def ready(self, timeout_s: float) -> str:
        return ""

    def send(self, word: Any) -> None:
        if isinstance(word, WorkerOrder):
            self.session.order(word)

    def signal(self, number: int) -> None: ...
    def end(self) -> None: ...
    def join(self) -> None: ...


class LinkedRank:
    """The process of another rank: it ends when its connection does."""

    def __init__(self, pipe: RankLink) -> None:
        self.pipe: Any = pipe

    @property
    def ended(self) -> bool:
        return bool(self.pipe.closed)

    def ready(self, timeout_s: float) -> str:
        return ""

    def send(self, word: Any) -> None:
        self.pipe.send(Said(0, word))

    def signal(self, number: int) -> None: ...
    def end(self) -> None:
        self.pipe.close()

    def join(self) -> None: ...


@dataclass
class ProcessBackend:
    """`hear`: is told every event before the policy is. `lease`: is whose this driver is; it is not
    released here."""

    hosted: SessionProcesses
    nodes: Sequence[Node]
    storage: Storage
    lease: Lease
    start: DriverStarted
    hear: Callable[[Event], None] = lambda event: None
    ordered: Callable[[EnterPlan], None] = lambda action: None
    digests: Mapping[int, str] = field(default_factory=dict)
    _early: list[Event] = field(init=False, default_factory=list)
    _asked: list[str] = field(init=False, default_factory=list)
    _generation: int = field(init=False, default=0)  # of the newest plan that was ordered
    _lost: str = field(init=False, default="")
    _pacing: Pacing = field(init=False, default_factory=Pacing)
    _closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        job = Job.from_plain(self.start.job)
        self._anchor_s = time.time() - time.monotonic()
        meta = {"run": self.start.run, KEY: self.start.job.get(KEY)}
        self.copies = CheckpointCommitter(
            self.storage, self.start.epoch, meta, verify=job.verify_copies, digests=self.digests
        )
        self.gather = Gather(self.copies.commit, self._workers_of)
        self.liveness = Liveness(POLL_S, job.max_silence_s, patience_s(job))
        self.stores = RendezvousStores(self.hosted, self.gather, self.liveness)
        self.inbox = Inbox(self.storage)
        self.copies.clean()

    def ask_stop(self, reason: str) -> None:
        """Save at the next step boundary and end. From any thread."""
        self._asked.append(reason)

    # -------------------------------------------------------------------------------------- Backend

    def now_s(self) -> float:
        """Epoch seconds that never go back."""
        return round(self._anchor_s + time.monotonic(), 4)

    def poll(self, until_s: float | None) -> list[Event]:
        """Events since the last call. What was returned before counts as written down. Raises
        RankLost, LostContact."""
        while not self._closed:
            if self.lease.lost:
                raise LostContact(
                    f"run '{self.start.run}': its lease (epoch {self.lease.epoch}) was taken over "
                    "by another process"
                )
            if self._lost:
                raise RankLost(self._lost)
            events = self._round(until_s)
            for event in events:
                self.hear(event)
            if events or (until_s is not None and self.now_s() >= until_s):
                return events
        return []

    def execute(self, action: Action) -> None:
        """Returns at once; the outcome arrives as an event."""
        self._pacing.trains = False
        order = _ORDERS.get(type(action))
        if order is not None and not self._closed:
            order(self, action)

    @property
    def certain(self) -> bool:
        """No other driver can have the run."""
        return self.lease.certain

    @property
    def trouble(self) -> Exception | None:
        """Why it is not certain."""
        return self.lease.trouble

    @property
    def unheard_s(self) -> float:
        """For how long storage has taken no sign of life."""
        return self.lease.unheard_s

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
        self._generation = action.plan.generation
        self.ordered(action)
        self.gather.expect(action.plan)
        self._early += self.stores.enter(action)

    def _pass_on(self, action: Action) -> None:
        self.hosted.order_all(action)

    def _remove_copy(self, action: RemoveCopy) -> None:
        self.copies.remove(action.uri)

    def _abort(self, action: Abort) -> None:
        for worker in action.kill:
            self._lose(f"{worker} does not answer any more")
        self.stores.abort(action.generation)
        self.hosted.order_all(action)

    def _stop(self, action: Stop) -> None:
        self.close()

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
        """What the backend itself does about a worker's message."""
        if isinstance(event, StepDone):
            self.copies.digests = digested(self.copies.digests, event)
            self.liveness.stepped(event.generation, event.step_time_s)
            self._pacing.trains = event.generation == self._generation
        if isinstance(event, PlanEntered):
            self.stores.drop(event.generation - 1)
        if isinstance(event, WorkerFailed) and event.do == "retry":
            self._lose(f"{event.worker}: {event.error}")  # another process would try once more

    def _look(self) -> list[Event]:
        now_s = time.monotonic()
        events: list[Event] = [*self.liveness.look(now_s)]
        if plan := self.gather.plans.get(self._generation):
            events += self.liveness.stalled(plan)
        orders = self.inbox.take()
        events += orders.profiles
        if orders.stop is not None:
            events.append(StopAsked(orders.stop))
        if orders.drills:
            log.warning("drills are for a cluster; ranks that were started so have none")
        if late := self.gather.late(now_s):
            write_late_parts(late, self.hosted.living(), self.hosted.order)
        return events

    def _lose(self, why: str) -> None:
        """What was heard so far is still written down."""
        self._lost = self._lost or (
            f"run '{self.start.run}': {why}; all ranks end, and continue from the newest "
            "checkpoint where they are started anew"
        )

    def _workers_of(self, node_id: str) -> int:
        return next(node.gpus for node in self.nodes if node.node_id == node_id)


_ORDERS: dict[type, Callable[[ProcessBackend, Any], None]] = {
    RequestNodes: ProcessBackend._request, Quarantine: ProcessBackend._quarantine,
    Prepare: ProcessBackend._prepare, EnterPlan: ProcessBackend._enter,
    RemoveCopy: ProcessBackend._remove_copy, Abort: ProcessBackend._abort,
    Stop: ProcessBackend._stop,
    **dict.fromkeys(
        (Quiesce, StoreCopy, SetCadence, SetShares, StartProfile, RollForward),
        ProcessBackend._pass_on,
    ),
}  # fmt: skip
