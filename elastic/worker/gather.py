"""Adds what single workers report up to what the policy hears: one event per node, copy or transition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.types import Copy, CopyStored, DigestChecked, DigestPart, Event, NodePrepared, Plan, ShardStored, WorkerId

Commit = Callable[
    [Plan, int, int], str
]  # (plan, step, digest of the state) -> uri: writes a durable copy's metadata and marker


@dataclass
class Gather:
    """`commit` is called when every rank of a plan has stored its part of a durable copy."""

    commit: Commit
    workers_of: Callable[[str], int]  # node id -> workers that must report before the node counts as prepared
    plans: dict[int, Plan] = field(default_factory=dict)
    _pids: dict[str, dict[WorkerId, int]] = field(default_factory=dict)
    _shards: dict[tuple[int, int], dict[int, ShardStored]] = field(default_factory=dict)
    _digests: dict[int, dict[int, DigestPart]] = field(default_factory=dict)

    def expect(self, plan: Plan) -> None:
        """A plan has been ordered: its workers' parts will come."""
        self.plans[plan.generation] = plan

    def forget(self, node_id: str) -> None:
        """A node is gone or starts anew."""
        self._pids.pop(node_id, None)

    def add(self, worker: WorkerId, event: Event) -> list[Event]:
        """Events for the policy that this message completes."""
        if isinstance(event, NodePrepared):
            return self._prepared(worker, event)
        if isinstance(event, ShardStored):
            return self._stored(event)
        if isinstance(event, DigestPart):
            return self._digest(event)
        return [event]

    def _prepared(self, worker: WorkerId, event: NodePrepared) -> list[Event]:
        pids = self._pids.setdefault(worker.node_id, {})
        pids[worker] = event.pids[0] if event.pids else 0
        if len(pids) < self.workers_of(worker.node_id):
            return []
        return [NodePrepared(worker.node_id, tuple(pids[w] for w in sorted(pids)))]

    def _stored(self, event: ShardStored) -> list[Event]:
        plan = self.plans.get(event.generation)
        if plan is None:
            return []
        parts = self._shards.setdefault((event.generation, event.step), {})
        parts[event.rank] = event
        if len(parts) < len(plan.ranks):
            return []
        del self._shards[(event.generation, event.step)]
        uri = self.commit(plan, event.step, sum(p.digest for p in parts.values()) % (1 << 64))
        n_bytes = sum(p.n_bytes for p in parts.values())
        copy = Copy(event.step, "durable", plan.generation, plan.layout, plan.layers, (), uri, n_bytes)
        return [CopyStored(copy, max(p.seconds for p in parts.values()), max(p.stall_s for p in parts.values()))]

    def _digest(self, event: DigestPart) -> list[Event]:
        parts = self._digests.setdefault(event.generation, {})
        parts[event.participant] = event
        if len(parts) < event.n_participants:
            return []
        del self._digests[event.generation]
        before = [p.before for p in parts.values() if p.before is not None]
        after = [p.after for p in parts.values() if p.after is not None]
        if not before:
            return []  # a durable copy from elsewhere, without a digest
        equal = sum(before) % (1 << 64) == sum(after) % (1 << 64)
        return [DigestChecked(event.generation, equal, sum(p.n_bytes for p in parts.values()))]
