"""Adds what single workers report up to what the policy hears: one event per node, copy or
transition."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic.text import ranks_of
from elastic.types import (
    Admission,
    CopyFailed,
    DigestChecked,
    DigestPart,
    Event,
    GroupsFormed,
    GroupsMade,
    NodePrepared,
    Plan,
    Progress,
    SampleProfile,
    ShardStored,
    WorkerId,
    worst,
)
from elastic.worker.program.commit import StepReports

PLANS_KEPT = 16  # newest, whose parts may come
OPEN_COPIES = 4  # checkpoints whose parts are waited for; of older ones the rest will not come
ENDED_KEPT = 64  # of which a part may come that is not waited for any more
# a part is late after 3 x the time that the slowest of the others took
LATE_LEAST_S, LATE_FACTOR = 10.0, 3.0
RANKS_ASKED = 2  # other holders that are asked, one after the other, for a part that is late
PROGRESS_EVERY_S = 30.0  # that ranks write or read their parts is passed on so often at most


@dataclass
class CheckpointParts:
    """A checkpoint whose parts are coming in."""

    plan: Plan
    step: int
    stored: dict[int, ShardStored] = field(default_factory=dict)
    newest_at_s: float = 0.0  # when the newest part came
    # rank -> how often it was named as late
    asked: dict[int, int] = field(default_factory=dict)
    # rank -> those that were ordered to write for it and have not said that they cannot
    writing: dict[int, set[WorkerId]] = field(default_factory=dict)
    # rank -> why its own worker has not stored its part
    failed: dict[int, CopyFailed] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(len(self.plan.ranks)) if rank not in self.stored]

    @property
    def never(self) -> CopyFailed:
        """Of a copy that is given up as it is."""
        text = f"{ranks_of(self.missing)} never reported a stored part"
        return CopyFailed(self.plan.generation, self.step, text, rank=self.missing[0])

    @property
    def given_up(self) -> CopyFailed | None:
        """A part that nobody writes any more."""
        return next((why for rank, why in self.failed.items() if not self.writing.get(rank)), None)

    @property
    def ordered(self) -> int:
        """The epoch of the driver that ordered the generation."""
        return max((part.ordered for part in self.stored.values()), default=0)

    @property
    def bound_s(self) -> float:
        """From the newest part on; what is not there then is late."""
        return max(
            LATE_LEAST_S,
            LATE_FACTOR * max((part.seconds for part in self.stored.values()), default=0.0),
        )


@dataclass
class Gather:
    """`complete` is called, with all parts, when every rank of a plan has stored its part of a
    checkpoint."""

    complete: Callable[[CheckpointParts], None]
    # node id -> workers that must report before the node counts as prepared
    workers_of: Callable[[str], int]
    plans: dict[int, Plan] = field(default_factory=dict)
    _told: StepReports = field(default_factory=StepReports)
    _pids: dict[str, dict[WorkerId, int]] = field(default_factory=dict)
    _admitted: dict[str, list[Admission]] = field(default_factory=dict)
    _sample: SampleProfile | None = None
    _noted: set[str] = field(default_factory=set)  # what nodes have said of the data
    # by generation and step, oldest first
    _copies: dict[tuple[int, int], CheckpointParts] = field(default_factory=dict)
    # likewise: those that are whole, or never will be
    _ended: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ENDED_KEPT))
    # generation, port of the store, number of participants
    _formed: tuple[int, int, int] = (0, 0, 0)
    _made: dict[int, float] = field(default_factory=dict)  # participant -> seconds
    _digests: dict[int, dict[int, DigestPart]] = field(default_factory=dict)
    # phase -> when it was passed on last that a rank makes progress with it
    _progress_s: dict[str, float] = field(default_factory=dict)

    def expect(self, plan: Plan) -> None:
        """A plan has been ordered: its workers' parts will come."""
        self.plans[plan.generation] = plan
        kept = {*sorted(self.plans)[-PLANS_KEPT:], *(generation for generation, _ in self._copies)}
        self.plans = {number: known for number, known in self.plans.items() if number in kept}

    def expect_groups(self, generation: int, port: int, n: int) -> None:
        """So many participants were told to make groups, and meet at this port; what others say of
        theirs is of no use."""
        self._formed, self._made = (generation, port, n), {}

    @property
    def awaits_groups(self) -> bool:
        return self._formed[2] > 0

    def forget(self, node_id: str) -> None:
        """A node is gone or starts over."""
        self._pids.pop(node_id, None)
        self._admitted.pop(node_id, None)

    def add(self, worker: WorkerId, event: Event, at_s: float = 0.0) -> list[Event]:
        """Events for the policy that this message completes."""
        match event:
            case NodePrepared():
                return self._prepared(worker, event)
            case ShardStored():
                return self._stored(event, at_s)
            case CopyFailed():
                return self._copy_failed(worker, event)
            case GroupsMade():
                return self._groups_made(worker, event)
            case DigestPart():
                return self._digest(event)
            case Progress(phase="saving" | "loading" as phase):
                if at_s - self._progress_s.get(phase, -math.inf) < PROGRESS_EVERY_S:
                    return []
                self._progress_s[phase] = at_s
                return [event]
            case _:
                return self._told.add(event)

    def late(self, at_s: float) -> list[tuple[CheckpointParts, int]]:
        """Parts of checkpoints that others should write now: (copy, rank); each is named
        RANKS_ASKED times at most."""
        found = []
        for parts in self._copies.values():
            if parts.stored and at_s - parts.newest_at_s > parts.bound_s:
                ranks = [rank for rank in parts.missing if parts.asked.get(rank, 0) < RANKS_ASKED]
                found += [(parts, rank) for rank in ranks]
                parts.newest_at_s = at_s  # the others get as long again
                parts.asked.update({rank: parts.asked.get(rank, 0) + 1 for rank in ranks})
        return found

    def _prepared(self, worker: WorkerId, event: NodePrepared) -> list[Event]:
        pids = self._pids.setdefault(worker.node_id, {})
        pids[worker] = event.pids[0] if event.pids else 0
        self._sample = event.sample or self._sample
        found = self._admitted.setdefault(worker.node_id, [])
        found += [event.admission] if event.admission is not None else []
        if len(pids) < self.workers_of(worker.node_id):
            return []
        admission = worst(found) if found else None
        notes = tuple(note for note in event.notes if note not in self._noted)
        self._noted.update(notes)
        return [
            replace(
                event,
                pids=tuple(pids[w] for w in sorted(pids)),
                sample=self._sample,
                admission=admission,
                notes=notes,
            )
        ]

    def _stored(self, event: ShardStored, at_s: float) -> list[Event]:
        plan, key = self.plans.get(event.generation), (event.generation, event.step)
        if plan is None or key in self._ended or not 0 <= event.rank < len(plan.ranks):
            return []
        parts = self._copies.setdefault(key, CheckpointParts(plan, event.step))
        parts.stored.setdefault(event.rank, event)
        parts.newest_at_s = at_s
        parts.failed.pop(event.rank, None)
        dropped = list(self._copies)[:-OPEN_COPIES]
        if len(parts.stored) == len(plan.ranks):
            del self._copies[key]
            self._ended.append(key)
            dropped = [  # no use any more; what a later generation writes is
                known
                for known in self._copies
                if known[1] <= event.step and known[0] <= event.generation
            ]
            self.complete(parts)
        return [
            why
            for old in dropped
            for why in self._end(old, self._copies[old].never)
            if old[1] != event.step  # of that one another generation has all parts
        ]

    def _copy_failed(self, worker: WorkerId, event: CopyFailed) -> list[Event]:
        """The first word counts, unless others were ordered to write that part, too. Of these one
        that cannot says nothing of the part's own writer, which may still finish."""
        key, rank = (event.generation, event.step), event.rank
        parts = self._copies.get(key)
        if parts is None or rank is None or not 0 <= rank < len(parts.plan.ranks):
            return self._end(key, event)
        if rank in parts.stored:
            return []
        if worker == parts.plan.ranks[rank]:
            parts.failed[rank] = event
        else:
            parts.writing.get(rank, set()).discard(worker)
        given_up = parts.given_up
        return [] if given_up is None else self._end(key, given_up)

    def _end(self, key: tuple[int, int], why: CopyFailed) -> list[Event]:
        """That copy is not made any more; said once."""
        self._copies.pop(key, None)
        if key in self._ended:
            return []
        self._ended.append(key)
        return [why]

    def _groups_made(self, worker: WorkerId, event: GroupsMade) -> list[Event]:
        generation, port, n = self._formed
        if (event.generation, event.port) != (generation, port):
            return []
        self._made[event.participant] = event.seconds
        if len(self._made) < n and not event.error:
            return []
        self._formed = (0, 0, 0)
        apart = (worker.node_id, *event.unreached) if event.unreached else ()
        return [GroupsFormed(generation, max(self._made.values()), event.error, apart)]

    def _digest(self, event: DigestPart) -> list[Event]:
        parts = self._digests.setdefault(event.generation, {})
        parts[event.participant] = event
        if len(parts) < event.n_participants:
            return []
        del self._digests[event.generation]
        before = [p.before for p in parts.values() if p.before is not None]
        after = [p.after for p in parts.values() if p.after is not None]
        if not before:
            return []  # a checkpoint from elsewhere, without a digest
        equal = sum(before) % (1 << 64) == sum(after) % (1 << 64)
        return [DigestChecked(event.generation, equal, sum(p.n_bytes for p in parts.values()))]
