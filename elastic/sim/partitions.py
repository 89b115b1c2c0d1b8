"""Simulated partitions: a node that neither the driver nor its peers reach for some time, and that
works all the while; and two nodes that do not reach each other, while the driver reaches both.

Its connections stand, so nothing is lost when it is back: a step that waited continues, an order
arrives, and what its workers had to say is heard. Unless the driver has ended them meanwhile: they
obey that before anything else of them is heard. A generation that two nodes which are apart are in
waits likewise, until the driver finds that nobody makes progress; and one that is to meet then does
not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_breaks import SimGeneration
from elastic.sim.sim_generations import Generations
from elastic.types import (
    EnterPlan,
    Event,
    GroupsFormed,
    NodePrepared,
    NodeRefused,
    Prepare,
    Quiesced,
    Silent,
    WorkerFailed,
    WorkerId,
)  # fmt: skip


class Partitions(Generations):
    """Generations whose nodes may be cut off."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._apart_until_s: dict[tuple[str, str], float] = {}

    def _part(self, one: str, other: str, fault: Fault) -> None:
        """From now on these two do not reach each other."""
        until_s = self._now_s + fault.lasts_s
        self._apart_until_s[one, other] = max(until_s, self._apart_until_s.get((one, other), 0.0))
        for group in self._groups.values():
            if group.entered and not group.ended and self._apart(group.plan.ranks):
                self._watch_apart(group, fault)

    def _apart(self, workers: Collection[WorkerId]) -> list[tuple[str, str]]:
        nodes = {worker.node_id for worker in workers}
        return [
            pair
            for pair, until_s in self._apart_until_s.items()
            if until_s > self._now_s and nodes.issuperset(pair)
        ]

    def _apart_s(self, workers: Collection[WorkerId]) -> float:
        """Until all of them reach each other."""
        if not self._apart_until_s:
            return 0.0
        return max((self._apart_until_s[p] - self._now_s for p in self._apart(workers)), default=0)

    def _parted_s(self, workers: Collection[WorkerId]) -> float:
        return max(super()._parted_s(workers), self._apart_s(workers))

    def _watch_apart(self, group: SimGeneration, fault: Fault) -> None:
        def looked() -> None:
            if not group.ended and self._apart(group.plan.ranks):
                self._break(group, fault.moment)

        self._after(self.delays.silent_s, looked)

    def _formed(self, forming: SimGeneration) -> None:
        if not self._apart(forming.members):
            super()._formed(forming)
            return

        def told() -> None:
            if self._forming is forming and (pairs := self._apart(forming.members)):
                error = " does not reach ".join(pairs[0])
                self._tell(GroupsFormed(forming.plan.generation, 0.0, error, pairs[0]))
            elif self._forming is forming:
                super(Partitions, self)._formed(forming)

        self._after(self.delays.meet_s, told)

    def _did_not_meet(self, group: SimGeneration) -> None:
        """The workers have waited for each other as long as they do, and say whom they miss."""
        pairs = self._apart(group.members)
        if group.ended or not pairs:
            self._entered(group)
            return
        group.ended = True
        for one, other in pairs:
            worker = min(worker for worker in group.members if worker.node_id == one)
            if self._answers(worker):
                error = f"{one} does not reach {other}"
                self._tell(
                    WorkerFailed(
                        worker, group.plan.generation, "collective", error, unreached=(other,)
                    )
                )

    def _cut(self, node_id: str, fault: Fault) -> None:
        machine, self._cut_once = self._machines[node_id], True
        machine.cut_until_s = max(machine.cut_until_s, self._now_s + fault.lasts_s)
        for group in self._groups.values():
            if not group.ended and any(worker.node_id == node_id for worker in group.needed):
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
                for worker in sorted(group.needed)
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
        elif not group.ended and (apart_s := self._apart_s(group.members)) > 0:
            meet_s = min(apart_s, self.delays.meet_s)
            self._after(meet_s, lambda: self._did_not_meet(group))
        else:
            super()._entered(group)

    def _step(self, group: SimGeneration) -> None:
        """Ranks that are all cut off together step on; what they say is heard later."""
        ranks, wait_s = group.plan.ranks, self._cut_s(group.plan.ranks)
        wait_s = max(wait_s if len(group.plan.nodes) > 1 else 0.0, self._apart_s(ranks))
        if wait_s > 0 and not group.ended:
            self._after(wait_s, lambda: self._step(group))
        else:
            super()._step(group)

    def _prepare(self, action: Prepare) -> None:
        """The silent workers of a node that is cut off are ended first, as soon as it is reached:
        what they had to say is not heard any more."""
        if self._cut_s([WorkerId(action.node_id, 0)]) > 0:
            self._ended_s[action.node_id] = self._now_s
        super()._prepare(action)

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

        said_s = self._now_s

        def again() -> None:
            if any(
                self._lives(worker) and self._ended_s.get(worker.node_id, -1.0) <= said_s
                for worker in told_by
            ):
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
