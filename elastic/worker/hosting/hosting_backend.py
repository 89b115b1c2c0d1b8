"""What backends have in common whose workers are sessions that are polled: clock, lease, rounds and
orders; and how long a poll waits for answers before it looks at what no worker reports."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from elastic.storage import Storage
from elastic.types import (
    Abort,
    Action,
    DrainNode,
    EnterPlan,
    Event,
    Job,
    Plan,
    PlanEntered,
    Quarantine,
    Quiesce,
    ReleaseNode,
    RemoveCopy,
    RollForward,
    SetCadence,
    SetShares,
    StartProfile,
    StepDone,
    Stop,
    StoreCopy,
    WorkerId,
)
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter
from elastic.worker.hosting.inbox import Inbox
from elastic.worker.hosting.liveness import Liveness, patience_s
from elastic.worker.hosting.rendezvous_stores import Hosts, RendezvousStores
from elastic.worker.hosting.served_session import POLL_S

if TYPE_CHECKING:
    from elastic.ledger.lease import Lease

SLICE_S = 0.05  # where other news may come; a round costs about as much as the report of a step
# between looks at the inbox, deadlines, notices and silence; while it trains, for answers too
LOOK_S = 0.25
LEAST_S = 0.001
# nothing brings back what they end, and no epoch holds all of it up on its way
FINAL = (Abort, DrainNode, Quarantine, ReleaseNode, RemoveCopy)


@dataclass
class Pacing:
    """`trains`: a step of the newest plan is done, and nothing was ordered since."""

    trains: bool = False
    _looked_s: float = 0.0

    def looks(self, now_s: float) -> bool:
        """Is it time to look? It is then done."""
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def wait_s(self, now_s: float, until_s: float | None, expected: bool) -> float:
        """For an answer, which ends the wait. `expected`: other news may come at any time."""
        if expected or not self.trains:
            return SLICE_S
        look_s = self._looked_s + LOOK_S
        return max(LEAST_S, min(look_s, look_s if until_s is None else until_s) - now_s)


class Group(Hosts, Protocol):
    def order_all(self, action: Action) -> object: ...


class HostingBackend(ABC):
    """`lease`: whose this driver is; None = the run has none."""

    storage: Storage
    lease: Lease | None
    copies: CheckpointCommitter

    def _host(self, group: Group, job: Job, begun_at_s: float | None = None) -> None:
        """Everything that does not depend on where the sessions are. `begun_at_s`: see Inbox."""
        from elastic.worker.hosting.aggregate import Gather

        self._anchor_s = time.time() - time.monotonic()
        self._group, self._pacing = group, Pacing()
        self._early: list[Event] = []
        self._plan: Plan | None = None  # the newest that was ordered
        self._closed = False
        self.inbox = Inbox(self.storage, begun_at_s)
        self.gather = Gather(self.copies.commit, self._workers_of)
        # what a script that is restarted may take to start its group is no silence
        most_s = None if job.restarted else job.max_silence_s
        self.liveness = Liveness(POLL_S, most_s, patience_s(job))
        self.stores = RendezvousStores(group, self.gather, self.liveness, self.copies.epoch)

    def now_s(self) -> float:
        """Epoch seconds that never go back."""
        return round(self._anchor_s + time.monotonic(), 4)

    def poll(self, until_s: float | None) -> list[Event]:
        """Events since the last call. What was returned before counts as written down: workers
        forget it, and orders from other terminals are removed. Raises LostContact."""
        self.inbox.written()
        while not self._closed:
            self._check()
            events = self._round(until_s)
            if events or (until_s is not None and self.now_s() >= until_s):
                return events
        return []

    def execute(self, action: Action) -> None:
        """Returns at once; the outcome arrives as an event. Raises LostContact."""
        self._pacing.trains = False
        self.inbox.written(stored=isinstance(action, Stop))
        order = self._orders.get(type(action))
        if order is not None and not self._closed:
            if isinstance(action, FINAL):
                self._check_successor()  # orders of one decision may take a while
            order(self, action)

    @property
    def certain(self) -> bool:
        """No other driver can have the run."""
        return self.lease is None or self.lease.certain

    @property
    def trouble(self) -> Exception | None:
        """Why it is not certain."""
        return None if self.lease is None else self.lease.trouble

    @property
    def unheard_s(self) -> float:
        """For how long storage has taken no sign of life."""
        return 0.0 if self.lease is None else self.lease.unheard_s

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _check(self) -> None:
        """Raises LostContact where this driver does not hold its run any more."""

    @abstractmethod
    def _check_successor(self) -> None:
        """Raises LostContact where another driver is known to have the run."""

    @abstractmethod
    def _round(self, until_s: float | None) -> list[Event]: ...

    @abstractmethod
    def _workers_of(self, node_id: str) -> int: ...

    @abstractmethod
    def _end(self, workers: Sequence[WorkerId]) -> None:
        """They do not answer any more."""

    # --------------------------------------------------------------------------------------- orders

    def _enter(self, action: EnterPlan) -> None:
        self._plan = action.plan
        self.gather.expect(action.plan)
        self._early += self.stores.enter(action)

    def _abort(self, action: Abort) -> None:
        """First the processes that do not answer (their sockets close and free the others), then
        the store, then the rest."""
        self._end(action.kill)
        self.stores.abort(action.generation)
        self._group.order_all(action)

    _orders: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        EnterPlan: _enter, Abort: _abort, Stop: lambda self, _: self.close(),
        RemoveCopy: lambda self, action: self.copies.remove(action.uri),
        **dict.fromkeys(
            (Quiesce, StoreCopy, SetCadence, SetShares, StartProfile, RollForward),
            lambda self, action: self._group.order_all(action),
        ),
    }  # fmt: skip

    # -------------------------------------------------------------------------------- what comes in

    def _noted(self, event: Event) -> None:
        """What is done about a worker's message wherever it is."""
        if isinstance(event, StepDone):
            self.liveness.stepped(event.generation, event.step_time_s)
            self._pacing.trains = (
                self._plan is not None and event.generation == self._plan.generation
            )
        if isinstance(event, PlanEntered):
            self.stores.drop(event.generation - 1)
