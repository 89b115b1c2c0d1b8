"""A drill on the virtual clock: what it does to a run on the embedded cluster, with the delays that
another run there has measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from elastic.config.drill import EACH_OTHER, PARTITION_S, Scene, resolve
from elastic.driver import drive
from elastic.errors import SpecError
from elastic.ledger.journal import Line, MemoryJournal
from elastic.sim.markets.calibration import Calibration
from elastic.sim.scripted_faults import Fault, FaultKind
from elastic.sim.sim_backend import SimBackend
from elastic.sim.sim_breaks import SimGeneration
from elastic.types import (
    DrillAsked,
    DriverStarted,
    Evaluated,
    Event,
    Job,
    Plan,
    Pool,
    RequestFailed,
    RequestNodes,
    StepDone,
    StopAsked,
)

FAULTS: Mapping[str, FaultKind] = {
    "notice": "notice", "kill": "loss", "hang": "hang", "stall": "stall", "partition": "partition",
    "device_error": "device",
}  # fmt: skip
KNOWN = (*FAULTS, "add")
ANSWER_S = 0.05  # of the embedded cluster: it looks so often
GIVEN_UP_TIMES = 40.0  # the time of all steps, after which a run that is stuck is given up


def checked(drill: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raises SpecError for an entry that no simulation carries out."""
    for i, entry in enumerate(drill, 1):
        if not any(kind in entry for kind in KNOWN):
            kind = next((key for key in entry if key != "at_step"), "nothing")
            raise SpecError(f"{where}, entry {i}: {kind} is not simulated; {', '.join(KNOWN)} are")


class DrilledBackend(SimBackend):
    """Nodes as the embedded cluster has them: at most `max_nodes` of a pool, one fewer for each
    that a drill took, one more for each that it added. `step_s`: from step to step, of a plan."""

    def __init__(
        self,
        pools: tuple[Pool, ...],
        job: Job,
        drill: Sequence[Mapping[str, Any]],
        *,
        measured: Calibration,
        step_s: Callable[[Plan], float],
    ) -> None:
        super().__init__(pools, job, delays=measured.delays)
        self._measured, self._took_s = measured, step_s
        self._drill = sorted(drill, key=lambda entry: entry.get("at_step") or 0)
        self._capacity = {pool.name: pool.max_nodes for pool in pools}
        self._named: dict[str, int] = {}  # pool -> nodes so far
        self._evaluated = 0  # the step of the last one

    # ---------------------------------------------------------------------------------------- nodes

    def _name(self, pool: Pool) -> str:
        self._named[pool.name] = self._named.get(pool.name, 0) + 1
        return f"{pool.name}-{self._named[pool.name]}"

    def _prepare_s(self) -> float:
        first_s = self._measured.first_prepare_s
        return super()._prepare_s() if self._groups or first_s is None else first_s

    def _request(self, action: RequestNodes) -> None:
        """As many as there is room for; the rest is refused."""
        pool = next(p for p in self.pools if p.name == action.pool)
        used = sum(m.node.pool == pool.name and m.gone_s is None for m in self._machines.values())
        room = self._capacity[pool.name] - used - self._coming.get(pool.name, 0)
        n = max(0, min(action.count, room))
        if n < action.count:
            self._tell(RequestFailed(pool.name, action.request_id, "no capacity"), ANSWER_S)
        for _ in range(n):
            self._start(pool, action.request_id)

    def _start(self, pool: Pool, request_id: str) -> None:
        self._coming[pool.name] = self._coming.get(pool.name, 0) + 1
        self._after(self.delays.boot_s, lambda: self._come(pool, request_id))

    # --------------------------------------------------------------------------------------- drills

    def _say(self, event: Event) -> None:
        """What is due at a step happens once that is reported."""
        if isinstance(event, StepDone):
            took_s = event.step_time_s * self._measured.work
            data_s = event.step_time_s * self._measured.data
            event = replace(event, step_time_s=took_s, data_s=data_s)
        super()._say(event)
        if isinstance(event, StepDone):
            while self._drill and (self._drill[0].get("at_step") or 0) <= event.step:
                entry = self._drill.pop(0)
                self._after(ANSWER_S, lambda entry=entry: self._carry_out(entry))  # type: ignore[misc]

    def _carry_out(self, entry: Mapping[str, Any]) -> None:
        if "add" in entry:
            pool = next((p for p in self.pools if p.name == entry["add"]), None)
            if pool is None:
                why = f"drill: there is no pool '{entry['add']}'"
                self._tell(DrillAsked({**entry, "error": why}))
                return
            self._tell(DrillAsked(dict(entry)))
            self._capacity[pool.name] += 1
            self._start(pool, "drill")
            return
        kind = next(kind for kind in FAULTS if kind in entry)
        standing = self._standing()
        market = {pool.name: pool.market_type for pool in self.pools}
        markets = {name: market[self._machines[name].node.pool] for name in standing}
        leaving = {name for name in standing if self._machines[name].deadline_s is not None}
        newest = self._groups.get(max(self._groups, default=0))
        scene = Scene(newest.plan if newest else None, markets, frozenset(leaving))
        try:
            names = resolve(entry[kind], scene)
        except SpecError as error:
            self._tell(DrillAsked({**entry, "error": str(error)}))
            return
        self._tell(DrillAsked({**entry, kind: list(names)}))
        if entry.get("from") == EACH_OTHER:
            fault = Fault(self._now_s, "apart", lasts_s=entry.get("for_s", PARTITION_S))
            for pair in combinations(sorted(names), 2):
                self._part(*pair, fault)
            return
        for name in names:
            self._hit(name, kind, entry)

    def _standing(self) -> list[str]:
        """In the order in which they came."""
        return [name for name, machine in self._machines.items() if self._stands(machine)]

    def _hit(self, name: str, kind: str, entry: Mapping[str, Any]) -> None:
        pool = next(p for p in self.pools if p.name == self._machines[name].node.pool)
        if kind in ("notice", "kill") and self._machines[name].deadline_s is None:
            self._capacity[pool.name] -= 1
        lasts_s = entry.get("deadline_s", pool.notice_s)
        if kind == "partition":
            lasts_s = entry.get("for_s", PARTITION_S)
        self._fault(
            Fault(
                self._now_s,
                FAULTS[kind],
                self._standing().index(name),
                lasts_s,
                gpu=entry.get("gpu", -1),
            )
        )

    # ---------------------------------------------------------------------------------------- steps

    def _plan_step_s(self, plan: Plan) -> float:
        return self._took_s(plan)

    def _begin_step(self, group: SimGeneration) -> None:
        """An evaluation comes first, where one is due."""
        every = self.job.eval_every
        if not every or not group.step or group.step % every or group.step == self._evaluated:
            super()._begin_step(group)
            return
        self._evaluated, seconds = group.step, self._measured.evaluation_s
        begin = super()._begin_step

        def done() -> None:
            if not group.ended:
                self._tell(Evaluated(group.plan.generation, group.step, {}, seconds))
                begin(group)

        self._after(seconds, done)


def drilled_run(
    start: DriverStarted,
    drill: Sequence[Mapping[str, Any]],
    *,
    measured: Calibration,
    step_s: Callable[[Plan], float],
) -> list[Line]:
    """The journal of the simulated run. `start`: as a driver is started."""
    job = Job.from_plain(start.job)
    backend = DrilledBackend(start.pools, job, drill, measured=measured, step_s=step_s)
    slowest_s = max(measured.step_s.values(), default=1.0) * max(1, len(measured.step_s))
    until_s = GIVEN_UP_TIMES * job.steps * slowest_s
    backend._at(until_s, lambda: backend._tell(StopAsked(f"given up after {until_s / 3600:.1f} h")))
    journal = MemoryJournal()
    drive(backend, journal, start)
    return list(journal.lines)
