"""Backend on a virtual clock: the same contract as a cluster, fixed delays, scripted faults. No torch, no ray, no threads.

It keeps its own truth (who lives, who holds which boxes of which step) and notes in `violations` every order that the contract
forbids: a plan on a node that was reported lost, a generation that does not rise, a source of state that does not exist.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic.errors import InternalError
from elastic.mesh import partners, replica_key
from elastic.types import (
    Abort,
    Action,
    Copy,
    CopyStored,
    EnterPlan,
    Event,
    Holding,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    PlanEntered,
    Pool,
    Prepare,
    Quiesce,
    Quiesced,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Silent,
    StepDone,
    Stop,
    StopAsked,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)  # fmt: skip

FaultKind = Literal["notice", "loss", "hang", "process", "error", "drought", "add", "stop"]


@dataclass(frozen=True)
class Delays:
    """Seconds on the virtual clock. A step takes `work_s` divided by the number of workers."""

    boot_s: float = 5.0
    prepare_s: float = 4.0
    enter_s: float = 0.8
    restore_s: float = 2.5
    work_s: float = 4.0
    copy_s: float = 0.05
    store_s: float = 1.2
    detect_s: float = 0.2
    confirm_s: float = 2.0
    silent_s: float = 6.0
    quiesce_s: float = 0.1
    release_s: float = 0.5


@dataclass(frozen=True)
class Fault:
    """What happens at `at_s`. `which` picks a node by its place among those that live (modulo their number).

    notice: taken after `lasts_s`. drought: the pool gives nothing for `lasts_s`. loss, hang, process: of a node, or of its
    first worker; `torn`: half of the survivors had already finished the step. error: a collective fails, nobody is gone.
    """

    at_s: float
    kind: FaultKind
    which: int = 0
    lasts_s: float = 30.0
    pool: str = ""
    torn: bool = False


@dataclass
class _Machine:
    node: Node
    born_s: float
    prepared: bool = False
    hung: bool = False
    gone_s: float | None = None


@dataclass
class _Group:
    """One generation as it really is."""

    plan: Plan
    step: int = 0
    entered: bool = False
    ended: bool = False
    leave_for: Plan | None = None
    quiesce: bool = False
    save: bool = False

    @property
    def members(self) -> set[WorkerId]:
        return set(self.plan.ranks) | {h.worker for h in self.plan.resume.holdings}


@dataclass
class SimBackend:
    """`fits(plan)`: does the plan fit the memory; a plan that does not ends in out_of_memory."""

    pools: tuple[Pool, ...]
    job: Mapping[str, Any]
    faults: Iterable[Fault] = ()
    delays: Delays = field(default_factory=Delays)
    fits: Callable[[Plan], bool] = lambda plan: True
    virtual: bool = True
    violations: list[str] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._out: list[Event] = []
        self._machines: dict[str, _Machine] = {}
        self._told_lost: set[str] = set()
        self._groups: dict[int, _Group] = {}
        self._held: dict[WorkerId, tuple[Holding, ...]] = {}
        self._dead: set[WorkerId] = set()
        self._dry_until_s: dict[str, float] = {}
        self._coming: dict[str, int] = {}
        self._n_nodes = 0
        self._stopped_s: float | None = None
        for fault in self.faults:
            self._at(fault.at_s, lambda f=fault: self._fault(f))  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------ Backend

    def now_s(self) -> float:
        return self._now_s

    def poll(self, until_s: float | None) -> list[Event]:
        while not self._out and self._queue and self._stopped_s is None:
            if until_s is not None and self._queue[0][0] > until_s:
                break
            self._now_s = max(self._now_s, self._queue[0][0])
            while self._queue and self._queue[0][0] <= self._now_s:
                heapq.heappop(self._queue)[2]()
        if not self._out:
            if until_s is None:
                raise InternalError(f"at {self._now_s:.1f} s nothing is under way and nobody wants to be woken: the run hangs")
            self._now_s = max(self._now_s, until_s)
        found, self._out = self._out, []
        return found

    def execute(self, action: Action) -> None:
        orders: dict[type, Callable[[Any], None]] = {
            RequestNodes: self._request, ReleaseNode: self._release, Prepare: self._prepare, EnterPlan: self._enter,
            Abort: self._abort, Quiesce: self._quiesce, StoreCopy: self._store, Stop: self._stop,
        }  # fmt: skip
        order = orders.get(type(action))
        if order and self._stopped_s is None:
            order(action)

    def close(self) -> None:
        self.closed = True

    def gpu_seconds(self) -> float:
        """The bill: from NodeReady to NodeLost or Stop, times the node's GPUs."""
        end_s = self._now_s if self._stopped_s is None else self._stopped_s
        return sum((min(end_s, m.gone_s or end_s) - m.born_s) * m.node.gpus for m in self._machines.values())

    # ------------------------------------------------------------------------------------------ clock

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (at_s, self._sequence, what))

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._at(self._now_s + delay_s, what)

    def _tell(self, event: Event, delay_s: float = 0.0) -> None:
        if delay_s:
            self._after(delay_s, lambda: self._out.append(event))
        else:
            self._out.append(event)

    # ------------------------------------------------------------------------------------------ nodes

    def _request(self, action: RequestNodes) -> None:
        pool = next(p for p in self.pools if p.name == action.pool)
        alive = sum(m.node.pool == pool.name and m.gone_s is None for m in self._machines.values())
        room = pool.max_nodes - alive - self._coming.get(pool.name, 0)
        if self._now_s < self._dry_until_s.get(pool.name, 0.0) or room <= 0:
            self._tell(RequestFailed(pool.name, action.request_id, "no capacity"), 1.0)
            return
        for k in range(min(action.count, room)):
            self._coming[pool.name] = self._coming.get(pool.name, 0) + 1
            self._after(self.delays.boot_s + 0.5 * k, lambda: self._boot(pool))

    def _boot(self, pool: Pool) -> None:
        self._coming[pool.name] = max(0, self._coming.get(pool.name, 0) - 1)
        self._n_nodes += 1
        node = Node(f"{pool.name}-{self._n_nodes}", pool.name, pool.gpus_per_node)
        self._machines[node.node_id] = _Machine(node, self._now_s)
        self._tell(NodeReady(node))

    def _prepare(self, action: Prepare) -> None:
        machine = self._machines.get(action.node_id)
        if machine is None:
            return

        def done() -> None:
            if machine.gone_s is None and machine.node.node_id not in self._lost():
                machine.prepared, machine.hung = True, False
                self._dead = {w for w in self._dead if w.node_id != action.node_id}
                self._tell(NodePrepared(action.node_id))

        self._after(self.delays.prepare_s, done)

    def _lost(self) -> set[str]:
        return {name for name, m in self._machines.items() if m.gone_s is not None or name in self._dying}

    @property
    def _dying(self) -> set[str]:
        return {worker.node_id for worker in self._dead if worker.local_rank < 0}

    def _lives(self, worker: WorkerId) -> bool:
        return worker.node_id in self._machines and worker.node_id not in self._lost() and worker not in self._dead

    def _answers(self, worker: WorkerId) -> bool:
        return self._lives(worker) and not self._machines[worker.node_id].hung

    def _release(self, action: ReleaseNode) -> None:
        if action.node_id in self._machines:
            self._lose(action.node_id, "released", self.delays.release_s)

    def _lose(self, node_id: str, cause: str, confirm_s: float, torn: bool = False) -> None:
        machine = self._machines[node_id]
        if machine.gone_s is not None or node_id in self._dying:
            return
        self._dead.add(WorkerId(node_id, -1))

        def confirmed() -> None:
            machine.gone_s = self._now_s
            self._told_lost.add(node_id)
            self._tell(NodeLost(node_id, cause))

        workers = {WorkerId(node_id, k) for k in range(machine.node.gpus)}
        self._kill(workers, torn)
        self._after(confirm_s, confirmed)

    def _kill(self, workers: set[WorkerId], torn: bool = False) -> None:
        """Processes end: their holdings are gone, and their groups break."""
        for worker in workers:
            self._held.pop(worker, None)
        self._dead |= workers
        for group in self._groups.values():
            needed = set(group.plan.ranks) if group.entered else group.members
            if not group.ended and needed & workers:
                self._break(group, torn)

    def _break(self, group: _Group, torn: bool) -> None:
        group.ended = True
        survivors = [worker for worker in group.plan.ranks if self._answers(worker)]
        if torn and group.entered:
            for worker in survivors[::2]:
                self._advance(group, worker, group.step + 1)
        if survivors:
            error = "connection reset by peer"
            self._tell(WorkerFailed(survivors[0], group.plan.generation, "collective", error), self.delays.detect_s)

    # ------------------------------------------------------------------------------------------ generations

    def _enter(self, action: EnterPlan) -> None:
        plan = action.plan
        if plan.generation <= max(self._groups, default=0):
            self.violations.append(f"generation {plan.generation} after {max(self._groups)}")
        lost = [worker for worker in plan.ranks if worker.node_id in self._told_lost or worker.node_id not in self._machines]
        if lost:
            self.violations.append(f"generation {plan.generation} uses {lost[0]}, which was reported lost")
        if len(set(plan.ranks)) != plan.layout.world_size or sum(plan.samples) != self.job["global_batch"]:
            self.violations.append(f"generation {plan.generation}: {plan.ranks} and {plan.samples} do not fit {plan.layout}")
        group = self._groups[plan.generation] = _Group(plan)
        if any(not self._lives(worker) for worker in group.members):
            self._break(group, torn=False)
        elif any(not self._answers(worker) for worker in group.members):
            self._silence(group)
        source = self._groups.get(plan.resume.generation)
        if plan.resume.source == "live" and source is not None and not source.ended:
            source.leave_for = plan
        elif not group.ended:
            self._transition(group)

    def _transition(self, group: _Group) -> None:
        slow = group.plan.resume.source == "durable"
        self._after(self.delays.restore_s if slow else self.delays.enter_s, lambda: self._entered(group))

    def _entered(self, group: _Group) -> None:
        plan, resume = group.plan, group.plan.resume
        if not group.ended and any(not self._answers(worker) for worker in group.members):
            self._silence(group)
        if group.ended:
            return
        if not self.fits(plan):
            group.ended = True
            self._tell(WorkerFailed(plan.ranks[0], plan.generation, "out_of_memory", "out of memory", 1 << 30))
            return
        source = self._groups.get(resume.generation)
        group.step = source.step if resume.source == "live" and source else resume.step
        if resume.source in ("live", "peer") and not self._has_source(group):
            self.violations.append(f"generation {plan.generation}: nobody holds step {group.step} of {resume.generation}")
        for worker in group.members - set(plan.ranks):
            self._held.pop(worker, None)
            self._tell(Quiesced(worker, plan.generation, group.step))
        for rank, worker in enumerate(plan.ranks):
            self._held[worker] = (Holding(worker, plan.generation, rank, group.step, "live"),)
        group.entered = True
        self._tell(PlanEntered(plan.generation, group.step, {"groups": 0.1, "build": 0.2, "transfer": 0.5}))
        self._copy_to_peers(group)
        if group.step >= self.job["steps"]:
            self._finish(group)
        else:
            self._after(self._step_s(group), lambda: self._step(group))

    def _has_source(self, group: _Group) -> bool:
        resume = group.plan.resume
        assert resume.layout is not None
        layout, members = resume.layout, group.members
        there = {
            replica_key(layout, h.rank)
            for worker in members
            for h in self._held.get(worker, ())
            if (h.generation, h.step) == (resume.generation, group.step)
        }
        return there == {replica_key(layout, rank) for rank in range(layout.world_size)}

    def _step_s(self, group: _Group) -> float:
        return self.delays.work_s / len(group.plan.ranks)

    def _advance(self, group: _Group, worker: WorkerId, step: int) -> None:
        rank = group.plan.ranks.index(worker)
        kept = tuple(h for h in self._held.get(worker, ()) if h.kind == "peer")
        self._held[worker] = (Holding(worker, group.plan.generation, rank, step, "live"), *kept)

    def _step(self, group: _Group) -> None:
        if group.ended:
            return
        plan, step_s = group.plan, self._step_s(group)
        group.step += 1
        for worker in plan.ranks:
            self._advance(group, worker, group.step)
        copies = bool(plan.peer_every and group.step % plan.peer_every == 0)
        copy_s = self.delays.copy_s * 0.1 if copies else 0.0
        digest = f"sample-{group.step}"
        self._tell(StepDone(plan.generation, group.step, 1.0, 1000, step_s, 0.02 * step_s, copy_s, 1.0, digest))
        if copies:
            self._copy_to_peers(group)
        last = group.step >= self.job["steps"]
        saves = plan.durable_every and group.step % plan.durable_every == 0
        if last or group.save or saves:
            self._save(group)
        group.save = False
        if last or group.quiesce:
            self._finish(group)
        elif group.leave_for is not None:
            group.ended = True
            for worker in plan.ranks:
                self._tell(Quiesced(worker, plan.generation, group.step, self._held.get(worker, ())))
            successor = self._groups[group.leave_for.generation]
            if not successor.ended:
                self._transition(successor)
        else:
            self._after(step_s, lambda: self._step(group))

    def _copy_to_peers(self, group: _Group) -> None:
        plan, step = group.plan, group.step
        keepers = partners(plan.ranks)
        if not keepers or not plan.peer_every:
            return

        def acknowledged() -> None:
            if group.ended:
                return
            fresh: dict[WorkerId, list[Holding]] = {worker: [] for worker in plan.ranks}
            for rank, worker in enumerate(plan.ranks):
                for keeper in (worker, plan.ranks[keepers[rank]]):
                    fresh[keeper].append(Holding(keeper, plan.generation, rank, step, "peer"))
            for worker, holdings in fresh.items():
                live = tuple(h for h in self._held.get(worker, ()) if h.kind == "live")
                self._held[worker] = (*live, *holdings)
            self._tell(CopyStored(Copy(step, "peer", plan.generation, plan.layout, plan.layers)))

        self._after(self.delays.copy_s, acknowledged)

    def _save(self, group: _Group) -> None:
        plan, step = group.plan, group.step

        def stored() -> None:
            if all(self._lives(worker) for worker in plan.ranks):
                uri = f"sim://step-{step:08d}.g{plan.generation:04d}"
                self._tell(CopyStored(Copy(step, "durable", plan.generation, plan.layout, plan.layers, (), uri), 1.0, 0.05))

        self._after(self.delays.store_s, stored)

    def _finish(self, group: _Group) -> None:
        """All ranks leave at this boundary; the last copy is under way."""
        if not group.save and group.step >= self.job["steps"]:
            self._save(group)
        group.quiesce = True
        for worker in group.plan.ranks:
            held = self._held.get(worker, ())
            self._tell(Quiesced(worker, group.plan.generation, group.step, held), self.delays.quiesce_s)

    def _quiesce(self, action: Quiesce) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.quiesce, group.save = True, action.save

    def _store(self, action: StoreCopy) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.save = True

    def _abort(self, action: Abort) -> None:
        if action.kill:
            self._kill(set(action.kill))
            for worker in action.kill:
                self._machines[worker.node_id].hung = False
        members: set[WorkerId] = set()
        for group in [g for n, g in self._groups.items() if n <= action.generation]:
            recent = group.plan.generation >= action.generation - 1 or not group.ended
            members |= group.members if recent else set()
            group.ended = True
        for worker in sorted(members):
            if self._answers(worker):
                self._after(self.delays.quiesce_s, lambda w=worker: self._answer(w, action.generation))  # type: ignore[misc]

    def _answer(self, worker: WorkerId, generation: int) -> None:
        if self._answers(worker):
            held = self._held.get(worker, ())
            step = max((h.step for h in held if h.kind == "live"), default=0)
            self._tell(Quiesced(worker, generation, step, held))

    def _stop(self, action: Stop) -> None:
        self._stopped_s = self._now_s

    # ------------------------------------------------------------------------------------------ faults

    def _fault(self, fault: Fault) -> None:
        if fault.kind == "drought":
            self._dry_until_s[fault.pool] = max(self._dry_until_s.get(fault.pool, 0.0), self._now_s + fault.lasts_s)
            return
        if fault.kind == "add":
            self._boot(next(p for p in self.pools if p.name == fault.pool))
            return
        if fault.kind == "stop":
            self._tell(StopAsked("scripted"))
            return
        alive = [name for name in self._machines if name not in self._lost()]
        if not alive:
            return
        node_id = alive[fault.which % len(alive)]
        running = [g for g in self._groups.values() if g.entered and not g.ended]
        if fault.kind == "notice":
            self._tell(Notice(node_id, self._now_s + fault.lasts_s, "scripted"))
            self._after(fault.lasts_s, lambda: self._lose(node_id, "taken", self.delays.confirm_s))
        elif fault.kind == "loss":
            self._lose(node_id, "lost", self.delays.confirm_s, fault.torn)
        elif fault.kind == "process" and self._machines[node_id].prepared:
            worker = WorkerId(node_id, 0)
            generation = max((g.plan.generation for g in running if worker in g.members), default=0)
            self._kill({worker}, fault.torn)
            self._tell(WorkerFailed(worker, generation, "process", "exit code -9"), self.delays.detect_s)
        elif fault.kind == "hang":
            self._machines[node_id].hung = True
            for group in running:
                if group.members & {WorkerId(node_id, k) for k in range(self._machines[node_id].node.gpus)}:
                    self._silence(group)
        elif fault.kind == "error" and running:
            self._break(running[-1], torn=False)

    def _silence(self, group: _Group) -> None:
        """Somebody in the group no longer answers: the others wait until he is found silent."""
        group.ended = True
        for worker in sorted(group.members):
            if self._lives(worker) and not self._answers(worker):
                silent = Silent(worker, group.plan.generation, "stepping", self.delays.silent_s)
                self._tell(silent, self.delays.silent_s)
