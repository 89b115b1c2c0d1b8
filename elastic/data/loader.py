"""Batches of the coming steps, read ahead by a background thread, or by loader processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.data.batches import Unread, batch_of, item_of
from elastic.data.budget import Microbatch
from elastic.data.collate import Batch, collate, tensor_of
from elastic.data.loader_processes import LoaderLost, Reader, Readers
from elastic.data.sample_draws import SampleDraws
from elastic.types import Job

CLOSE_MOST_S = 4.0  # less than a generation that is aborted has to leave


@dataclass(frozen=True)
class ReadAhead:
    """How far a loader reads ahead: steps (those being read included), and bytes of what is ready
    and being read; one batch may be larger."""

    steps: int = 2
    most_bytes: int = 1 << 30

    @classmethod
    def of(cls, job: Job) -> ReadAhead:
        return cls(job.data.prefetch_steps, int(job.data.prefetch_mb * 1e6))


class Loader:
    """Reads the batches of the steps `first_step`, `first_step` + 1, ... ahead.

    dataset: map-style; with `readers` they read it, each a step at a time. draws: of this process,
    see SampleDraws; None = what is read as it comes, a stream. parts_of_step: step ->
    the micro-batches that this rank reads in it, each of which becomes a batch (without ids:
    tensors of length 0). finish: what a batch is made into, in the thread that reads it (pinned,
    for a GPU). What the dataset raises comes out of `take` with the sample id: as ProgramError, as
    what its storage raised, or as DataUnread. The end of a loader process: LoaderLost. `take` and
    `restart` belong to one thread; `close` may come from any, and frees a `take` that waits, as an
    abort frees who waits in a collective.
    """

    def __init__(
        self,
        dataset: Any,
        parts_of_step: Callable[[int], Sequence[Microbatch]],
        first_step: int,
        *,
        draws: SampleDraws | None = None,
        ahead: ReadAhead | int = 2,
        readers: Readers | None = None,
        finish: Callable[[Batch], Batch] = dict,
    ) -> None:
        self._dataset, self._parts_of_step, self._finish = dataset, parts_of_step, finish
        self._draws = draws
        each: tuple[Reader | None, ...] = readers.each if readers is not None else (None,)
        ahead = ReadAhead(ahead) if isinstance(ahead, int) else ahead
        self._steps, self._most_bytes = (
            max(1, ahead.steps, len(each) if readers is not None else 1),
            ahead.most_bytes,
        )
        self._changed = threading.Condition()
        self._ready: dict[int, list[Batch] | Exception] = {}
        self._reading: set[int] = set()  # steps of this round
        self._batch_bytes = 0  # of the largest so far
        self._next, self._round, self._closed = first_step, 0, False
        self._wanted = first_step  # the step that will be preempted next
        self._threads = [
            threading.Thread(target=self._run, args=(one,), name="elastic-loader", daemon=True)
            for one in each
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_ahead(self) -> int:
        """Steps from the one that will be preempted next on that may be read already: the same on
        all ranks of a job."""
        return self._steps

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The batches of `step` and the seconds that they were waited for. A step out of turn
        starts reading there anew."""
        start = time.monotonic()
        if step != self._wanted:
            self.restart(step)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or step in self._ready)
            if self._closed:
                raise ConnectionAbortedError(f"the loader was closed, step {step} was waited for")
            found = self._ready[step]
            if isinstance(found, Exception):
                raise found
            del self._ready[step]
            self._wanted = step + 1
            self._changed.notify_all()
        return found, time.monotonic() - start

    def ready(self, step: int) -> list[Batch]:
        """The batches of a step that was read already, without taking them; none where it was not,
        or could not be."""
        with self._changed:
            found = self._ready.get(step)
            return found if isinstance(found, list) else []

    def restart(self, step: int) -> None:
        """Forgets what was read ahead and reads from `step` on: for a rank whose share of the
        samples has changed."""
        with self._changed:
            self._ready.clear()
            self._reading.clear()
            self._next = self._wanted = step
            self._round += 1
            self._changed.notify_all()

    def close(self, timeout_s: float = CLOSE_MOST_S) -> bool:
        """Ends the threads; False when the dataset has not come back within `timeout_s` (they end
        when it does)."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _may_read(self) -> bool:
        if self._next >= self._wanted + self._steps:
            return False
        if self._next == self._wanted:
            return True
        ready = sum(_n_bytes(found) for found in self._ready.values())
        reading = len(self._reading) + 1
        if not self._batch_bytes:  # nobody knows yet how large they are: one for each reader
            return reading <= len(self._threads)
        return ready + reading * self._batch_bytes <= self._most_bytes

    def _run(self, reader: Reader | None) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_read())
                if self._closed:
                    return
                step, current = self._next, self._round
                self._next += 1
                self._reading.add(step)
            found = self._load(step, reader)
            with self._changed:
                if current == self._round and not self._closed:
                    self._ready[step] = found
                    self._reading.discard(step)
                    self._batch_bytes = max(self._batch_bytes, _n_bytes(found))
                    self._changed.notify_all()

    def _batch(self, part: Microbatch, step: int) -> Batch:
        if self._draws is None:
            return batch_of(partial(item_of, self._dataset), part, collate)
        return self._draws.batch(self._dataset, part, collate, step=step)

    def _load(self, step: int, reader: Reader | None) -> list[Batch] | Exception:
        try:
            parts = self._parts_of_step(step)
            if reader is None:
                return [self._finish(self._batch(part, step)) for part in parts]
            return [
                self._finish({key: tensor_of(key, values) for key, values in batch.items()})
                for batch in reader.load(parts, step)
            ]
        except LoaderLost as error:
            return LoaderLost(f"{error} (step {step})")
        except Exception as error:  # noqa: BLE001 - a boundary: `take` raises it
            unread, cause = (
                (error, error.__cause__)
                if isinstance(error, Unread)
                else (Unread.of(None, error), error)
            )
            named = unread.at(step)
            named.__cause__ = cause
            return named


def _n_bytes(found: list[Batch] | Exception) -> int:
    if isinstance(found, Exception):
        return 0
    return sum(value.numel() * value.element_size() for batch in found for value in batch.values())
