"""Peer copies: each rank's boxes in the host memory of a worker on another node, sent behind the next steps.

A copy is taken at the same step by all ranks, and counts once every rank has seen in a commit that all parts are stored; until
then the copy before it is kept. While one is in flight no other is started.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from elastic.mesh import partners
from elastic.reshard.shards import boxes
from elastic.types import Box, Copy, Holding, ModelProfile, Plan
from elastic.worker.train_state import Held, Tensors

ALIGN = 8


def flat_views(mine: Sequence[Box]) -> tuple[torch.Tensor, Tensors]:
    """One host buffer and a view of it per box, each at a multiple of 8 bytes."""
    starts, at = [], 0
    for box in mine:
        starts.append(at)
        at += -(-box.n_bytes // ALIGN) * ALIGN
    buffer = torch.empty(at, dtype=torch.uint8)
    views: Tensors = {}
    for box, start in zip(mine, starts, strict=True):
        part = buffer[start : start + box.n_bytes]
        views[box.fqn] = (box, part.view(getattr(torch, box.dtype)).view(box.sizes))
    return buffer, views


@dataclass
class _Flight:
    step: int
    held: list[Held]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class PeerCopies:
    """The peer copies of one generation on one rank."""

    def __init__(self, profile: ModelProfile, plan: Plan, rank: int, group: dist.ProcessGroup | None) -> None:
        self.profile, self.plan, self.rank, self.group = profile, plan, rank, group
        to = partners(plan.ranks) if plan.peer_every else ()
        self.to = to
        self.senders = [r for r, partner in enumerate(to) if partner == rank]
        self.flight: _Flight | None = None
        self.acknowledged: list[Held] = []
        self.acknowledged_step = -1
        self._base = 0

    @property
    def on(self) -> bool:
        return bool(self.to) and self.group is not None

    def due(self, step: int) -> bool:
        """The same answer on all ranks: it depends on commits only."""
        return self.on and self.flight is None and (step - self._base) % self.plan.peer_every == 0

    def start(self, step: int, tensors: Tensors) -> Tensors:
        """Takes the host copy now and sends it in the background. Returns the host copy."""
        if self.acknowledged_step < 0 and self.flight is None:
            self._base = step
        buffer, own = flat_views([box for box, _ in tensors.values()])
        for fqn, (_, view) in own.items():
            view.copy_(tensors[fqn][1])
        flight = _Flight(step, [self._held(self.rank, step, own)])
        self.flight = flight
        threading.Thread(target=self._exchange, args=(flight, buffer), name="peer-copy", daemon=True).start()
        return own

    def _held(self, rank: int, step: int, tensors: Tensors) -> Held:
        return Held(self.plan.generation, rank, step, "peer", self.plan.layout, self.plan.layers, tensors)

    def _exchange(self, flight: _Flight, buffer: torch.Tensor) -> None:
        try:
            works = [dist.isend(buffer, group=self.group, group_dst=self.to[self.rank])]
            incoming = []
            for sender in self.senders:
                theirs = boxes(self.profile, self.plan.layout, self.plan.layers, sender)
                into, views = flat_views(theirs)
                works.append(dist.irecv(into, group=self.group, group_src=sender))
                incoming.append(self._held(sender, flight.step, views))
            for work in works:
                if work is not None:
                    work.wait()
            flight.held += incoming
        except (RuntimeError, ValueError) as error:  # the group broke: the next collective of this rank says so
            flight.error = error
            return
        flight.done.set()

    @property
    def stored(self) -> bool:
        """Is this rank's part of the copy in flight stored at both ends?"""
        return self.flight is not None and self.flight.done.is_set()

    def acknowledge(self) -> int:
        """All parts are stored: the copy in flight takes the place of the one before. Returns its step."""
        assert self.flight is not None
        self.acknowledged, self.acknowledged_step = self.flight.held, self.flight.step
        self.flight = None
        return self.acknowledged_step

    def settle(self, timeout_s: float) -> None:
        """Waits for the exchange in flight, so that its group can be taken down at a clean boundary."""
        if self.flight is not None:
            self.flight.done.wait(timeout_s)

    def copy(self, step: int) -> Copy:
        """The acknowledged copy of `step`, with everyone's holdings."""
        ranks = self.plan.ranks
        holdings = []
        n_bytes = 0
        for rank, partner in enumerate(self.to):
            for worker in (ranks[rank], ranks[partner]):
                holdings.append(Holding(worker, self.plan.generation, rank, step, "peer"))
        for held in self.acknowledged:
            n_bytes += sum(box.n_bytes for box, _ in held.tensors.values())
        return Copy(step, "peer", self.plan.generation, self.plan.layout, self.plan.layers, tuple(holdings), "", n_bytes)
