"""Simulated nodes: asked for, prepared, taken, lost; and which processes live."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Set
from dataclasses import dataclass

from elastic.sim.clock import Clock
from elastic.sim.scripted_faults import Delays, Fault, Moment
from elastic.types import (
    DrainNode,
    Holding,
    Job,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    Notice,
    NoticeWithdrawn,
    Pool,
    Prepare,
    PriceSeen,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    SampleProfile,
    WorkerId,
)  # fmt: skip

WAVES = 32  # in which the nodes of a request come at most


class NodePrices:
    """Of a node of a pool, as they change: dollars from the beginning until a moment."""

    def __init__(self, usd_per_h: float) -> None:
        self._at_s, self._usd_per_h, self._usd = [0.0], [usd_per_h], [0.0]

    @property
    def now_usd_per_h(self) -> float:
        return self._usd_per_h[-1]

    def change(self, at_s: float, usd_per_h: float) -> None:
        self._usd.append(self.until(at_s))
        self._at_s.append(at_s)
        self._usd_per_h.append(usd_per_h)

    def until(self, at_s: float) -> float:
        k = max(0, bisect_right(self._at_s, at_s) - 1)
        return self._usd[k] + max(0.0, at_s - self._at_s[k]) / 3600 * self._usd_per_h[k]


@dataclass
class SimMachine:
    """A node as it really is."""

    node: Node
    born_s: float
    prepared: bool = False
    hung: bool = False
    cut_until_s: float = 0.0  # neither the driver nor its peers reach it
    gone_s: float | None = None
    deadline_s: float | None = None  # of its notice


class SimMachines(Clock):
    """The nodes of some pools, and what the processes on them hold."""

    def __init__(self, pools: tuple[Pool, ...], job: Job, delays: Delays) -> None:
        super().__init__()
        self.pools, self.job, self.delays = pools, job, delays
        self._machines: dict[str, SimMachine] = {}
        # of each pool those that stand, in the order in which they came
        self._living: dict[str, dict[str, None]] = {pool.name: {} for pool in pools}
        self._cut_once = False  # has any node ever been cut off?
        # node -> when its workers were ended while it was cut off
        self._ended_s: dict[str, float] = {}
        self._told_lost: set[str] = set()
        self._held: dict[WorkerId, tuple[Holding, ...]] = {}
        self._dead: set[WorkerId] = set()
        self._dry_until_s: dict[str, float] = {}
        self._slow: dict[str, tuple[float, float]] = {}  # pool -> until when, and by how much
        self._crash_until_s: dict[str, float] = {}
        self._refuse_until_s: dict[str, float] = {}
        # since when which
        self._prices = {pool.name: NodePrices(pool.usd_per_node_h) for pool in pools}
        self._coming: dict[str, int] = {}
        self._withdrawn: set[str] = set()
        self._n_nodes = 0
        self._before: list[SimMachine] = []  # of nodes that stand again
        self._n_paid = 0
        # what nodes tell of samples in the phases of the job
        self.phase_samples: tuple[SampleProfile | None, ...] = ()
        self.most_nodes = 0  # that were paid for at a time

    def _kill(self, workers: set[WorkerId], moment: Moment = "inside") -> None:
        """Processes end: what they hold is gone."""
        for worker in workers:
            self._held.pop(worker, None)
        self._dead |= workers

    def gpu_seconds(self) -> float:
        """The bill: from NodeReady to NodeLost or Stop, times the node's GPUs."""
        end_s = self._now_s if self._stopped_s is None else self._stopped_s
        return sum((min(end_s, m.gone_s or end_s) - m.born_s) * m.node.gpus for m in self._all())

    def usd(self) -> float:
        """The bill in dollars, at the prices of each moment; with the head."""
        end_s = self._now_s if self._stopped_s is None else self._stopped_s
        nodes = (
            self._cost(m.node.pool, m.born_s, min(end_s, m.gone_s or end_s)) for m in self._all()
        )
        return sum(nodes) + end_s / 3600 * self.job.head_usd_per_h

    def _all(self) -> list[SimMachine]:
        return [*self._before, *self._machines.values()]

    def _cost(self, pool: str, from_s: float, to_s: float) -> float:
        return max(0.0, self._prices[pool].until(to_s) - self._prices[pool].until(from_s))

    def _pool_fault(self, fault: Fault) -> None:
        name, until_s = fault.pool, self._now_s + fault.lasts_s
        if fault.kind == "drought":
            self._dry_until_s[name] = max(self._dry_until_s.get(name, 0.0), until_s)
        elif fault.kind == "slow":
            self._slow[name] = (until_s, fault.amount)
        elif fault.kind == "crash":
            self._crash_until_s[name] = until_s
        elif fault.kind == "refuse":
            self._refuse_until_s[name] = until_s
        else:
            self._prices[name].change(self._now_s, fault.amount)
            self._tell(PriceSeen(name, fault.amount))

    def _request(self, action: RequestNodes) -> None:
        if action.count == 0:
            self._withdrawn.add(action.request_id)
            return
        pool = next(p for p in self.pools if p.name == action.pool)
        room = self._room(pool)
        if self._now_s < self._dry_until_s.get(pool.name, 0.0) or room <= 0:
            self._tell(RequestFailed(pool.name, action.request_id, "no capacity"), 1.0)
            return
        until_s, more_s = self._slow.get(pool.name, (0.0, 0.0))
        boot_s = self.delays.boot_s + (more_s if self._now_s < until_s else 0.0)
        n = min(action.count, room)
        at_once = -(-n // WAVES)
        for k in range(n):
            self._coming[pool.name] = self._coming.get(pool.name, 0) + 1
            self._after(boot_s + 0.5 * (k // at_once), lambda: self._come(pool, action.request_id))

    def _room(self, pool: Pool) -> int:
        """Nodes that it has beyond those that are there, until their end is known, and coming."""
        there = [
            m
            for m in self._machines.values()
            if m.node.pool == pool.name and m.gone_s is None and m.deadline_s is None
        ]
        return max(0, pool.max_nodes - len(there) - self._coming.get(pool.name, 0))

    def _come(self, pool: Pool, request_id: str) -> None:
        self._coming[pool.name] = max(0, self._coming.get(pool.name, 0) - 1)
        if request_id not in self._withdrawn:
            self._boot(pool)

    def _boot(self, pool: Pool) -> None:
        self._n_nodes += 1
        node = Node(self._name(pool), pool.name, pool.gpus_per_node)
        self._machines[node.node_id] = SimMachine(node, self._now_s)
        self._living[pool.name][node.node_id] = None
        self._n_paid += 1
        self.most_nodes = max(self.most_nodes, self._n_paid)
        self._tell(NodeReady(node))
        if self._now_s < self._crash_until_s.get(pool.name, 0.0):
            self._after(
                0.5 * self.delays.prepare_s, lambda: self._lose(node.node_id, "ended at start", 0.0)
            )
        if pool.ends_at_s is not None:
            self._at(
                pool.ends_at_s,
                lambda: self._lose(
                    node.node_id, "the reservation has ended", self.delays.confirm_s
                ),
            )

    def _name(self, pool: Pool) -> str:
        """Of the node that boots."""
        return f"{pool.name}-{self._n_nodes}"

    def _prepare_s(self) -> float:
        """Of a node, from now on."""
        return self.delays.prepare_s

    def _prepare(self, action: Prepare) -> None:
        machine = self._machines.get(action.node_id)
        if machine is None:
            return
        if machine.born_s < self._refuse_until_s.get(machine.node.pool, 0.0):
            self._after(self.delays.admit_s, lambda: self._refuse(machine))
            return

        def done() -> None:
            if self._stands(machine):
                machine.prepared, machine.hung = True, False
                self._dead -= self._workers_on(machine.node)
                self._tell(NodePrepared(action.node_id, phase_samples=self.phase_samples))

        self._after(self._cut_s([WorkerId(action.node_id, 0)]) + self._prepare_s(), done)

    def _refuse(self, machine: SimMachine) -> None:
        if self._stands(machine):
            self._tell(NodeRefused(machine.node.node_id, "scripted", machine.node.pool))

    def _stands(self, machine: SimMachine) -> bool:
        """It is neither lost nor about to be found so."""
        return machine.node.node_id in self._living[machine.node.pool]

    @staticmethod
    def _workers_on(node: Node) -> set[WorkerId]:
        """And what stands for the node itself."""
        return {WorkerId(node.node_id, k) for k in range(-1, node.gpus)}

    def _lives(self, worker: WorkerId) -> bool:
        machine = self._machines.get(worker.node_id)
        if machine is None or machine.gone_s is not None:
            return False
        return not self._dead or not (
            worker in self._dead or WorkerId(worker.node_id, -1) in self._dead
        )

    def _answers(self, worker: WorkerId) -> bool:
        return self._lives(worker) and not self._machines[worker.node_id].hung

    def _ended(self, workers: Set[WorkerId], nodes: Set[str]) -> Set[WorkerId]:
        """Of many workers, which are on these nodes, those that do not live."""
        standing = {name for name, machine in self._machines.items() if machine.gone_s is None}
        return self._off(workers, nodes - standing)

    def _mute(self, workers: Set[WorkerId], nodes: Set[str]) -> Set[WorkerId]:
        """Of many workers, which are on these nodes, those that do not answer."""
        machines = self._machines.items()
        well = {name for name, one in machines if one.gone_s is None and not one.hung}
        return self._off(workers, nodes - well)

    def _off(self, workers: Set[WorkerId], away: Set[str]) -> Set[WorkerId]:
        away = away | {worker.node_id for worker in self._dead if worker.local_rank < 0}
        dead = workers & self._dead
        return dead | {w for w in workers if w.node_id in away} if away else dead

    def _cut_s(self, workers: Iterable[WorkerId]) -> float:
        """Until all of these are reached."""
        if not self._cut_once:
            return 0.0
        there = [
            self._machines[worker.node_id] for worker in workers if worker.node_id in self._machines
        ]
        return max((max(0.0, machine.cut_until_s - self._now_s) for machine in there), default=0.0)

    def _release(self, action: ReleaseNode) -> None:
        if action.node_id in self._machines:
            self._lose(action.node_id, "released", self.delays.release_s)

    def _drain(self, action: DrainNode) -> None:
        """A drain that the policy has ordered is no news to it, and takes no node by itself."""

    def _lose(
        self, node_id: str, cause: str, confirm_s: float, *, moment: Moment = "inside"
    ) -> None:
        machine = self._machines.get(node_id)
        if machine is None or not self._stands(machine):
            return
        self._dead.add(WorkerId(node_id, -1))
        self._living[machine.node.pool].pop(node_id, None)

        def confirmed() -> None:
            machine.gone_s = self._now_s
            self._n_paid -= 1
            self._told_lost.add(node_id)
            self._dead -= self._workers_on(machine.node)  # it is gone with all that was on it
            self._tell(NodeLost(node_id, cause))
            self._confirmed(machine)

        workers = {WorkerId(node_id, k) for k in range(machine.node.gpus)}
        self._kill(workers, moment)
        self._after(confirm_s, confirmed)

    def _confirmed(self, machine: SimMachine) -> None:
        """Everybody knows that it is gone."""

    def _come_back(self, node_id: str) -> None:
        """Under its name, with nothing in memory."""
        before = self._machines[node_id]
        if before.gone_s is None:  # its end is not found out yet
            self._after(self.delays.confirm_s, lambda: self._come_back(node_id))
            return
        self._before.append(before)
        self._told_lost.discard(node_id)
        self._living[before.node.pool][node_id] = None
        self._n_paid += 1
        del self._machines[node_id]  # at the end: order of arrival
        self._machines[node_id] = SimMachine(before.node, self._now_s)
        self._tell(NodeReady(before.node))

    # -------------------------------------------------------------------------------------- notices

    def _notice(
        self, node_id: str, lasts_s: float, late_s: float = 0.0, *, taken: bool = True
    ) -> None:
        """The node is taken `late_s` after the deadline, unless the notice is withdrawn or another
        one comes."""
        machine, deadline_s = self._machines[node_id], self._now_s + lasts_s
        machine.deadline_s = deadline_s

        def take() -> None:
            if machine.deadline_s == deadline_s:
                self._lose(node_id, "taken", self.delays.confirm_s)

        self._tell(Notice(node_id, deadline_s, "scripted"))
        if taken:
            self._after(max(0.0, lasts_s + late_s), take)

    def _withdraw(self, node_id: str) -> None:
        self._machines[node_id].deadline_s = None
        self._tell(NoticeWithdrawn(node_id))
