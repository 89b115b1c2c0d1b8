"""Copies of a generation's state at its step boundaries, each kind in its cadence: peer replicas,
and checkpoints, which are written from host copies."""

from __future__ import annotations

import time
from dataclasses import replace

from elastic.reshard.rank_boxes import RNG, boxes
from elastic.types import Plan
from elastic.worker.process_groups.groups import Groups
from elastic.worker.session.workplace import Workplace
from elastic.worker.state.host_copy import Flat, HostCopies, HostCopy
from elastic.worker.state.peer_replicas import PeerReplicas, kept_by
from elastic.worker.state.replica_stream import GroupWire
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.commit_vector import CommitReport

TAGS = 30_000


def reserve_buffers(place: Workplace, plan: Plan, rank: int) -> None:
    """Host buffers for the first copies, where allocating them takes long: while the groups and the
    state are made."""
    if not place.host_memory.pinned:
        return
    own = boxes(place.profile, plan.layout, plan.layers, rank)
    needed = (own, *kept_by(place.profile, plan, rank).values())
    place.background(place.host_memory.reserve, [Flat(theirs).n_bytes for theirs in needed])


class BoundaryCopies:
    """Those of one rank. `plan`: with the cadence that the ranks have agreed on last."""

    def __init__(self, place: Workplace, plan: Plan, state: TrainState, *, groups: Groups) -> None:
        self.place, self.plan, self.state, self.groups = place, plan, state, groups
        group = groups.copies
        volatile = frozenset(
            {RNG, *(f"model.{spec.fqn}" for spec in place.profile.specs if spec.buffer)}
        )
        # besides those of peer replicas one that a digest or the durable writer reads, and one that
        # it keeps for replicas
        limit = plan.copy_buffers + (2 if plan.layout.dp_replicate > 1 else 1)
        self.host = HostCopies(place.host_memory, state.tensors, volatile, limit=limit)
        state.before_change = self._before_change
        wire = None if group is None else lambda n: GroupWire(group, n % TAGS)
        self.replicas = PeerReplicas(place.profile, plan, state.rank, host=self.host, wire=wire)
        self._waited_s = 0.0  # of the step under way, for the host copy
        self.busy = False  # did a copy go beside the step under way?

    def begin(self) -> None:
        """Connects those who send and keep replicas, and starts the first one; where there are to
        be none, only this generation's boxes are held."""
        if self.groups.copies is not None:
            self.groups.connect(self.groups.copies, {*self.replicas.to, *self.replicas.kept})
        if self.replicas.on and self.state.step < self.place.job.steps:
            self.replicas.start(self.state.step)
        elif not self.replicas.on:
            number = self.plan.generation
            self.place.keep([h for h in self.place.held if h.generation == number])

    def take(self) -> HostCopy | None:
        """A host copy of the boundary that the state is at."""
        return self.host.take(self.state.step)

    def _before_change(self) -> None:
        """Before the optimizer: the host copy under way must have read the tensors."""
        self.place.faults.check("optimizer")
        waited_s = self.host.settle()
        self._waited_s += waited_s
        self.replicas.stalled(waited_s)

    def before_step(self) -> None:
        self.busy, self._waited_s = self.replicas.stepping(), 0.0

    def after_step(self, heard: CommitReport) -> float:
        """Peer replicas and checkpoints that are due at this boundary. Returns the seconds that the
        step waited for copies."""
        began = time.monotonic()
        place, state, replicas = self.place, self.state, self.replicas
        last = state.step == place.job.steps
        stored = replicas.heard(heard.n_copies_stored, heard.n_copies_failed)
        if stored is not None:
            place.keep([*replicas.acknowledged])
            if state.rank == 0:
                place.report(stored)
        if heard.cadence is not None:  # all ranks have heard it in the same commit
            peer_every, durable_every = heard.cadence
            self.plan = replace(self.plan, peer_every=peer_every, durable_every=durable_every)
            replicas.set_every(state.step, peer_every)
        plan = self.plan
        if replicas.due(state.step, heard.n_copies_free) and not last and not heard.stop:
            if plan.copy_buffers < 2:  # the one that is acknowledged makes room for the next
                place.keep(
                    [
                        held
                        for held in place.held
                        if held.kind == "live" or held.generation != plan.generation
                    ]
                )
            place.faults.check("host_copy")
            replicas.start(state.step)
        if not last and (
            heard.save or (plan.durable_every and state.step % plan.durable_every == 0)
        ):
            place.saving.save(plan, state, self.take(), must=heard.save)
            place.at_phase("stepping", state.step)  # it is written behind the steps
        return self._waited_s + time.monotonic() - began

    def close(self) -> None:
        self.place.copying = self.host.reading
        self.host.close()
        self.replicas.close()
