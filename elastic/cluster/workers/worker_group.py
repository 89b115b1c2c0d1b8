"""The actors of a run: starts them, keeps one long poll open with each, and says who answered and
who broke."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.nodes.providers import signal_there
from elastic.cluster.ray.actors import kill, named_actors
from elastic.cluster.workers.worker_actor import MAX_CONCURRENCY, Worker, WorkerInfo, WorkerSetup
from elastic.errors import SpecError
from elastic.types import Action, Plan, WorkerId, version_differences
from elastic.types.orders import WorkerOrder
from elastic.version import versions
from elastic.worker.hosting.thread_boundary import waiting

log = logging.getLogger(__name__)

POLL_S = 0.5  # how long a worker without news holds a poll
# of workers without news; above, they hold theirs longer: a poll takes the driver about 1 ms
POLLS_PER_S = 1000
FENCE_MOST_S = 2.0  # a worker that has not answered by then says nothing of other drivers
ASKED_MOST = 16  # workers: a driver that attaches speaks to all of them
PASSPORT_MOST_S = 10.0
STARTERS = 8  # actors that are made at once
STARTERS_MOST_S = 90.0  # for those that are being made, at the end
SIGNALS_MOST_S = 10.0  # for those that are being sent, at the end
TEXT_MOST = 400
EXIT_DETAIL = "Worker exit detail: "  # behind it Ray says what it knows of a process that is gone
BROKEN_OFF, EXIT_CODE = "connection error code", re.compile(r"exits with an exit code (\d+)")
TERMINATED = "The process receives a SIGTERM"
UNTOLD = "neither exit code nor signal reached Ray"
# orders of more workers, which grow with their number, go over the object store: once to each node
SENT_EACH_MOST = 64


@dataclass(frozen=True)
class PollAnswer:
    """A worker answered a poll; `messages` are those that were not seen before."""

    worker: WorkerId
    beat: Any
    messages: tuple[Any, ...]


@dataclass(frozen=True)
class BrokenWorker:
    """process: the worker is gone. infrastructure: a call to it failed. replaced: it obeys a newer
    driver."""

    worker: WorkerId
    kind: Literal["process", "infrastructure", "replaced"]
    error: str
    pid: int = 0


@dataclass(frozen=True)
class Placement:
    """Where a worker is to be started: a node as Ray knows it, and what it takes there."""

    ray_id: str
    pool: str
    on_gpu: bool


@dataclass
class _Member:
    actor: Any
    ray_id: str
    incarnation: int
    poll: Any = None
    seen: int = 0
    pid: int = 0
    generation: int = 0
    orders: dict[Any, Any] = field(default_factory=dict)  # not answered yet: call -> order


@dataclass
class WorkerGroup:
    """`setup` is that of every worker but for its name and node. `namespace` is Ray's. `local`: all
    on this machine."""

    setup: WorkerSetup
    namespace: str
    local: bool
    _members: dict[WorkerId, _Member] = field(default_factory=dict)
    # node -> those of its workers that are there
    _on: dict[str, set[WorkerId]] = field(default_factory=dict)
    # not adopted -> which versions they ran
    outdated: dict[WorkerId, str] = field(init=False, default_factory=dict)
    _incarnations: dict[WorkerId, int] = field(default_factory=dict)
    _news: queue.SimpleQueue[BrokenWorker] = field(default_factory=queue.SimpleQueue)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    # as `_start` takes it
    _starting: queue.SimpleQueue[tuple[Any, ...] | None] = field(default_factory=queue.SimpleQueue)
    _starters: list[threading.Thread] = field(default_factory=list)
    # node -> until when it is not reached: a drill
    _cut: dict[str, float] = field(default_factory=dict)
    # node -> what is done then, in order
    _held: dict[str, list[Callable[[], Any]]] = field(default_factory=dict)
    _signals: list[threading.Thread] = field(default_factory=list)  # that send some
    _closed: bool = False

    # --------------------------------------------------------------------------------- who is there

    @property
    def hold_s(self) -> float:
        """How long a worker without news holds a poll: with news each answers at once."""
        return max(POLL_S, len(self._members) / POLLS_PER_S)

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        with self._lock:
            return sorted(self._members if node_id is None else self._on.get(node_id, ()))

    def _join(self, worker: WorkerId, member: _Member) -> None:
        self._members[worker] = member
        self._on.setdefault(worker.node_id, set()).add(worker)

    def pid(self, worker: WorkerId) -> int:
        """0 = not known yet."""
        member = self._members.get(worker)
        return member.pid if member else 0

    def generation(self, worker: WorkerId) -> int:
        """That it spoke of last."""
        member = self._members.get(worker)
        return member.generation if member else 0

    def actor(self, worker: WorkerId) -> Any:
        """None = there is no such worker."""
        member = self._members.get(worker)
        return member.actor if member else None

    def start(self, me: WorkerId, placement: Placement, first: WorkerOrder) -> None:
        """Starts an actor in the background, which is given that order."""
        if self._later(me.node_id, partial(self.start, me, placement, first)):
            return
        with self._lock:
            self._incarnations[me] = self._incarnations.get(me, 0) + 1
            incarnation = self._incarnations[me]
        # daemons: making an actor waits for the head, and may do so for a minute
        if len(self._starters) < STARTERS:
            self._starters.append(
                threading.Thread(target=self._run, name="start-workers", daemon=True)
            )
            self._starters[-1].start()
        self._starting.put((me, placement, incarnation, first))

    def _run(self) -> None:
        while (order := self._starting.get()) is not None and not self._closed:
            me, placement, incarnation, first = order
            self._start(me, placement, incarnation, first=first)

    def _start(
        self, me: WorkerId, placement: Placement, incarnation: int, *, first: WorkerOrder
    ) -> None:
        setup = replace(
            self.setup, me=me, incarnation=incarnation, pool=placement.pool,
            ray_id=placement.ray_id,
        )  # fmt: skip
        need: dict[str, Any] = (
            {"num_cpus": 0, "num_gpus": 1} if placement.on_gpu else {"num_cpus": 1}
        )
        actor_class: Any = ray.remote(Worker)
        try:
            actor = actor_class.options(
                name=f"{me}.{incarnation}", namespace=self.namespace,
                lifetime="detached" if setup.outlives else None, max_restarts=0,
                max_concurrency=MAX_CONCURRENCY,
                scheduling_strategy=NodeAffinitySchedulingStrategy(placement.ray_id, soft=False),
                **need,
            ).remote(setup)  # fmt: skip
        except (RayError, ValueError, OSError) as error:
            self._news.put(
                BrokenWorker(me, "process", f"its actor could not be made: {_short(error)}")
            )
            return
        with self._lock:
            if self._incarnations.get(me) != incarnation:
                kill(actor)
                return
            self._join(me, _Member(actor, placement.ray_id, incarnation))
        self.order(me, first)

    def adopt(self, keep: bool) -> list[WorkerInfo]:
        """Finds the run's living actors, of each worker the newest; the others end, and so does one
        of other versions than this driver's (`outdated` says which). Not `keep`: all of them
        end."""
        actors = named_actors(self.namespace)
        asked: dict[Any, Any] = {}
        if keep:
            asked = {actor.worker_info.remote(self.setup.epoch): actor for actor in actors}
        ready: list[Any] = []
        if asked:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PASSPORT_MOST_S)
        newest: dict[WorkerId, tuple[WorkerInfo, Any]] = {}
        for ref in ready:
            try:
                info = ray.get(ref)
            except RayError:
                continue
            different = (
                version_differences(versions(), dict(info.versions))
                if info.versions
                else "an older version of elastic"
            )
            if different:
                self.outdated[info.me] = different
                log.warning("worker %s is replaced: it runs %s", info.me, different)
            elif info.me not in newest or newest[info.me][0].incarnation < info.incarnation:
                newest[info.me] = (info, asked[ref])
        kept = {id(actor) for _, actor in newest.values()}
        for actor in actors:
            if id(actor) not in kept:
                kill(actor)
        for me, (info, actor) in newest.items():
            self._incarnations[me] = info.incarnation
            member = _Member(actor, info.ray_id, info.incarnation)
            member.pid, member.generation = info.pid, info.generation
            self._join(me, member)
        return [info for info, _ in newest.values()]

    def plans_after(self, generation: int) -> tuple[Plan, ...]:
        """Plans of newer generations that the adopted workers were given, the newest last."""
        newest = max((self.generation(worker) for worker in self.workers()), default=0)
        if newest <= generation:
            return ()
        asked = [worker for worker in self.workers() if self.generation(worker) == newest]
        found: dict[int, Plan] = {}
        for plans in self._asked(asked[:2], "newest_plans"):
            found |= {plan.generation: plan for plan in plans if plan.generation > generation}
        return tuple(found[number] for number in sorted(found))

    def replaced(self) -> str:
        """Whether a newer driver has attached to the workers, as some of them say; '' = not to any
        that answer."""
        try:
            self._asked(self.workers()[:ASKED_MOST], "worker_info")
        except SpecError as error:
            return str(error)
        return ""

    def _asked(self, workers: Sequence[WorkerId], method: str) -> list[Any]:
        """What those of them answer that do within FENCE_MOST_S. Raises SpecError where they obey a
        newer driver."""
        actors = [actor for worker in workers if (actor := self.actor(worker)) is not None]
        refs = [getattr(actor, method).remote(self.setup.epoch) for actor in actors]
        found = []
        for ref in ray.wait(refs, num_returns=len(refs), timeout=FENCE_MOST_S)[0] if refs else []:
            try:
                found.append(ray.get(ref))
            except RayError as error:
                if isinstance(error, SpecError):
                    raise
        return found

    # ----------------------------------------------------------------------------------- partitions

    def cut(self, node_id: str, for_s: float) -> bool:
        """A drill: this driver does not reach that node for so long. Its workers are not heard, and
        what is ordered there, their end too, is carried out afterwards, in order; who was ended
        meanwhile is never heard again. False = it has no workers there."""
        with self._lock:
            self._cut[node_id] = max(self._cut.get(node_id, 0.0), time.monotonic() + for_s)
        return bool(self.workers(node_id))

    def _later(self, node_id: str, order: Callable[[], Any]) -> bool:
        """Keeps the order for a node that is not reached now."""
        if node_id not in self._cut:
            return False
        self._held.setdefault(node_id, []).append(order)
        return True

    def _reach(self, now_s: float) -> None:
        """Nodes whose time is over get their orders."""
        for node_id in [node_id for node_id, until_s in self._cut.items() if now_s >= until_s]:
            del self._cut[node_id]
            for order in self._held.pop(node_id, []):
                order()

    # --------------------------------------------------------------------------- orders and answers

    def order(self, worker: WorkerId, order: Any) -> bool:
        """Gives a worker a WorkerOrder, or what Ray keeps one under; False = there is no such
        worker."""
        with self._lock:
            member = self._members.get(worker)
            if member is None:
                return False
            if self._later(worker.node_id, partial(self.order, worker, order)):
                return True
            member.orders[member.actor.order.remote(self.setup.epoch, order)] = order
        return True

    def shared(self, order: WorkerOrder, n: int) -> Any:
        """The order as it goes to each of so many workers."""
        return ray.put(order) if n > SENT_EACH_MOST else order

    def address(self) -> str:
        """Of this host, as workers reach it."""
        return str(ray.util.get_node_ip_address())

    def order_all(self, action: Action) -> None:
        for worker in self.workers():
            self.order(worker, WorkerOrder(action))

    def open_polls(self) -> list[WorkerId]:
        """A long poll with each worker that has none; acknowledges what it has said. Returns all
        that a poll is open with."""
        with self._lock:
            self._reach(time.monotonic())
            hold_s = self.hold_s
            for worker, member in self._members.items():
                if member.poll is None and worker.node_id not in self._cut:
                    member.poll = member.actor.poll.remote(self.setup.epoch, member.seen, hold_s)
            return list(self._members)

    def collect(self, wait_s: float) -> list[PollAnswer | BrokenWorker]:
        """What has come, at the latest after `wait_s`."""
        with self._lock:
            refs = {
                ref: (worker, member)
                for worker, member in self._members.items()
                if worker.node_id not in self._cut
                for ref in (member.poll, *member.orders)
                if ref is not None
            }
        if refs:
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=wait_s)
            if ready:
                ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        else:
            ready = []
            time.sleep(wait_s)
        found: list[PollAnswer | BrokenWorker] = []
        for ref in ready:
            answer = self._read(ref, *refs[ref])
            if answer is not None:
                found.append(answer)
        return [*found, *waiting(self._news)]

    def _read(
        self, ref: Any, worker: WorkerId, member: _Member
    ) -> PollAnswer | BrokenWorker | None:
        is_poll, order = ref == member.poll, member.orders.pop(ref, None)
        if is_poll:
            member.poll = None
        if self._members.get(worker) is not member:
            return None  # it has ended: says nothing of the one that may be there now
        try:
            beat = ray.get(ref)
        except ActorUnavailableError:
            # the connection broke; it may come back, and silence is measured on. Nobody knows
            # whether the order has arrived, and one that comes twice changes nothing
            if not is_poll:
                self.order(worker, order)
            return None
        except RayTaskError as error:
            replaced = isinstance(error, SpecError)
            return BrokenWorker(worker, "replaced" if replaced else "infrastructure", _short(error))
        # ActorDiedError, OutOfMemoryError of the memory monitor, NodeDiedError ...
        except RayError as error:
            self.forget(worker)
            return BrokenWorker(
                worker, "process", f"its process is gone: {_why(error)}", member.pid
            )
        if not is_poll:
            return None
        messages = tuple(event for number, event in beat.messages if number > member.seen)
        member.seen = max([member.seen, *(number for number, _ in beat.messages)])
        member.pid, member.generation = beat.pid, beat.generation or member.generation
        return PollAnswer(worker, beat, messages)

    # ----------------------------------------------------------------------------------------- ends

    def forget(self, worker: WorkerId) -> None:
        with self._lock:
            self._members.pop(worker, None)
            if there := self._on.get(worker.node_id):
                there.discard(worker)
                if not there:
                    del self._on[worker.node_id]
            # one that is being started ends
            self._incarnations[worker] = self._incarnations.get(worker, 0) + 1

    def signal(self, workers: Iterable[WorkerId], number: int) -> None:
        """To the processes, wherever they are."""
        found = [self._members.get(worker) for worker in workers]
        self._signal([member for member in found if member is not None], number)

    def _signal(self, members: Iterable[_Member], number: int) -> None:
        there: dict[str, list[int]] = {}
        for member in [member for member in members if member.pid]:
            if self.local:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, number)
            elif member.ray_id:
                there.setdefault(member.ray_id, []).append(member.pid)
        if there:
            living = [thread for thread in self._signals if thread.is_alive()]
            self._signals = [*living, signal_there(there, number)]

    def end(self, workers: Sequence[WorkerId], *, gone: bool = False) -> None:
        """Kills the processes, also stopped ones, and forgets them. `gone`: with their nodes;
        on another host nobody would take a signal."""
        if self.local or not gone:
            self.signal(
                [worker for worker in workers if worker.node_id not in self._cut], signal.SIGKILL
            )
        for worker in workers:
            member = self._members.get(worker)
            self.forget(worker)
            if member is not None and not self._later(worker.node_id, partial(self._end, member)):
                kill(member.actor)

    def _end(self, member: _Member) -> None:
        self._signal([member], signal.SIGKILL)
        kill(member.actor)

    def close(self, end: bool, wait: bool = True, own: bool = True) -> None:
        """`wait`: for actors that are being made, which may take a minute where the head is gone.
        `own`: the workers are still this driver's; else what was ordered for nodes that are cut off
        is not carried out any more."""
        self._closed = True
        if own:
            self._reach(float("inf"))
        for _ in self._starters:
            self._starting.put(None)
        _wait_for(self._starters if wait else (), STARTERS_MOST_S)
        if end:
            self.end(self.workers())
        _wait_for(self._signals if wait else (), SIGNALS_MOST_S)


def _wait_for(threads: Iterable[threading.Thread], most_s: float) -> None:
    """Until they have ended, all of them together for so long at most."""
    until_s = time.monotonic() + most_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


def _why(error: RayError) -> str:
    """What Ray knows of the end of an actor's process."""
    if isinstance(error, OutOfMemoryError):  # its own text lists all processes
        return "Ray's memory monitor killed it, since the host's memory was nearly used up"
    text = _short(error)
    if BROKEN_OFF in text:  # whatever has ended it: a signal, a crash, os._exit
        return UNTOLD
    if TERMINATED in text:
        return "it was sent SIGTERM"
    code = EXIT_CODE.search(text)
    return f"it exited with code {code[1]}" if code else text


def _short(error: BaseException) -> str:
    """One line that says what happened: of a long report the line of the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if len(lines) > 1 and isinstance(error, RayTaskError | RayActorError):
        text = f"{text} {lines[-1]}" if "Traceback" not in lines[-1] else text
    text = text.partition(" Some common causes")[0]
    return (text.partition(EXIT_DETAIL)[2] or text)[:TEXT_MOST]
