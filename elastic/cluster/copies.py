"""Durable copies on the driver's side: committed, removed and cleaned up in one thread beside the loop; outcomes are events.

Where storage is slower than the orders come, commits go first, the newest step before the others, so that what a run resumes
from is never behind a queue; then removals; cleaning up waits, and is done once for all.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

from elastic.errors import ElasticError
from elastic.mesh import replica_key
from elastic.storage import Storage
from elastic.types import Copy, CopyFailed, CopyRemoved, CopyStored, Event, Plan, WorkerId

if TYPE_CHECKING:
    from elastic.worker.gather import Parts

log = logging.getLogger(__name__)

Commit = Callable[[Plan, int, int], str]  # (plan, step, digest of the state) -> uri
UNFINISHED_S, UNFINISHED_AT_START_S = 3600.0, 60.0  # unfinished files that were begun so long ago are nobody's
CLOSE_MOST_S = 10.0
REMOVE_TRIES, REMOVE_WAIT_S = 3, 1.0
START, COMMIT, REMOVE, LAST = range(4)  # in this order


class DurableCopies:
    """`meta`: goes into each marker. `write`: makes the stored parts of a copy a checkpoint; None = as durable.commit does."""

    def __init__(self, storage: Storage, epoch: int, meta: dict[str, Any], write: Commit | None = None) -> None:
        self.storage, self.epoch, self.meta = storage, epoch, meta
        self._write = write or self._commit_files
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="durable-copies")
        self._waiting: list[tuple[int, int, int, Callable[[], None]]] = []  # a heap: kind, -step, when it came, the order
        self._lock, self._numbers = threading.Lock(), count()
        self._below: int | None = None  # what interrupted saves of steps before this one have left is to be removed

    def news(self) -> list[Event]:
        """What has become of the orders since the last call."""
        found: list[Event] = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def commit(self, parts: Parts) -> None:
        """All parts are stored -> CopyStored or CopyFailed; then what older, interrupted saves have left is removed."""
        self._order(COMMIT, lambda: self._commit(parts), parts.step)

    def remove(self, uri: str) -> None:
        """-> CopyRemoved. Only copies of this run, and never after a newer driver has committed."""
        self._order(REMOVE, lambda: self._remove(uri))

    def clean(self) -> None:
        """Removes folders of copies that were never committed. To be asked before any save is begun."""
        self._order(START, lambda: self._clean(None))

    def close(self) -> None:
        """What was ordered is still done, as long as that does not take long."""
        last = self._order(LAST, lambda: None)
        self._pool.shutdown(wait=False)
        wait([last], CLOSE_MOST_S)

    def _order(self, kind: int, order: Callable[[], None], step: int = 0) -> Future[None]:
        with self._lock:
            heapq.heappush(self._waiting, (kind, -step, next(self._numbers), order))
        return self._pool.submit(self._next)

    # ------------------------------------------------------------------------------------------ in the thread

    def _next(self) -> None:
        with self._lock:
            order = heapq.heappop(self._waiting)[-1]
        order()
        with self._lock:
            busy = any(kind < LAST for kind, *_ in self._waiting)
        if self._below is not None and not busy:
            below, self._below = self._below, None
            self._clean(below)

    def _commit(self, parts: Parts) -> None:
        plan, step = parts.plan, parts.step
        shards = parts.stored.values()
        try:
            uri = self._write(plan, step, sum(part.digest for part in shards) % (1 << 64))
        except (OSError, ElasticError) as error:
            log.warning("the durable copy of step %d was not committed: %s", step, error)
            self._news.put(CopyFailed(plan.generation, step, f"not committed: {error}"))
            return
        n_bytes = sum(part.n_bytes for part in shards)
        copy = Copy(step, "durable", plan.generation, plan.layout, plan.layers, uri, n_bytes)
        self._news.put(CopyStored(copy, max(part.seconds for part in shards), max(part.stall_s for part in shards)))
        self._below = max(step, self._below or 0)

    def _commit_files(self, plan: Plan, step: int, digest: int) -> str:
        from elastic.worker import durable

        cut = {"layout": asdict(plan.layout), "layers": list(plan.layers), "samples": list(plan.samples)}
        meta = {**self.meta, **cut, "digest": str(digest), "saved_at_s": time.time()}
        return durable.commit(self.storage, step, plan.generation, len(plan.ranks), self.epoch, meta)

    def _remove(self, uri: str) -> None:
        from elastic.worker import durable

        for left in reversed(range(REMOVE_TRIES)):
            try:
                durable.remove_copy(self.storage, uri, self.epoch)
            except (OSError, ElasticError) as error:
                log.warning("%s was not removed: %s", uri, error)
                time.sleep(REMOVE_WAIT_S if left else 0.0)
            else:
                self._news.put(CopyRemoved(uri))
                return

    def _clean(self, below_step: int | None) -> None:
        from elastic.worker import durable

        try:
            for folder in durable.clean(self.storage, self.epoch, below_step):
                log.info("%s: left by an interrupted save, removed", folder)
            self.storage.clean_unfinished(UNFINISHED_AT_START_S if below_step is None else UNFINISHED_S)
        except (OSError, ElasticError) as error:
            log.warning("what interrupted saves have left was not removed: %s", error)


def holders_of(parts: Parts, rank: int) -> list[WorkerId]:
    """Who may hold the boxes of that rank besides itself: its replicas, then those that keep its peer copies."""
    plan = parts.plan
    key = replica_key(plan.layout, rank)
    replicas = [other for other in range(len(plan.ranks)) if other != rank and replica_key(plan.layout, other) == key]
    keepers = plan.copies_to[rank] if plan.copies_to else ()
    return [plan.ranks[other] for other in dict.fromkeys((*replicas, *keepers))]
