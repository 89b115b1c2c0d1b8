"""Backend on a virtual clock: the same contract as a cluster, fixed delays, scripted faults. No
torch, no ray, no threads.

It keeps its own truth (who lives, who holds which boxes of which step) and notes in `violations`
every order that the contract forbids: a plan on a node that was reported lost or has been taken, a
generation that does not rise, a source of state that does not exist or is known to be wrong, a step
applied by a commit that nobody has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from elastic.sim.gpu_speeds import Paces
from elastic.sim.partitions import Partitions
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_storage import STORAGE_KINDS
from elastic.types import (
    Abort,
    Action,
    CopyRemoved,
    DrainNode,
    DropGroups,
    EnterPlan,
    FormGroups,
    Job,
    Plan,
    Pool,
    Prepare,
    Quiesce,
    ReleaseNode,
    RemoveCopy,
    RequestNodes,
    RollForward,
    SetCadence,
    SetShares,
    Stop,
    StopAsked,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)  # fmt: skip

PACED = ("throttle", "jitter", "drift")


class SimBackend(Partitions):
    """`fits(plan)`: does the plan fit the memory; a plan that does not ends in out_of_memory.
    `speeds`: of nodes whose speed is not the nominal one."""

    virtual = True

    def __init__(
        self,
        pools: tuple[Pool, ...],
        job: Job,
        faults: Iterable[Fault] = (),
        *,
        delays: Delays | None = None,
        fits: Callable[[Plan], bool] = lambda plan: True,
        speeds: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(pools, job, delays or Delays(), fits=fits)
        self.closed = False
        faults = list(faults)
        unequal = bool(speeds) or any(fault.kind in PACED for fault in faults)
        self.paces = Paces(unequal, dict(speeds or {}))
        for fault in faults:
            self._at(fault.at_s, lambda f=fault: self._fault(f))  # type: ignore[misc]

    def execute(self, action: Action) -> None:
        orders: dict[type, Callable[[Any], None]] = {
            RequestNodes: self._request, ReleaseNode: self._release, DrainNode: self._drain,
            Prepare: self._prepare, EnterPlan: self._enter, FormGroups: self._form,
            DropGroups: self._drop_groups, Abort: self._abort, Quiesce: self._quiesce,
            StoreCopy: self._store, Stop: self._stop, SetCadence: self._set_cadence,
            SetShares: self._set_shares, RollForward: self._roll_forward, RemoveCopy: self._remove,
        }  # fmt: skip
        order = orders.get(type(action))
        if order and self._stopped_s is None:
            order(action)

    def close(self) -> None:
        self.closed = True

    def _remove(self, action: RemoveCopy) -> None:
        self.stored.pop(action.uri, None)
        self._tell(CopyRemoved(action.uri))

    def _stop(self, action: Stop) -> None:
        self._stopped_s = self._now_s

    # --------------------------------------------------------------------------------------- faults

    def _fault(self, fault: Fault) -> None:
        if fault.kind in ("drought", "slow", "crash", "refuse", "price"):
            self._pool_fault(fault)
            return
        if fault.kind == "add":
            self._boot(next(p for p in self.pools if p.name == fault.pool))
            return
        if fault.kind in ("jitter", "drift"):
            self.paces.take(fault, "", 0)
            return
        if fault.kind == "damage":
            self._damage(fault)
            return
        if fault.kind in STORAGE_KINDS:
            self.sim_storage.begin(replace(fault, at_s=self._now_s))
            return
        if fault.kind == "stop":
            self._tell(StopAsked("scripted"))
            return
        if fault.kind == "wrong_layout":
            if self._running():
                self.functions.break_new_axes(
                    [group.plan.layout for group in self._groups.values() if group.entered]
                )
            return
        if fault.kind == "not_finite":
            self._not_finite.add(max((g.step for g in self._running()), default=0) + 1)
            self._for_ever |= fault.lasting
            return
        alive = [
            name
            for name, m in self._machines.items()
            if self._stands(m) and fault.only in ("", m.node.pool)
        ]
        if alive:
            self._node_fault(fault, alive)

    def _node_fault(self, fault: Fault, alive: list[str]) -> None:
        node_id = alive[fault.which % len(alive)]
        noticed = [name for name in alive if self._machines[name].deadline_s is not None]
        if fault.kind == "notice":
            self._notice(node_id, fault.lasts_s, fault.amount, taken=not fault.lasting)
        elif fault.kind == "throttle":
            self.paces.take(fault, node_id, self._machines[node_id].node.gpus)
        elif fault.kind == "withdraw" and noticed:
            self._withdraw(noticed[fault.which % len(noticed)])
        elif fault.kind in ("loss", "return"):
            self._lose(node_id, "lost", self.delays.confirm_s, moment=fault.moment)
            if fault.kind == "return":
                self._after(fault.lasts_s, lambda: self._come_back(node_id))
        elif fault.kind == "process" and self._machines[node_id].prepared:
            worker = WorkerId(node_id, 0)
            generation = max(
                (g.plan.generation for g in self._running() if worker in g.members), default=0
            )
            self._kill({worker}, fault.moment)
            self._tell(
                WorkerFailed(worker, generation, "process", "exit code -9"), self.delays.detect_s
            )
        elif fault.kind == "device" and self._machines[node_id].prepared:
            worker = WorkerId(node_id, max(0, fault.gpu))
            if self._answers(worker):
                self._lose_device(worker, fault.moment)
        elif fault.kind == "wrong_numbers" and self._running():
            self._wrong_numbers(
                self._running()[-1], "" if fault.lasting else node_id, int(fault.amount)
            )
        elif fault.kind == "partition":
            self._cut(node_id, fault)
        elif fault.kind == "apart" and len(alive) > 1:
            other = alive[(fault.which + 1) % len(alive)]
            self._part(min(node_id, other), max(node_id, other), fault)
        elif fault.kind in ("hang", "stall"):
            self._machines[node_id].hung = True
            for group in self._running():
                if group.needed & {
                    WorkerId(node_id, k) for k in range(self._machines[node_id].node.gpus)
                }:
                    self._unanswered(
                        group,
                        ""
                        if fault.kind == "hang"
                        else f"in the all-reduce of step {group.step + 1}",
                    )
        elif fault.kind == "error" and self._running():
            self._break(self._running()[-1], fault.moment)
        elif fault.kind == "corrupt" and self._running():
            self._corrupt(self._running()[-1])
