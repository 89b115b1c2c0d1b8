"""One worker: idle -> prepare -> enter(plan) -> step* -> quiesce. Thread-safe; outcomes are messages that `poll` hands out.

One thread does all the training work; the calls only leave orders for it or break off what it waits for.
"""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastic.errors import ElasticError, ProgramError, SpecError, StateLost
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Event, FailureKind, NodePrepared, Quiesced, WorkerFailed, WorkerId
from elastic.worker import durable
from elastic.worker.generation import EnterOrder, Generation, Workplace, live_step
from elastic.worker.groups import is_collective_error
from elastic.worker.model_profile import trace
from elastic.worker.rehearsal import rehearse


@dataclass(frozen=True)
class Beat:
    """Answer to a poll. `progress` changes whenever the worker gets on."""

    messages: tuple[tuple[int, Event], ...]
    generation: int
    phase: str
    step: int
    progress: int
    pid: int


class Session:
    """See the module. `job` is the plain job; `run_uri` the run's folder in its storage; `orphan` is called once when the
    worker has ended its work after the driver was gone (the shell decides when that is)."""

    def __init__(self, me: WorkerId, job: dict[str, Any], run_uri: str, orphan: Callable[[], None] | None = None) -> None:
        self.me, self.job, self.run_uri, self.orphan = me, dict(job), run_uri, orphan
        self._lock = threading.Condition()
        self._outbox: list[tuple[int, Event]] = []
        self._sequence = 0
        self._orders: list[EnterOrder] = []
        self._prepare_asked = False
        self._closed = False
        self._phase, self._step, self._progress = "idle", 0, 0
        self._generation: Generation | None = None
        self._aborted = 0  # generations up to this one are broken off
        self._stop_at, self._save_at = 0, 0  # generations up to this one stop (save) at their next boundary
        self._place: Workplace | None = None
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="behind-the-steps")
        self._thread = threading.Thread(target=self._work, name="training", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ orders (any thread)

    def prepare(self) -> None:
        """Import the program, build it on the meta device, open its data -> NodePrepared or WorkerFailed(program)."""
        with self._lock:
            self._prepare_asked = True
            self._lock.notify_all()

    def enter(self, order: EnterOrder) -> None:
        """A running generation stops at its next boundary by itself; then the new one is entered."""
        with self._lock:
            if order.plan.generation > self._aborted:
                self._orders = [o for o in self._orders if o.plan.generation > order.plan.generation] or [order]
                self._lock.notify_all()

    def quiesce(self, generation: int, save: bool) -> None:
        """Stop at the next boundary, with a durable copy of it when `save`."""
        with self._lock:
            self._stop_at = max(self._stop_at, generation)
            if save:
                self._save_at = max(self._save_at, generation)

    def store_copy(self, generation: int) -> None:
        """A durable copy at the next boundary."""
        with self._lock:
            self._save_at = max(self._save_at, generation)

    def abort(self, generation: int) -> None:
        """Break off every generation up to this one -> Quiesced, also when the worker was idle."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            self._orders = [o for o in self._orders if o.plan.generation > generation]
            running = self._generation
            if running is None:
                self._put(self._quiesced(generation))
        if running is not None and running.number <= generation:
            running.groups.abort()

    def poll(self, ack: int, wait_s: float) -> Beat:
        """Messages after `ack`, as soon as there are any; older ones are forgotten."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._outbox = [(n, e) for n, e in self._outbox if n > ack]
            while not self._outbox and not self._closed and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            number = self._generation.number if self._generation is not None else 0
            return Beat(tuple(self._outbox), number, self._phase, self._step, self._progress, os.getpid())

    def close(self) -> None:
        """Ends the training thread as soon as it is free; what waits in a group is broken off."""
        with self._lock:
            self._closed = True
            running = self._generation
            self._lock.notify_all()
        if running is not None:
            self.abort(running.number)
        self._pool.shutdown(wait=False)

    def store_alone(self, epoch: int, wait_s: float) -> str | None:
        """Without a driver: waits for this rank's part of the last durable copy; the lowest rank commits the whole under the
        last driver's epoch. Returns the copy's uri where it was committed. Raises Fenced when a newer driver has committed."""
        place = self._place
        if place is None or place.saving is None or place.saved is None:
            return None
        deadline = time.monotonic() + wait_s
        place.saving.result(wait_s)
        plan, step, rank = place.saved
        meta = {"layout": asdict(plan.layout), "layers": list(plan.layers), "samples": list(plan.samples), "orphan": True}
        while rank == 0:
            try:
                return durable.commit(place.storage, step, plan.generation, len(plan.ranks), epoch, meta)
            except StateLost:  # the parts of other ranks are still being written
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return None

    # ------------------------------------------------------------------------------------------ training thread

    def _put(self, event: Event) -> None:
        with self._lock:
            self._sequence += 1
            self._outbox.append((self._sequence, event))
            self._lock.notify_all()

    def _at_phase(self, phase: str, step: int) -> None:
        self._phase, self._step = phase, step
        self._progress += 1

    def _work(self) -> None:
        while True:
            with self._lock:
                while not (self._closed or self._orders or self._prepare_asked):
                    self._lock.wait()
                if self._closed:
                    return
                preparing, self._prepare_asked = self._prepare_asked, False
                order = None if preparing else self._orders.pop(0)
            if order is None:
                self._prepare()
            else:
                self._live(order)
            self._at_phase("idle", self._step)

    def _prepare(self) -> None:
        self._at_phase("preparing", 0)
        try:
            if self._place is None:
                self._place = self._open()
                rehearse(self._place)
        except Exception as error:  # noqa: BLE001 - the worker's boundary: whatever the program raises becomes a message
            self._put(WorkerFailed(self.me, 0, _kind_of(error), _text(error)))
            return
        self._put(NodePrepared(self.me.node_id, (os.getpid(),)))

    def _open(self) -> Workplace:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        program = load_program(self.job["program"])
        profile = trace(program)
        dataset: Any = program.dataset()
        self.job["n_samples"] = len(dataset)
        validation = program.validation() if program.validation is not None else None
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        storage = open_storage(self.run_uri)
        behind = self._pool.submit
        return Workplace(
            self.me, program, profile, self.job, dataset, validation, storage, device, self._put, self._at_phase, behind
        )

    def _words(self, number: int) -> tuple[bool, bool]:
        superseded = any(o.plan.generation > number for o in self._orders)
        stop, save = self._stop_at >= number, self._save_at >= number
        if save and not stop:
            self._save_at = 0  # a single copy was asked for
        return stop or superseded, save

    def _live(self, order: EnterOrder) -> None:
        number = order.plan.generation
        if self._place is None:
            self._prepare()
        if self._place is None:
            return
        place = self._place
        generation = Generation(place, order, lambda: self._words(number))
        with self._lock:
            if number <= self._aborted:
                self._put(self._quiesced(number))
                return
            self._generation = generation
        try:
            generation.enter()
            if generation.rank is None:
                place.held = []
            else:
                generation.run()
        except Exception as error:  # noqa: BLE001 - the worker's boundary
            self._failed(generation, error)
        finally:
            generation.take_along()
            generation.close()
            with self._lock:
                self._generation = None
                self._put(self._quiesced(number))
                if self._aborted > number:  # asked for while this one was still ending
                    self._put(self._quiesced(self._aborted))

    def _failed(self, generation: Generation, error: Exception) -> None:
        """Free the others first: they wait for this rank."""
        generation.groups.abort()
        number = generation.number
        kind = _kind_of(error)
        if kind == "collective" and number <= self._aborted:
            return
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident_bytes()
        self._put(WorkerFailed(self.me, number, kind, _text(error), memory if kind == "out_of_memory" else 0))

    def _quiesced(self, number: int) -> Quiesced:
        held = self._place.held if self._place is not None else []
        step = live_step(held, number)
        return Quiesced(self.me, number, step, tuple(h.holding(self.me) for h in held))


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    if isinstance(error, StateLost):
        return "infrastructure"
    if isinstance(error, ElasticError):
        return "program"
    if is_collective_error(error):
        return "collective"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return "infrastructure"
    return "program"


def _text(error: BaseException) -> str:
    """One line with the innermost cause, and for errors of the program the place in the user's file."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(f"{type(error).__name__}: {error}".split())
    line = re.sub(r"\[/\S+:\d+\] ", "", line).split(" This is typically caused by")[0][
        :600
    ]  # gloo: its source line, its advice
    if isinstance(error, SpecError | ProgramError | StateLost):
        return str(error)
    if is_collective_error(error):
        return line
    frames = traceback.extract_tb(error.__traceback__)
    here = frames[-1] if frames else None
    return f"{line} (at {here.filename}:{here.lineno})" if here is not None else line


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
