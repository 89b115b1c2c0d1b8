"""Checkpoints without a driver: each rank says in the ranks' own store what it has stored, rank 0
commits what is whole."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.config.job import JobSpec
from elastic.errors import ElasticError
from elastic.storage import Storage
from elastic.types import CopyFailed, Plan, ShardStored
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.standalone.meeting import Meeting

LOOK_S = 0.02


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed copy, as rank 0 tells the others of it."""

    step: int
    uri: str
    metrics: dict[str, Any]


@dataclass
class StaticCheckpoints:
    """The copies of one generation. `heard` and `look` belong to the rank's main thread."""

    storage: Storage
    meeting: Meeting
    plan: Plan
    epoch: int
    meta: dict[str, Any]
    spec: JobSpec
    # of a step; None = rank 0 has not heard of it yet
    metrics: Callable[[int], dict[str, Any] | None]
    newest: CommittedCheckpoint | None = None
    error: str = ""  # the copy of the last boundary was not made
    # steps whose part is stored here, and that are not committed yet
    pending: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)
    _committed: int = 0  # copies
    _told: int = 0  # of these `on_copy` was called for
    _validation: dict[int, float] = field(default_factory=dict)

    @property
    def _leads(self) -> bool:
        return self.meeting.me.rank == 0

    def _key(self, word: str, step: int) -> str:
        return f"{word}/{self.plan.generation}/{step}"

    def heard(self, event: ShardStored | CopyFailed) -> None:
        """This rank's part of a copy is stored, or will never be."""
        if isinstance(event, ShardStored):
            self.meeting.say(self._key("stored", event.step), str(event.digest))
            self.pending.add(event.step)
        else:
            self.meeting.tell(self._key("failed", event.step), event.reason)
            self._done.add(event.step)

    def look(self, on_copy: Callable[[CommittedCheckpoint], None] | None) -> None:
        """Commits what is whole (rank 0), and tells of what was committed."""
        if self._leads:
            for step in sorted(self.pending):
                self._try(step)
        if on_copy is not None:
            while (
                words := self.meeting.said(f"copy/{self.plan.generation}/{self._told}")
            ) is not None:
                self._told += 1
                on_copy(CommittedCheckpoint(**json.loads(words)))

    def settled(self, step: int) -> bool:
        """Nothing more is to be done here about the copy of that step."""
        if not self._leads:
            return step in self.pending or step in self._done
        return step in self._done

    def _try(self, step: int) -> None:
        why = self.meeting.said(self._key("failed", step))
        parts = self.meeting.all_said(self._key("stored", step)) if why is None else None
        metrics = self.metrics(step)
        if metrics is None or (why is None and parts is None):
            return
        self.pending.remove(step)
        self._done.add(step)
        try:
            if parts is None:
                raise ElasticError(f"the copy of step {step} was not made: {why}")
            self._commit(step, sum(map(int, parts.values())) % (1 << 64), metrics)
            self.error = ""
        except (ElasticError, OSError) as error:
            self.error = " ".join(str(error).split())

    def _commit(self, step: int, digest: int, metrics: dict[str, Any]) -> None:
        plan = self.plan
        cut = {
            "layout": asdict(plan.layout),
            "layers": list(plan.layers),
            "samples": list(plan.samples),
        }
        meta = {**self.meta, **cut, "digest": str(digest), "saved_at_s": time.time()}
        uri = checkpoint_writer.commit(
            self.storage,
            step,
            plan.generation,
            world_size=len(plan.ranks),
            epoch=self.epoch,
            meta=meta,
        )
        self.newest = CommittedCheckpoint(step, uri, {**metrics, "step": step})
        self._validation[step] = float(metrics.get("validation_loss", math.inf))
        self.meeting.tell(
            f"copy/{plan.generation}/{self._committed}", json.dumps(asdict(self.newest))
        )
        self._committed += 1
        self._remove_old()

    def _remove_old(self) -> None:
        """keep_last, keep_every, keep_best and storage_quota_gb, as on a cluster."""
        found, spec = checkpoint_index.find(self.storage), self.spec
        best = sorted(
            (item for item in found if math.isfinite(self._loss(item.step))),
            key=lambda item: self._loss(item.step),
        )
        every = [item for item in found if spec.keep_every and item.step % spec.keep_every == 0]
        wanted = list(
            dict.fromkeys(
                item.uri for item in [*found[: spec.keep_last], *best[: spec.keep_best], *every]
            )
        )
        if spec.storage_quota_gb and found[0].n_bytes:
            wanted = wanted[
                : max(1, int(spec.storage_quota_gb * 1e9 / (1.02 * found[0].n_bytes)) - 1)
            ]
        for item in found:
            if item.uri not in wanted:
                checkpoint_index.remove_copy(self.storage, item.uri, self.epoch)

    def _loss(self, step: int) -> float:
        return self._validation.get(step, math.inf)

    def finish(self, on_copy: Callable[[CommittedCheckpoint], None] | None, most_s: float) -> None:
        """Rank 0 says that all is committed; the others wait for that. What was committed has been
        told of then."""
        deadline = time.monotonic() + most_s
        if self._leads:
            self.look(on_copy)
            words = {"error": self.error, "newest": asdict(self.newest) if self.newest else None}
            self.meeting.tell("end", json.dumps(words))
        while (end := self.meeting.said("end")) is None and time.monotonic() < deadline:
            self.look(on_copy)
            time.sleep(LOOK_S)
        silent = json.dumps(
            {"error": "rank 0 did not say that the last copy is committed", "newest": None}
        )
        known: dict[str, Any] = json.loads(end or silent)
        self.look(on_copy)
        self.error = known["error"]
        self.newest = CommittedCheckpoint(**known["newest"]) if known["newest"] else None
