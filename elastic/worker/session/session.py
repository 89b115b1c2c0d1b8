"""One worker: idle -> prepare -> enter(plan) -> step* -> quiesce. Thread-safe: `order` takes every
order, and outcomes are messages that `poll` hands out.

One thread does all the training work; an order is only left for it, or aborts what it waits for.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elastic.errors import InternalError
from elastic.types import (
    Abort,
    CopyDamaged,
    DropGroups,
    EnterPlan,
    Event,
    FormGroups,
    Job,
    Prepare,
    Progress,
    Quiesce,
    Quiesced,
    Rehearsal,
    RollForward,
    SetCadence,
    SetShares,
    StartProfile,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)
from elastic.types.admission import Entry
from elastic.types.orders import InjectFault, Isolate, WorkerOrder, WriteShard
from elastic.user_frames import stood_at
from elastic.worker.checkpoint.checkpoint_format import Damaged
from elastic.worker.process.allocator import settle_allocator, settle_cuda_allocator
from elastic.worker.process.beat import Beat, Outbox
from elastic.worker.process.cuda_errors import holds_lost, is_assert
from elastic.worker.process.cut_off import CutOff, CutStorage
from elastic.worker.process.doing import WAITING, Doing, InCollective
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.free_memory import most_used_bytes
from elastic.worker.process_groups.reach import ANSWER_S, LATE_S, PeersUnreached
from elastic.worker.session.generation import Generation, groups_of
from elastic.worker.session.groups_ahead import GroupsAhead
from elastic.worker.session.loss_probe import LayoutDiffers
from elastic.worker.session.preparation import Preparation, default_device
from elastic.worker.session.stall_site import stall_site, waits_in
from elastic.worker.session.worker_errors import kind_of, print_error, text_of
from elastic.worker.session.workplace import EnterOrder, Workplace, live_step
from elastic.worker.step.faulty_rank import Tripped

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 60.0  # while it does what has no steps
SCRIPT_THREAD = "script"


class Session:
    """See the module. `job`: as plain data; `run_uri` the run's folder in its storage. `device`: to
    train on, where it is not the only GPU that this process sees. `train_function`: what is called
    instead of the job's script; `calls_file`: where it is kept what that calls, so that it is known
    if this process dies."""

    device: torch.device | None = None
    train_function: Callable[[], Callable[[], None]] | None = None
    calls_file: Path | None = None

    def __init__(self, me: WorkerId, job: dict[str, Any], run_uri: str) -> None:
        settle_allocator()
        settle_cuda_allocator()
        self.me = me
        self._lock = threading.Condition()
        self._outbox = Outbox(self._lock)
        self._orders: list[EnterOrder] = []
        self._prepare_asked: tuple[tuple[Rehearsal, ...], Entry | None] | None = None
        self._closed = False
        self._phase, self._step, self._progress = "idle", 0, 0
        self._polled = -1  # its progress at the last poll
        # when this phase began, or when it was told last that this worker makes progress with it
        self._told_s = 0.0
        self._generation: Generation | None = None
        self._ahead: GroupsAhead | None = None
        # left with gradients whose commit was not seen; until another is ordered
        self._broken: Generation | None = None
        # the generation left last was, by an error in the middle of something
        self._unfinished = False
        self._commit: tuple[float, ...] = ()  # of the newest step done in the generation left last
        self._done: tuple[tuple[int, tuple[float, ...]], ...] = ()  # and of those before
        # generation, and where its program stood when a collective of it broke or was aborted
        self._stood = (0, "")
        # generation, step, commit: to be applied
        self._forward: tuple[int, int, tuple[float, ...]] | None = None
        self._aborted = 0  # generations up to this one are aborted
        # generations up to this one stop (save) at their next boundary
        self._stop_at, self._save_at = 0, 0
        self._faults, self._cut = DeviceFaults(), CutOff()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="behind-the-steps")
        self._preparation = Preparation(
            me, Job.from_plain(job), run_uri, self._put, self._at_phase, self._pool.submit
        )
        self._thread = threading.Thread(target=self._work, name="training", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------- orders (any thread)

    def order(self, order: WorkerOrder) -> None:
        """Takes an order; its outcome is a message. One that comes again, or of a generation that
        is over, changes nothing."""
        match order.action:
            case Prepare(rehearse=rehearsals):
                with self._lock:
                    self._prepare_asked = rehearsals, order.entry
                    self._lock.notify_all()
            case EnterPlan(plan):
                self._enter(EnterOrder.of(plan, order, self.me))
            case FormGroups(plan):
                self._form(EnterOrder.of(plan, order, self.me))
            case DropGroups(generation):
                self._drop_groups(generation)
            case Quiesce(generation, save):
                with self._lock:
                    self._stop_at = max(self._stop_at, generation)
                    self._save_at = max(self._save_at, generation if save else 0)
            case StoreCopy(generation):
                with self._lock:
                    self._save_at = max(self._save_at, generation)
            case SetCadence() | SetShares() | StartProfile() as change:
                with self._lock:
                    running = self._generation
                    if running is not None and running.number == change.generation:
                        running.change(change)
            case Abort(generation):
                self._abort(generation)
            case RollForward(generation, step, commit):
                with self._lock:
                    self._forward = (generation, step, commit)
                    self._lock.notify_all()
            case WriteShard(plan, step, rank):
                if self.place is not None:
                    self.place.saving.write_for(plan, step, rank)
            case InjectFault(fault, factor, unit_s, jitter, place):
                self._faults.inject_fault(fault, factor, unit_s, jitter=jitter, place=place)
            case Isolate() as cut:
                self._isolate(cut)
            case action:
                raise InternalError(f"{type(action).__name__} is no order to a worker")

    def _enter(self, order: EnterOrder) -> None:
        """A running generation stops at its next boundary by itself; then the new one is
        entered."""
        with self._lock:
            if order.plan.generation > self._aborted:
                self._orders = [
                    o for o in self._orders if o.plan.generation > order.plan.generation
                ] or [order]
                self._lock.notify_all()

    def _form(self, order: EnterOrder) -> None:
        """Make the groups of a generation that may be entered, while this one trains on ->
        GroupsMade."""
        with self._lock:
            place, before = self.place, self._ahead
            newest = max([self._aborted, *(o.plan.generation for o in self._orders)])
            newest = max(newest, self._generation.number if self._generation is not None else 0)
            if place is None or self._closed or order.plan.generation <= newest:
                return
            self._ahead = None
        if before is not None:
            before.drop()
        with self._lock:
            self._ahead = GroupsAhead(order, groups_of(place, order.plan), self._put)

    def _drop_groups(self, generation: int) -> None:
        """What was made ahead for generations up to this one is not needed."""
        with self._lock:
            ahead = self._ahead
            if ahead is None or ahead.generation > generation:
                return
            self._ahead = None
        ahead.drop()

    def _isolate(self, cut: Isolate) -> None:
        self._cut.begin(cut.for_s, cut.nodes, cut.storage, apart_from=cut.apart_from)
        place, running = self.place, self._generation
        if cut.storage and place is not None and not isinstance(place.storage, CutStorage):
            place.storage = CutStorage(place.storage, self._cut)  # type: ignore[assignment]
        if running is not None and (cut.nodes or running.order.nodes & set(cut.apart_from)):
            running.groups.abort()
            self._drop_groups(running.number + 1)

    def _abort(self, generation: int) -> None:
        """Abort every generation up to this one -> Quiesced, also when the worker was idle."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            self._orders = [o for o in self._orders if o.plan.generation > generation]
            running = self._generation
            if running is None:
                self._put(self._quiesced(generation))
        # at once: on a GPU the abort of one generation waits for the kernels of the other
        dropping = threading.Thread(
            target=self._drop_groups, args=(generation + 1,), name="drop-groups", daemon=True
        )
        dropping.start()
        if running is not None and running.number <= generation:
            doing, where = self._site()
            if doing in WAITING:
                self._note_stood(running.number, where)
            running.groups.abort()
            if running.loader is not None:  # who waits for its batch is freed too
                running.loader.close(0.0)
        dropping.join()

    def poll(self, ack: int, wait_s: float) -> Beat:
        """Messages after `ack`, as soon as there are any; older ones are forgotten."""
        if (place := self.place) is not None:
            place.saving.heard_at_s = time.monotonic()
        with self._lock:
            messages = self._outbox.after(ack, wait_s, lambda: self._closed)
            running = self._generation
            at = (self._phase, self._step, self._progress, os.getpid())
            still, self._polled = self._progress == self._polled, self._progress
        if running is None:
            return Beat(messages, 0, *at)
        doing: tuple[Doing, str] = ("", "")
        collective: InCollective | None = None
        if still:
            doing, called = self._site(), waits_in(self._threads())
            collective = running.collective(*called) if called is not None else None
        calls = running.calls() if still else ()
        arrived = running.arrived()  # behind the others: one that has moved is seen to
        return Beat(messages, running.number, *at, (), arrived, *doing, calls, collective)

    def _site(self) -> tuple[Doing, str]:
        return stall_site(self._threads())

    def _threads(self) -> list[threading.Thread]:
        """The training thread, and that of a script."""
        scripts = [thread for thread in threading.enumerate() if thread.name == SCRIPT_THREAD]
        return [self._thread, *scripts]

    def _note_stood(self, generation: int, where: str) -> None:
        """The first word counts: what comes later comes of the abort."""
        if self._stood[0] < generation:
            self._stood = (generation, where)

    def close(self, wait_s: float = 0.0) -> None:
        """Ends the training thread as soon as it is free, and waits so long for it; what waits in a
        group is aborted."""
        with self._lock:
            self._closed = True
            running = self._generation
            self._lock.notify_all()
            ahead, self._ahead = self._ahead, None
        if running is not None:
            self._abort(running.number)
        if ahead is not None:
            ahead.drop()
        self._thread.join(wait_s)
        self._pool.shutdown(wait=False)
        self._preparation.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def place(self) -> Workplace | None:
        """The open program, data and storage; None until a Prepare has succeeded."""
        return self._preparation.place

    @property
    def job(self) -> Job:
        """With the number of its samples once the program is open."""
        return self._preparation.job

    def store_alone(self, epoch: int, wait_s: float) -> str | None:
        """See Saving.commit_alone."""
        return None if self.place is None else self.place.saving.commit_alone(epoch, wait_s)

    # ------------------------------------------------------------------------------ training thread

    def _put(self, event: Event) -> None:
        self._outbox.put(event)

    def _at_phase(self, phase: str, step: int) -> None:
        now_s = time.monotonic()
        if phase != self._phase:
            self._told_s = now_s
        self._phase, self._step = phase, step
        self._progress += 1
        running = self._generation
        # one worker tells the driver of progress, of a node or of a generation
        speaks = phase == "preparing" and self.me.local_rank == 0
        if running is not None and phase in ("evaluating", "finishing"):
            speaks = running.rank == 0
        # one may read its state for long after others
        speaks = speaks or (running is not None and phase == "loading")
        if speaks and now_s - self._told_s > PROGRESS_EVERY_S:
            self._told_s = now_s
            self._put(Progress(self.me, running.number if running is not None else 0, phase))

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (
                    self._closed or self._orders or self._prepare_asked is not None or self._forward
                ):
                    self._lock.wait()
                if self._closed:
                    return
                forward, self._forward = self._forward, None
                asked = None if forward else self._prepare_asked
                self._prepare_asked = self._prepare_asked if forward else None
                order = self._orders.pop(0) if not forward and asked is None else None
            if forward:
                self._roll_forward(*forward)
            elif order is not None:
                self._live(order)
            elif asked is not None:
                self._prepare(*asked)
            self._at_phase("idle", self._step)

    def _roll_forward(self, number: int, step: int, commit: tuple[float, ...]) -> None:
        broken = self._broken
        if broken is not None and broken.number == number and broken.pending_step == step:
            self._at_phase("stepping", step - 1)
            try:
                broken.roll_forward(step, commit)
                self._commit = commit
            except Exception as error:  # noqa: BLE001 - the worker's boundary: the state is no whole step then, and says so
                if holds_lost(error):
                    broken.lose_device()
                    broken.take_along()
                failed = WorkerFailed(self.me, number, "infrastructure", text_of(error))
                on_device = kind_of(error) == "device"
                self._put(replace(failed, kind="device", step=step) if on_device else failed)
            self._broken = None
        with self._lock:
            self._put(self._quiesced(number))

    def _prepare(self, rehearsals: tuple[Rehearsal, ...] = (), entry: Entry | None = None) -> None:
        self._preparation.train_function = self.train_function
        self._preparation.calls_file = self.calls_file
        self._preparation.run(
            rehearsals,
            entry,
            lambda: bool(self._orders),
            device=self.device or default_device(),
            faults=self._faults,
        )

    def _words(self, number: int) -> tuple[bool, bool]:
        running = self._generation.plan if self._generation is not None else None
        phase = running.phase if running is not None else 0
        # one of a later phase of the job waits for the end of this one
        superseded = any(o.plan.generation > number and o.plan.phase <= phase for o in self._orders)
        stop, save = self._stop_at >= number, self._save_at >= number
        if save and not stop:
            self._save_at = 0  # a single copy was asked for
        return stop or superseded, save

    def _live(self, order: EnterOrder) -> None:
        number = order.plan.generation
        if self.place is None:
            self._prepare()
        if self.place is None:
            return
        place = self.place
        self._preparation.planned(order.plan)
        place.saving.entered(number, order.rendezvous.epoch)
        self._forget_broken()
        with self._lock:
            ahead, self._ahead = self._ahead, None
        groups = ahead.take(order) if ahead is not None else None
        generation = Generation(place, order, lambda: self._words(number), groups=groups)
        with self._lock:
            gone = number <= self._aborted
            if gone:
                self._put(self._quiesced(number))
            else:
                self._generation = generation
        if gone:
            generation.groups.close()
            return
        try:
            self._wait_for_peers(generation)
            generation.enter()
            self._commit = self._done = ()
            if generation.rank is None:
                place.keep([])
            else:
                generation.run()
        except Exception as error:  # noqa: BLE001 - the worker's boundary
            self._failed(generation, error)
        finally:
            generation.take_along()
            generation.close()
            if generation.stepper is not None:
                self._commit = generation.stepper.committed
                self._done = tuple(generation.stepper.done)
                self._broken = generation if generation.pending_step >= 0 else None
            with self._lock:
                self._generation = None
                self._put(self._quiesced(number))
                if self._aborted > number:  # asked for while this one was still ending
                    self._put(self._quiesced(self._aborted))

    def _wait_for_peers(self, generation: Generation) -> None:
        """Where a drill has cut this worker off; as long as a real meeting would take."""

        def given_up() -> bool:
            return generation.groups.aborted or self._closed

        self._cut.wait_for_peers(given_up)
        nodes = generation.order.nodes
        if unreached := self._cut.wait_for_nodes(nodes, LATE_S + ANSWER_S, given_up):
            raise PeersUnreached(self.me.node_id, unreached)

    def _forget_broken(self) -> None:
        """Nothing of a generation is in memory when the next state is built but what is held:
        neither its pending gradients, which nobody asks for any more, nor what an error has left
        (frames, gradients of some micro-batches, gathered blocks: a model and its hooks refer to
        each other in circles). The peak counts from here."""
        broken, self._broken = self._broken is not None or self._unfinished, None
        self._unfinished = False
        if broken:
            # A backward pass that ends with an error leaves what it still had to do, and so the
            # model, in torch's queue of this thread, which is not looked at until there is another
            # one.
            torch.zeros((), requires_grad=True).backward()
            # frames, and the graph that they hold; the collector does not see that its hooks hold
            # the model,
            gc.collect()
            gc.collect()  # so that goes only now
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # of a device that is lost
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def _failed(self, generation: Generation, error: Exception) -> None:
        """Free the others first: they wait for this rank. (Not where all of them say the same at
        the same point.)"""
        lost, number = holds_lost(error), generation.number
        kind, more = kind_of(error), dict[str, Any]()
        if kind == "out_of_memory":  # before anything is freed
            with suppress(RuntimeError):  # unknown then; the others are freed all the same
                more["measured_bytes"] = most_used_bytes()
        self._unfinished = True
        trip = error.trip if isinstance(error, Tripped) else None
        if lost:
            generation.lose_device()
        if kind in ("collective", "mismatch"):
            self._note_stood(number, stood_at(error))
        if trip is None and kind != "layout":
            generation.break_off()
        unreached = isinstance(error, PeersUnreached)
        if kind == "collective" and number <= self._aborted and not unreached:
            return
        if isinstance(error, Damaged):
            self._put(CopyDamaged(generation.plan.resume.uri, str(error)))
        frames = print_error(error)
        if isinstance(error, LayoutDiffers):
            more["step"] = error.step
        if isinstance(error, PeersUnreached):
            more["unreached"] = error.unreached
        if generation.device_lost:
            more |= {"step": generation.next_step, "do": "retry" if is_assert(error) else ""}
        if trip is not None:
            more |= {"step": trip.step, "guard": trip.guard, "do": trip.do}
        self._put(WorkerFailed(self.me, number, kind, text_of(error), frames=frames, **more))

    def _quiesced(self, number: int) -> Quiesced:
        held = self.place.held if self.place is not None else []
        step = live_step(held, number)
        pending_step = self._broken.pending_step if self._broken is not None else -1
        holdings = tuple(h.holding(self.me) for h in held)
        before = tuple(one for one in self._done if one[0] < step)
        at = self._stood[1] if self._stood[0] == number else ""
        return Quiesced(self.me, number, step, holdings, self._commit, pending_step, before, at=at)
