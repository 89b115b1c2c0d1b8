"""Checkpoints on the driver's side: committed, removed and cleaned up in one thread beside the
loop; outcomes are events.

Where storage is slower than the orders come, commits go first, the newest step before the others,
so that what a run resumes from is never behind a queue; then removals; cleaning up waits, and is
done once for all.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from elastic.errors import ElasticError
from elastic.storage import Storage
from elastic.types import Copy, CopyFailed, CopyRemoved, CopyStored, Event, WorkerId
from elastic.types.grid import coordinates, rank_of
from elastic.types.orders import WorkerOrder, WriteShard
from elastic.worker.hosting.checkpoint_checks import CopyChecks, Paced
from elastic.worker.hosting.thread_boundary import waiting

if TYPE_CHECKING:
    from elastic.worker.hosting.aggregate import CheckpointParts

log = logging.getLogger(__name__)

Commit = Callable[["CheckpointParts", int], str]  # (parts, digest of the state) -> uri
# unfinished files that were begun so long ago are nobody's
UNFINISHED_S, UNFINISHED_AT_START_S = 3600.0, 60.0
CLOSE_MOST_S = 10.0
OVERDUE_S = 180.0  # of a commit; object storage is retried for 120 s
REMOVE_TRIES, REMOVE_WAIT_S = 3, 1.0
REMOVE_AGAIN_S = 300.0
START, COMMIT, REMOVE, LAST = range(4)  # in this order


class CheckpointCommitter:
    """`meta`: goes into each marker. `write`: makes the stored parts of a copy a checkpoint; None =
    as durable.commit does. `verify`: copies are read back, too. `digests`: step -> running digest
    of the sample ids; replaced at each step. `known`: URIs of checkpoints that earlier drivers have
    committed: their folders are not cleaned up, should they lose their markers."""

    def __init__(
        self, storage: Storage, epoch: int, meta: dict[str, Any], *, write: Commit | None = None,
        verify: bool = False, digests: Mapping[int, str] | None = None, known: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.storage, self.epoch, self.meta = storage, epoch, meta
        self.digests: Mapping[int, str] = digests or {}
        self._committed = set(known)
        self._write = write or self._commit_files
        self._news: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._checks = CopyChecks(self._news.put, _verify) if verify else None
        # a heap: kind, -step, when it came, the order
        self._waiting: list[tuple[int, int, int, Callable[[], None]]] = []
        self._change, self._numbers = threading.Condition(), count()
        # generation and step of commits that were ordered -> since when
        self._open: dict[tuple[int, int], float] = {}
        # step and generation: what interrupted saves have left below is to be removed
        self._below: tuple[int, int] | None = None
        self._ordered = 0  # and under drivers before that of the newest generation that was saved
        self._left: list[str] = []  # what could not be removed: after the next commit, or when idle
        # storage may never answer
        self._thread = threading.Thread(target=self._run, name="durable-copies", daemon=True)
        self._thread.start()

    def news(self) -> list[Event]:
        """What has become of the orders since the last call."""
        return waiting(self._news) + self._overdue(time.monotonic())

    @property
    def committing(self) -> bool:
        """Was a copy ordered to be committed, and has not come back?"""
        return bool(self._open)

    def commit(self, parts: CheckpointParts) -> None:
        """All parts are stored -> CopyStored or CopyFailed; then what older, interrupted saves have
        left is removed."""
        with self._change:
            self._open[parts.plan.generation, parts.step] = time.monotonic()
        self._order(COMMIT, lambda: self._commit(parts), parts.step)

    def remove(self, uri: str) -> None:
        """-> CopyRemoved. Only copies of this run, and never after a newer driver has taken
        over."""
        if self._checks is not None:
            self._checks.removed(uri)
        self._committed.discard(uri)
        self._order(REMOVE, lambda: self._remove(uri))

    def clean(self) -> None:
        """Removes folders of copies that were never committed. To be asked before any save is
        begun."""
        self._order(START, lambda: self._clean(None))

    def close(self) -> None:
        """What was ordered is still done, as long as that does not take long. Nothing more is read
        back."""
        if self._checks is not None:
            self._checks.close()
        self._order(LAST, lambda: None)
        self._thread.join(CLOSE_MOST_S)

    def _order(self, kind: int, order: Callable[[], None], step: int = 0) -> None:
        with self._change:
            heapq.heappush(self._waiting, (kind, -step, next(self._numbers), order))
            self._change.notify()

    def _overdue(self, now_s: float) -> list[Event]:
        """The newest commit has not come back for longer than storage is retried: said once. It may
        still be done."""
        with self._change:
            newest = max(self._open, key=lambda copy: copy[1], default=None)
            if newest is None or now_s - self._open[newest] <= OVERDUE_S:
                return []
            self._open.clear()
        return [
            CopyFailed(
                *newest, f"not committed: {self.storage.uri} has not answered for {OVERDUE_S:.0f} s"
            )
        ]

    # -------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        kind = START
        while kind != LAST:
            with self._change:
                idle_s = REMOVE_AGAIN_S if self._left else None
                if not self._change.wait_for(lambda: self._waiting, idle_s):
                    self._remove_left()
                kind, _, _, order = heapq.heappop(self._waiting)
            order()
            with self._change:
                busy = any(waiting < LAST for waiting, *_ in self._waiting)
            if self._below is not None and not busy:
                below, self._below = self._below, None
                self._clean(below)

    def _commit(self, parts: CheckpointParts) -> None:
        plan, step = parts.plan, parts.step
        shards = parts.stored.values()
        try:
            uri = self._write(parts, sum(part.digest for part in shards) % (1 << 64))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread: the run must hear of it
            ours = isinstance(error, OSError | ElasticError)
            text = str(error) if ours else f"{type(error).__name__}: {error}"
            log.warning("the checkpoint of step %d was not committed: %s", step, text)
            self._news.put(CopyFailed(plan.generation, step, f"not committed: {text}"))
            return
        finally:
            with self._change:
                self._open.pop((plan.generation, step), None)
        self._committed.add(uri)
        n_bytes = sum(part.n_bytes for part in shards)
        copy = Copy(
            step, "durable", plan.generation, plan.layout, plan.layers, uri, n_bytes,
            self.digests.get(step, ""),
        )  # fmt: skip
        slowest_s, stall_s = max(p.seconds for p in shards), max(p.stall_s for p in shards)
        self._news.put(CopyStored(copy, slowest_s, stall_s))
        self._below = max((step, plan.generation), self._below or (0, 0))
        self._ordered = max(self._ordered, parts.ordered)
        self._remove_left()
        if self._checks is not None:
            self._checks.check(copy)

    def _commit_files(self, parts: CheckpointParts, digest: int) -> str:
        from elastic.worker.checkpoint import checkpoint_writer
        from elastic.worker.checkpoint.checkpoint_format import SAMPLES, cut_of

        plan, step = parts.plan, parts.step
        samples = {SAMPLES: text} if (text := self.digests.get(step)) else {}
        meta = self.meta | cut_of(plan) | samples
        meta |= {"digest": str(digest), "saved_at_s": time.time()}
        return checkpoint_writer.commit(
            self.storage,
            step,
            plan.generation,
            world_size=len(plan.ranks),
            epoch=self.epoch,
            meta=meta,
            ordered=parts.ordered,
        )

    def _remove(self, uri: str) -> None:
        from elastic.worker.checkpoint import checkpoint_index

        for left in reversed(range(REMOVE_TRIES)):
            try:
                checkpoint_index.remove_copy(self.storage, uri, self.epoch)
            except Exception as error:  # noqa: BLE001 - retried
                log.warning("%s was not removed: %s", uri, error)
                time.sleep(REMOVE_WAIT_S if left else 0.0)
            else:
                self._news.put(CopyRemoved(uri))
                return
        self._left.append(uri)

    def _remove_left(self) -> None:
        again, self._left = self._left, []
        for uri in again:
            self._order(REMOVE, partial(self._remove, uri))

    def _clean(self, below: tuple[int, int] | None) -> None:
        from elastic.worker.checkpoint import checkpoint_index

        try:
            for folder in checkpoint_index.clean(
                self.storage, self.epoch, below, ordered=self._ordered, spared=self._committed
            ):
                log.info("%s: left by an interrupted save, removed", folder)
            self.storage.clean_unfinished(UNFINISHED_AT_START_S if below is None else UNFINISHED_S)
        except Exception as error:  # noqa: BLE001 - retried after the next copy
            log.warning("what interrupted saves have left was not removed: %s", error)


def _verify(uri: str, paced: Paced) -> list[str]:
    from elastic.worker.checkpoint import checkpoint_index

    return checkpoint_index.verify(uri, paced=paced)


def holders_of(parts: CheckpointParts, rank: int) -> list[WorkerId]:
    """Who may hold the boxes of that rank besides itself: its replicas, then those that keep its
    peer replicas."""
    plan = parts.plan
    at = coordinates(plan.layout, rank)
    replicas = [
        rank_of(plan.layout, replace(at, dp_replicate=k))
        for k in range(plan.layout.dp_replicate)
        if k != at.dp_replicate
    ]
    keepers = plan.copies_to[rank] if plan.copies_to else ()
    return [plan.ranks[other] for other in dict.fromkeys((*replicas, *keepers))]


def write_late_parts(
    late: Iterable[tuple[CheckpointParts, int]],
    living: Collection[WorkerId],
    order: Callable[[WorkerId, WorkerOrder], object],
) -> None:
    """Parts of a checkpoint that are long overdue are written by others that hold the same
    boxes."""
    for parts, rank in late:
        holders = [worker for worker in holders_of(parts, rank) if worker in living]
        if holders:
            other = holders[(parts.asked[rank] - 1) % len(holders)]
            log.info(
                "step %d: %s is asked to write the part of rank %d, which is late",
                parts.step,
                other,
                rank,
            )
            parts.writing.setdefault(rank, set()).add(other)
            order(other, WorkerOrder(WriteShard(parts.plan, parts.step, rank)))
