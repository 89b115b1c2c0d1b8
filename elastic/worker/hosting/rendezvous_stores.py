"""Where the processes of a generation meet: its store, the groups that are made ahead of it, and
the orders that bring all participants there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from elastic.reshard.transfer_plan import participants
from elastic.types import (
    DropGroups,
    EnterPlan,
    Event,
    FormGroups,
    GroupsFormed,
    Plan,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.hosting.liveness import Liveness

if TYPE_CHECKING:
    from elastic.worker.hosting.aggregate import Gather


class Hosts(Protocol):
    """Where the sessions are."""

    def address(self) -> str:
        """Of this host, as they reach it."""

    def order(self, worker: WorkerId, order: Any) -> bool:
        """Gives a worker an order, or what `shared` has made of one; False = it is not there."""

    def shared(self, order: WorkerOrder, n: int) -> Any:
        """The order as it goes to each of so many workers."""


@dataclass
class RendezvousStores:
    """One store per generation, kept in this process: dropping it frees ranks that still wait in
    it. `epoch`: this driver's."""

    hosts: Hosts
    gather: Gather
    liveness: Liveness
    epoch: int = 0
    _stores: dict[int, Any] = field(default_factory=dict)
    # of groups that are made ahead
    _formed: tuple[Plan, Rendezvous] | None = None

    def enter(self, action: EnterPlan) -> list[Event]:
        """Orders it where the groups made ahead are, if they are this plan's, else anew; the
        participants that are not there have failed."""
        plan = action.plan
        formed, self._formed = self._formed, None
        there = (
            formed is not None and _same_groups(formed[0], plan) and not self.gather.awaits_groups
        )
        rendezvous = formed[1] if formed is not None and there else self.host(plan)
        self.gather.expect_groups(0, 0, 0)
        return [
            WorkerFailed(worker, plan.generation, "process", "it is not there")
            for worker in self._absent(action, rendezvous)
        ]

    def form(self, action: FormGroups) -> list[Event]:
        """Orders groups ahead; without one of the participants there will be none."""
        plan, rendezvous = action.plan, self.host(action.plan)
        self._formed = plan, rendezvous
        self.gather.expect_groups(
            plan.generation, rendezvous.store[1], len(rendezvous.participants)
        )
        absent = self._absent(action, rendezvous)
        if absent:
            self._formed = None
        return [GroupsFormed(plan.generation, 0.0, f"{worker} is not there") for worker in absent]

    def drop_formed(self, action: DropGroups) -> None:
        if self._formed is not None:
            self._formed = None
            self._stores.pop(action.generation, None)

    def not_formed(self) -> None:
        """The groups ahead could not be made."""
        self._formed = None

    def abort(self, generation: int) -> None:
        """Frees who waits for it, or in the groups that are made ahead of the next."""
        self.drop(generation + (self._formed is not None))
        self._formed = None

    def drop(self, generation: int) -> None:
        """The stores of this generation and older ones."""
        for number in [number for number in self._stores if number <= generation]:
            del self._stores[number]

    def clear(self) -> None:
        self._stores.clear()

    def host(self, plan: Plan) -> Rendezvous:
        """Opens the store in which its participants meet."""
        from elastic.worker.session.workplace import host_rendezvous

        timeout_s = self.liveness.timeout_s(plan.predicted_step_time_s)
        rendezvous, self._stores[plan.generation] = host_rendezvous(
            plan, self.hosts.address(), timeout_s, epoch=self.epoch
        )
        return rendezvous

    def _absent(self, action: EnterPlan | FormGroups, rendezvous: Rendezvous) -> list[WorkerId]:
        """Gives it to all participants; returns those that are not there."""
        everyone = rendezvous.participants
        sent = self.hosts.shared(WorkerOrder(action, rendezvous), len(everyone))
        return [worker for worker in everyone if not self.hosts.order(worker, sent)]


def _same_groups(one: Plan, other: Plan) -> bool:
    """Are the process groups of one plan those of the other?"""
    first, second = (
        (plan.generation, plan.layout, participants(plan.ranks, plan.resume))
        for plan in (one, other)
    )
    return first == second
