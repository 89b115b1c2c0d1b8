"""Simulated partitions: a node that neither the driver nor its peers reach for some time, and that
works all the while.

Its connections stand, so nothing is lost when it is back: a step that waited continues, an order
arrives, and what its workers had to say is heard. Unless the driver has ended them meanwhile: they
obey that before anything else of them is heard.
"""

from __future__ import annotations

from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_breaks import SimGeneration
from elastic.sim.sim_generations import Generations
from elastic.types import (
    EnterPlan,
    Event,
    GroupsFormed,
    NodePrepared,
    NodeRefused,
    Quiesced,
    Silent,
    WorkerFailed,
    WorkerId,
)  # fmt: skip


class Partitions(Generations):
    """Generations whose nodes may be cut off."""

    def _cut(self, node_id: str, fault: Fault) -> None:
        machine, self._cut_once = self._machines[node_id], True
        machine.cut_until_s = max(machine.cut_until_s, self._now_s + fault.lasts_s)
        for group in self._groups.values():
            if not group.ended and any(worker.node_id == node_id for worker in group.members):
                self._watch(group, fault)
        workers = (
            [WorkerId(node_id, k) for k in range(machine.node.gpus)] if machine.prepared else []
        )
        for worker in workers:
            if not any(
                worker in group.members for group in self._groups.values() if not group.ended
            ):
                self._after(self.delays.silent_s, lambda w=worker: self._silent_idle(w))  # type: ignore[misc]

    def _watch(self, group: SimGeneration, fault: Fault) -> None:
        """The driver misses the answers of those that are cut off, if it does not reach them in
        time."""

        def looked() -> None:
            cut = [
                worker
                for worker in sorted(group.members)
                if self._lives(worker) and self._cut_s([worker]) > 0
            ]
            if group.ended or not cut:
                return
            group.ended = True
            self._leave(
                group,
                {w: rank for rank, w in enumerate(group.plan.ranks) if w not in cut},
                fault.moment,
            )
            for worker in cut:
                self._tell(Silent(worker, group.plan.generation, "stepping", self.delays.silent_s))

        self._after(self.delays.silent_s, looked)

    def _silent_idle(self, worker: WorkerId) -> None:
        busy = any(worker in group.members for group in self._groups.values() if not group.ended)
        if self._lives(worker) and self._cut_s([worker]) > 0 and not busy:
            self._tell(Silent(worker, 0, "idle", self.delays.silent_s))

    def _enter(self, action: EnterPlan) -> None:
        super()._enter(action)
        group = self._groups[action.plan.generation]
        if not group.ended and self._cut_s(group.members) > 0:
            self._watch(group, Fault(self._now_s, "partition"))

    def _entered(self, group: SimGeneration) -> None:
        wait_s = self._cut_s(group.members)
        if wait_s > 0 and not group.ended:
            self._after(wait_s, lambda: self._entered(group))
        else:
            super()._entered(group)

    def _step(self, group: SimGeneration) -> None:
        """Ranks that are all cut off together step on; what they say is heard later."""
        ranks, wait_s = group.plan.ranks, self._cut_s(group.plan.ranks)
        if wait_s > 0 and not group.ended and len({worker.node_id for worker in ranks}) > 1:
            self._after(wait_s, lambda: self._step(group))
        else:
            super()._step(group)

    # -------------------------------------------------------------------------------- what is heard

    def _say(self, event: Event) -> None:
        if not self._cut_once:
            super()._say(event)
            return
        told_by = [worker for worker in self._speakers(event) if self._lives(worker)]
        wait_s = min((self._cut_s([worker]) for worker in told_by), default=0.0)
        if wait_s <= 0:
            super()._say(event)
            return

        def again() -> None:
            if any(self._lives(worker) for worker in told_by):
                self._say(event)

        self._after(wait_s, again)

    def _speakers(self, event: Event) -> list[WorkerId]:
        """Workers of which one at least must be reached, that it is heard; none: the driver finds
        it out without them."""
        match event:
            case NodePrepared() | NodeRefused():
                return [
                    WorkerId(event.node_id, k)
                    for k in range(self._machines[event.node_id].node.gpus)
                ]
            case Quiesced():
                return [event.worker]
            case WorkerFailed():
                return [event.worker] if event.kind != "process" else []
            case Silent():
                return []
            case GroupsFormed():
                return list(self._forming.plan.ranks) if self._forming is not None else []
        group = self._groups.get(getattr(event, "generation", 0))
        return list(group.plan.ranks) if group is not None else []
