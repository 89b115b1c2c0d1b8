"""Checkpoints of one rank, written behind the steps from a host copy. They outlive the generation
that they are of.

A copy that falls due while the one before is still being written is left out: training never waits
for storage. Ranks may decide differently; a copy without all its parts is never committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from elastic.errors import ElasticError, StateLost
from elastic.reshard.rank_boxes import owned_boxes, state_specs
from elastic.storage import Storage
from elastic.types import (
    DTYPE_BYTES,
    CopyFailed,
    Event,
    Job,
    ModelProfile,
    Plan,
    Progress,
    ShardStored,
    WorkerId,
)
from elastic.types.grid import replica_key
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.checkpoint.checkpoint_format import cut_of
from elastic.worker.checkpoint.disk_space import check_space
from elastic.worker.process.doing import doing
from elastic.worker.state.content_digest import digest
from elastic.worker.state.host_copy import Tensors
from elastic.worker.state.train_state import Held, TrainState

# twice as long as a lease lives without a sign: who drives this worker has asked it for news since
UNHEARD_S = 30.0
GENERATIONS_KEPT = 100  # of which a part may still be asked for
SAVING_EVERY_S = 60.0  # a worker that writes for so long says that it does


class Holder(Protocol):
    """The worker whose state is saved (session.workplace)."""

    me: WorkerId
    job: Job
    profile: ModelProfile
    storage: Storage
    held: list[Held]

    @property
    def report(self) -> Callable[[Event], None]: ...

    @property
    def at_phase(self) -> Callable[[str, int], None]: ...


class BoundaryCopy(Protocol):
    """A host copy of a step boundary that may still be filling (host_copy.HostCopy)."""

    def wait(self) -> Tensors: ...
    def release(self) -> None: ...


@dataclass
class Snapshot:
    """A host copy that is there already."""

    tensors: Tensors

    def wait(self) -> Tensors:
        return self.tensors

    def release(self) -> None:
        self.tensors = {}


@dataclass(frozen=True)
class NewestHostCopy:
    """The newest host copy of a rank with replicas: they can write each other's part."""

    plan: Plan
    step: int
    rank: int
    copy: BoundaryCopy

    def serves(self, generation: int, rank: int, step: int) -> bool:
        same = (self.plan.generation, self.step) == (generation, step)
        return same and replica_key(self.plan.layout, self.rank) == replica_key(
            self.plan.layout, rank
        )


@dataclass(frozen=True)
class CheckpointPart:
    """What one rank of a plan writes of the checkpoint of a step."""

    plan: Plan
    step: int
    rank: int
    ordered: int = 0  # the epoch of the driver that ordered the plan


class Saving:
    """The checkpoints of a worker. `writing`: the newest one; `of`: which part that is.
    `heard_at_s`: when a driver asked for news last (time.monotonic)."""

    def __init__(self, place: Holder) -> None:
        self.heard_at_s = time.monotonic()
        self._ordered: dict[int, int] = {}  # generation -> epoch of the driver that ordered it
        self.place = place
        self.writing: Future[Any] | None = None
        self.of: CheckpointPart | None = None
        self.kept: NewestHostCopy | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="durable-copy")

    def entered(self, generation: int, epoch: int) -> None:
        """A driver of that epoch has ordered it; 0 = no driver."""
        newest = sorted(self._ordered)[-GENERATIONS_KEPT:]
        self._ordered = {number: self._ordered[number] for number in newest} | {generation: epoch}

    @doing("copying")
    def save(
        self, plan: Plan, state: TrainState, copy: BoundaryCopy | None = None, *, must: bool = False
    ) -> None:
        """Starts a checkpoint of this boundary from `copy` (else from a snapshot taken now), which
        it releases.

        While the one before is still being written it is left out -> CopyFailed, and so it is
        while no driver is heard of: nobody would commit it. `must`: it is written all the same,
        after the one before.
        """
        began = time.monotonic()
        self.place.at_phase("saving", state.step)
        if not must and (why := self._leave_out(began)):
            if copy is not None:
                copy.release()
            number, rank = plan.generation, state.rank
            self.place.report(CopyFailed(number, state.step, why, skipped=True, rank=rank))
            return
        copy = copy or Snapshot(state.snapshot())
        self._keep(plan, state, copy)
        stall_s = time.monotonic() - began
        of = self._part(plan, state.step, state.rank)
        self.of = of
        self.writing = self._pool.submit(self._guarded, of, lambda: self._write(of, copy, stall_s))

    def write_for(self, plan: Plan, step: int, rank: int) -> None:
        """Writes the part of another rank from equal boxes held here, behind the steps: it is slow
        or gone. Both may write: the bytes are the same, and files appear whole. Reports CopyFailed
        where this worker does not hold them."""
        of = self._part(plan, step, rank)
        self._pool.submit(self._guarded, of, lambda: self._write_other(of))

    def commit_alone(self, epoch: int, wait_s: float) -> str | None:
        """Without a driver: waits for this rank's part of the last checkpoint; the lowest rank
        commits the whole under the last driver's epoch. Returns the copy's uri where it was
        committed. Raises Fenced when a newer driver has committed."""
        if self.writing is None or self.of is None:
            return None
        deadline = time.monotonic() + wait_s
        self.writing.result(wait_s)
        plan, step, rank = self.of.plan, self.of.step, self.of.rank
        meta = cut_of(plan) | {"orphan": True}
        while rank == 0:
            try:
                return checkpoint_writer.commit(
                    self.place.storage,
                    step,
                    plan.generation,
                    world_size=len(plan.ranks),
                    epoch=epoch,
                    meta=meta,
                    ordered=self.of.ordered,
                )
            except StateLost:  # the parts of other ranks are still being written
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _part(self, plan: Plan, step: int, rank: int) -> CheckpointPart:
        return CheckpointPart(plan, step, rank, self._ordered.get(plan.generation, 0))

    def _leave_out(self, now_s: float) -> str:
        """Why this checkpoint is left out; '' = it is not."""
        if self.writing is not None and not self.writing.done():
            return f"the copy of step {self.of.step if self.of else 0} is still being written"
        unheard_s = now_s - self.heard_at_s
        return f"no driver was heard of for {unheard_s:.0f} s" if unheard_s > UNHEARD_S else ""

    # ----------------------------------------------------------------------------- behind the steps

    def _keep(self, plan: Plan, state: TrainState, copy: BoundaryCopy) -> None:
        """Replicas hold the newest copy until the next, to write for each other; others would pay a
        whole host copy for it."""
        if self.kept is not None:
            self.kept.copy.release()
            self.kept = None
        if plan.layout.dp_replicate > 1 and not self.place.profile.by_owners:
            retain = getattr(copy, "retain", None)
            self.kept = NewestHostCopy(
                plan, state.step, state.rank, retain() if retain else Snapshot(copy.wait())
            )

    def _guarded(self, of: CheckpointPart, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - the boundary of this thread: the run must hear of it
            why = f"rank {of.rank}: {_said(error)}"
            self.place.report(CopyFailed(of.plan.generation, of.step, why, rank=of.rank))

    def _write(self, of: CheckpointPart, copy: BoundaryCopy, stall_s: float) -> None:
        try:
            self._write_boxes(of, copy.wait(), stall_s)
        finally:
            copy.release()

    def _write_other(self, of: CheckpointPart) -> None:
        number = of.plan.generation
        if self.kept is not None and self.kept.serves(number, of.rank, of.step):
            self._write_boxes(of, self.kept.copy.wait(), 0.0)
            return
        for held in self.place.held:
            if held.kind == "peer" and held.serves(number, of.rank, of.step):
                self._write_boxes(of, held.tensors, 0.0)
                return
        raise StateLost(
            f"{self.place.me} holds no boxes of rank {of.rank} of generation {number} at step "
            f"{of.step}"
        )

    def _write_boxes(self, of: CheckpointPart, tensors: Tensors, stall_s: float) -> None:
        began = time.monotonic()
        plan, step, rank, place = of.plan, of.step, of.rank, self.place
        number, profile = plan.generation, place.profile
        names = {box.fqn for box in owned_boxes(profile, plan.layout, plan.layers, rank)}
        mine = {fqn: item for fqn, item in tensors.items() if fqn in names}
        quota_gb = place.job.storage_quota_gb
        own_bytes = sum(box.n_bytes for box, _ in mine.values())
        sizes = own_bytes, state_bytes(profile)
        check_space(place.storage, (step, number), sizes, quota_gb=quota_gb, ordered=of.ordered)
        n_bytes = checkpoint_writer.write_shard(
            place.storage, step, number, rank=rank, items=list(mine.values()), ordered=of.ordered,
            wrote=self._says_so(of),
        )  # fmt: skip
        shapes = {spec.fqn: spec.shape for spec in state_specs(profile)}
        content = digest(mine, shapes, mine)
        took_s = time.monotonic() - began
        stored = ShardStored(number, step, rank, n_bytes, took_s, stall_s, content, of.ordered)
        place.report(stored)

    def _says_so(self, of: CheckpointPart) -> Callable[[], None]:
        """To be called while it is written."""
        said_s = time.monotonic()

        def wrote() -> None:
            nonlocal said_s
            if time.monotonic() - said_s >= SAVING_EVERY_S:
                said_s = time.monotonic()
                self.place.report(Progress(self.place.me, of.plan.generation, "saving"))

        return wrote


def state_bytes(profile: ModelProfile) -> int:
    """Of the whole training state, each element once: about the size of a checkpoint."""
    return sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in state_specs(profile))


def _said(error: Exception) -> str:
    """OSError without its class: `No space left on device: /shared/...`; with it what nobody has
    foreseen."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    kind, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, OSError | ElasticError):
        return text or kind
    return f"{kind}: {text}" if text else kind
