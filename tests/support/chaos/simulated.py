"""Runs under faults on the virtual clock: drivers die, stall or lose sight of storage; nodes and
workers outlive them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support.sim.scenario import APART_FROM, MODEL, scenario

from elastic.driver import drive, restored
from elastic.errors import LostContact
from elastic.ledger.journal import Journal, Line, MemoryJournal, parse_line, read, write_line
from elastic.observe.accounting.accounts import account
from elastic.policy.state.fold import ENDED, State
from elastic.scenarios.judge import Undisturbed, wrong
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.sim.sim_nodes import SimMachine
from elastic.sim.sim_storage import REFUSALS, STORAGE_KINDS
from elastic.types import (
    Action,
    CopyStored,
    Decision,
    DigestChecked,
    DriverStarted,
    EnterPlan,
    Event,
    Job,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Plan,
    PlanEntered,
    PlansFound,
    Pool,
    Prepare,
    Quiesced,
    RanksTimed,
    RequestFailed,
    SetShares,
    StepDone,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
)  # fmt: skip
from elastic.types.gates import newest_gates

WEATHER = {*STORAGE_KINDS} - {"full"}
PLANS_KEPT = 16  # as a worker does
LEASE_S = 13.0  # that a driver is certain of its run without storage
# found out by a driver; workers say the rest again
AGAIN = (StepDone, DigestChecked, WrongNumbers)  # what workers tell a new driver once more
BY_DRIVER = (Notice, NoticeWithdrawn, NodeLost, NodeReady, RequestFailed)


class Died(Exception):
    """The driver's process."""


class Outliving(SimBackend):
    """Its nodes and workers outlive a driver, and report to the next one; orders are idempotent by
    generation."""

    def __init__(
        self,
        pools: tuple[Pool, ...],
        job: Mapping[str, Any],
        faults: Iterable[Fault] = (),
        delays: Delays | None = None,
    ) -> None:
        self.script = [fault for fault in faults if fault.kind in ("driver", "freeze")]
        super().__init__(
            pools,
            Job.from_plain(job),
            [fault for fault in faults if fault.kind not in ("driver", "freeze")],
            delays=delays,
        )
        self.rest = [fault for fault in faults if fault.kind not in ("driver", "freeze")]
        self.script.sort(key=lambda fault: fault.at_s)
        self.skew_s = 0.0  # of this driver's clock
        self.dead: Fault | None = None  # the driver is
        self.dies_at_order: Fault | None = None
        self.n_died = 0
        self.gates: dict[str, Any] = {}  # of its drivers, see DriverStarted
        self.line_s = 0.0  # when the newest line of the journal came
        self.copied_s: dict[str, float] = {}  # checkpoint -> when it was there

    def true_s(self) -> float:
        """Nobody's clock."""
        return self._now_s

    def now_s(self) -> float:
        return self._now_s + self.skew_s

    @property
    def certain(self) -> bool:
        return self.unheard_s < LEASE_S

    @property
    def unheard_s(self) -> float:
        since_s = self.sim_storage.unheard_since_s(self._now_s)
        return 0.0 if since_s is None else self._now_s - since_s

    @property
    def trouble(self) -> Exception:
        return OSError(self.sim_storage.refusal(self._now_s) or "no answer")

    def poll(self, until_s: float | None) -> list[Event]:
        if self.happens():
            until_s = self.now_s()
        wake_s = [] if until_s is None else [until_s - self.skew_s]
        if (written_s := self.sim_storage.written_s(self.line_s)) > self._now_s:
            wake_s.append(written_s)
        if (changes_s := self.sim_storage.changes_s(self._now_s)) is not None:
            wake_s.append(changes_s)
        if self.script:
            wake_s.append(max(self._now_s, self.script[0].at_s))
        found = super().poll(min(wake_s, default=None))
        return [self._in_its_time(event) for event in found]

    def _in_its_time(self, event: Event) -> Event:
        return (
            replace(event, deadline_s=event.deadline_s + self.skew_s)
            if isinstance(event, Notice)
            else event
        )

    def happens(self) -> bool:
        """True = time has passed."""
        n_left = len(self.script)
        while self.script and self.script[0].at_s <= self._now_s:
            fault = self.script.pop(0)
            if fault.kind == "freeze":
                self.passes(fault.lasts_s)
            elif fault.which % 2:
                self.dies_at_order = fault
            else:
                self._die(fault)
        return len(self.script) < n_left

    def _die(self, fault: Fault) -> None:
        self.dead, self.dies_at_order = fault, None
        self.n_died += 1
        for event in self._out:  # parts that are written, and no marker
            if isinstance(event, CopyStored) and event.copy.kind == "durable":
                self.stored.pop(event.copy.uri, None)
        self._out = [
            event
            for event in self._out
            if not (isinstance(event, CopyStored) and event.copy.kind == "durable")
        ]
        raise Died

    def execute(self, action: Action) -> None:
        if self.dies_at_order is not None:  # the order is written down, and nobody has heard of it
            self._die(self.dies_at_order)
        if not (isinstance(action, EnterPlan) and action.plan.generation in self._groups):
            super().execute(action)
        if isinstance(action, Prepare) and self._unheard_of(action.node_id):
            self._told_lost.add(action.node_id)
            self._tell(NodeLost(action.node_id, "it is not there"))

    def _unheard_of(self, node_id: str) -> bool:
        """It went while nobody looked."""
        machine = self._machines.get(node_id)
        return machine is not None and machine.gone_s is not None and node_id not in self._told_lost

    def _deadline_s(self, worker: WorkerId) -> float:
        """That a driver can know of."""
        return float("inf") if self._unheard_of(worker.node_id) else super()._deadline_s(worker)

    def passes(self, seconds: float) -> None:
        """Time in which nobody polls."""
        out, until_s = self._out, self._now_s + seconds
        while self._queue and self._queue[0][0] <= until_s:
            self._out = []
            out += super().poll(until_s)
        self._out, self._now_s = out, max(self._now_s, until_s)

    def _tell(self, event: Event, delay_s: float = 0.0) -> None:
        commits = isinstance(event, CopyStored) and event.copy.kind == "durable"
        if self.dead is not None and not delay_s and (commits or isinstance(event, BY_DRIVER)):
            if commits:  # nobody writes its marker
                self.stored.pop(event.copy.uri, None)  # type: ignore[union-attr]
            if isinstance(event, NodeLost):
                self._told_lost.discard(event.node_id)
            return
        if commits:
            self.copied_s[event.copy.uri] = self._now_s  # type: ignore[union-attr]
        super()._tell(event, delay_s)
        if isinstance(event, NodeReady) and self.n_died and self.dead is None:
            self._out += self._missed(event.node.node_id)

    def _missed(self, node_id: str) -> list[Event]:
        """Workers of the newest plan on this node that did not outlive the last driver."""
        newest, machine = self._groups.get(max(self._groups, default=0)), self._machines[node_id]
        ranks = (
            [worker for worker in newest.plan.ranks if worker.node_id == node_id]
            if newest is not None
            else []
        )
        gone = [worker for worker in ranks if not machine.prepared or not self._lives(worker)]
        return [
            WorkerFailed(worker, 0, "process", "it was gone when the driver came back")
            for worker in gone
        ]

    def waits_for_storage(self) -> None:
        """It took nothing for so long that the run has ended."""
        self.n_died += 1
        until_s = max(
            self._now_s + self.sim_storage.full_s(self._now_s),
            self.sim_storage.written_s(self._now_s),
        )
        self.dead = Fault(self._now_s, "driver", lasts_s=until_s - self._now_s, lasting=True)
        self._stopped_s = None

    def comes_at_s(self) -> float:
        """When the next driver does."""
        assert self.dead is not None
        return self._now_s + self.dead.lasts_s

    def next_driver(self, before: State | None, lost: Sequence[Line]) -> DriverStarted:
        """`before`: what the journal tells it; `lost`: lines that are not in it."""
        assert self.dead is not None
        fault, known = self.dead, 0 if before is None else before.generation
        # the one before wrote nothing down
        attaches = before.phase not in ENDED if before is not None else not self._groups
        attaches = attaches and not fault.lasting
        if not attaches:
            self._ends()
            self._groups = {
                number: group for number, group in self._groups.items() if number <= known
            }
        self.passes(fault.lasts_s)
        self.dead, self.skew_s, self.closed = None, fault.amount, False
        past_s = self.sim_storage.past_s(self._now_s)
        seen = [
            c for uri, c in self.stored.items() if past_s is None or self.copied_s[uri] <= past_s
        ]
        copies = tuple(reversed(seen))
        start = DriverStarted(
            "random", 1, self.job.plain(), self.pools, MODEL, durable=copies, **self.gates
        )
        if not attaches:  # what has come since stands there, and nobody has prepared it
            self._out = [
                event for m in self._standing() for event in (NodeReady(m.node), *self._noticed(m))
            ]
            return start
        if lost:
            self._without_mute(known)
        # workers say them again
        told = [event for line in lost for _, event in line.events if isinstance(event, AGAIN)]
        self._out = [
            event
            for event in (*told, *self._out)
            if not isinstance(event, BY_DRIVER) and self._can_say(event)
        ]
        for machine in self._standing():
            name = machine.node.node_id
            self._out += [NodeReady(machine.node), *self._missed(name)]
            if machine.prepared and not any(worker.node_id == name for worker in self._dead):
                self._out.append(NodePrepared(name))
            self._out += self._noticed(machine)
        if found := self._plans_after(known):
            self._out.insert(0, PlansFound(found))
        newest = self._groups.get(max(self._groups, default=0))
        # each of them, if it was not told yet
        for worker in newest.plan.ranks if newest is not None and newest.ended else ():
            if self._answers(worker) and worker not in self._without_device:
                self._out.append(
                    WorkerFailed(
                        worker, newest.plan.generation, "collective", "connection reset by peer"
                    )
                )  # type: ignore[union-attr]
        return replace(start, attached=before is not None)

    def _without_mute(self, known: int) -> None:
        """Workers that cannot be asked for what is not written down are ended, and with them what
        only they knew."""
        for machine in self._standing():
            if machine.hung:
                machine.hung = False
                self._kill({WorkerId(machine.node.node_id, k) for k in range(machine.node.gpus)})
        newest = max((plan.generation for plan in self._plans_after(known)), default=known)
        self._groups = {number: group for number, group in self._groups.items() if number <= newest}

    def _plans_after(self, generation: int) -> tuple[Plan, ...]:
        """Those that a living worker was given."""
        given = [
            g.plan
            for number, g in sorted(self._groups.items())
            if number > generation and any(map(self._answers, g.members))
        ]
        return tuple(given[-PLANS_KEPT:])

    def _standing(self) -> list[SimMachine]:
        return [machine for machine in self._machines.values() if self._stands(machine)]

    def _noticed(self, machine: SimMachine) -> list[Event]:
        return (
            []
            if machine.deadline_s is None
            else [Notice(machine.node.node_id, machine.deadline_s, "scripted")]
        )

    def _can_say(self, event: Event) -> bool:
        """What a worker had to say is lost with it."""
        if isinstance(event, StepDone | PlanEntered | RanksTimed):
            if (group := self._groups.get(event.generation)) is None:
                return False
            node_id = group.plan.ranks[0].node_id
        else:
            node_id = (
                event.worker.node_id
                if isinstance(event, Quiesced | WorkerFailed)
                else getattr(event, "node_id", "")
            )
        machine = self._machines.get(node_id)
        return machine is None or self._stands(machine)

    def _ends(self) -> None:
        """All nodes, with their driver."""
        for name, machine in self._machines.items():
            machine.gone_s = machine.gone_s or self._now_s
            self._told_lost.add(name)
            self._dead |= {WorkerId(name, k) for k in range(machine.node.gpus)}
            self._living[machine.node.pool].pop(name, None)
        for group in self._groups.values():
            group.ended = True
        self._queue, self._out, self._held, self._coming = [], [], {}, {}
        self._commits, self._pending, self._finds = {}, {}, {}
        for fault in self.rest:
            if fault.at_s > self._now_s:
                self._at(fault.at_s, lambda f=fault: self._fault(f))  # type: ignore[misc]


class _Kept(MemoryJournal):
    """A journal whose storage is the backend's. `times`: when each of `lines` came."""

    def __init__(
        self, epoch: int, backend: Outliving, lines: list[Line], times: list[float]
    ) -> None:
        self.backend = backend
        super().__init__(epoch)
        self.lines, self.times = lines, times

    def append(
        self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None
    ) -> None:
        super().append(at_s, events, decision)
        self.times.append(self.backend.true_s())
        self.backend.line_s = self.times[-1]

    @property
    def trouble(self) -> Exception | None:  # type: ignore[override]
        return (
            self.backend.trouble
            if self.backend.sim_storage.refusal(self.backend.true_s()).startswith("403")
            else None
        )

    @trouble.setter
    def trouble(self, value: object) -> None:
        """Memory says that there is none."""

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return (
            not self.times
            or self.backend.sim_storage.written_s(self.times[-1]) <= self.backend.true_s()
        )

    @settled.setter
    def settled(self, value: bool) -> None:
        """Memory says that it is."""

    def lost(self) -> list[Line]:
        """Takes away what the next driver does not find, where it is on another machine."""
        dead, weather = self.backend.dead, self.backend.sim_storage
        if dead is None or dead.moment != "torn":
            return []
        past_s = weather.past_s(self.backend.comes_at_s())
        until_s = self.backend.true_s()
        n = sum(
            weather.written_s(t) <= until_s and (past_s is None or t <= past_s) for t in self.times
        )
        lost = self.lines[n:]
        del self.lines[n:], self.times[n:]
        return lost


@dataclass
class Played:
    """A run, and what is wrong with it."""

    seed: int
    faults: list[Fault]
    state: State
    backend: Outliving
    lines: list[Line]
    wrong: list[str] = field(default_factory=list)


def play(
    seed: int,
    path: Path | None = None,
    more: Sequence[Fault] = (),
    *,
    gates: Mapping[str, bool] | None = None,
) -> Played:
    """`path`: of a journal that is really written, with its merged lines. `more`: faults beside
    those of the seed. `gates`: of its drivers, which else have those of today."""
    job, pools, faults, delays = scenario(seed)
    faults = [*faults, *more]
    delays = replace(delays, groups_s=(0.0, 0.3, 3.0)[seed % 3])
    backend, lines, times = Outliving(pools, job, faults, delays), list[Line](), list[float]()
    before, lost = None, list[Line]()
    backend.gates = newest_gates(forms_ahead=seed % 2 == 1, leaves_out=seed >= APART_FROM)
    backend.gates |= gates or {}
    start = DriverStarted(
        "random", 1, job, pools, MODEL,
        **backend.gates,
    )  # fmt: skip
    while True:
        epoch = backend.n_died + 1
        journal: Any = (
            Journal(path, epoch) if path is not None else _Kept(epoch, backend, lines, times)
        )
        try:
            state = drive(backend, journal, replace(start, epoch=epoch), state=before)
            if state.phase == "succeeded" or not any(
                text in state.outcome_reason for text in REFUSALS.values()
            ):
                break
            # the run is started again when it takes writes, as its message says
            backend.waits_for_storage()
        except LostContact:
            backend.waits_for_storage()
        except Died:
            lost = journal.lost() if path is None else []
        before = restored(read(path) if path is not None else lines)
        # its driver died with the last order
        if before is not None and before.phase == "succeeded":
            state = before
            break
        start = backend.next_driver(before, lost)
        lost = []
    lines = read(path) if path is not None else [parse_line(write_line(line)) for line in lines]
    played = Played(seed, faults, state, backend, lines)
    played.wrong = judged(played)
    return played


def judged(played: Played) -> list[str]:
    steps, kinds = played.backend.job.steps, {fault.kind for fault in played.faults}
    digests = [f"sample-{step}" for step in range(1, steps + 1)]
    found = wrong(
        played.lines,
        Undisturbed(
            [1.0] * steps,
            digests,
            content_harmed="corrupt" in kinds,
            end_waits=bool(kinds & WEATHER),
        ),
    )
    # An order waits for storage, and a node that it names may be known as lost by then.
    found += [
        text for text in played.backend.violations if not kinds & WEATHER or " uses " not in text
    ]
    if not played.backend.closed and not played.backend.n_died:
        found.append("its backend is not closed")
    if found or played.backend.n_died or "freeze" in kinds:
        return found
    return [*calm(played.lines), *bill(played)]


def bill(played: Played) -> list[str]:
    """A driver that was always there has seen all that was paid; but for what its last order waited
    for storage."""
    if played.backend.now_s() != pytest.approx(played.lines[-1].at_s):
        return []
    said, paid = sum(account(played.lines).gpu_seconds.values()), played.backend.gpu_seconds()
    return (
        []
        if said == pytest.approx(paid, rel=1e-9, abs=1e-6)
        else [f"the ledger says {said:.3f} GPU-seconds, it were {paid:.3f}"]
    )


def calm(lines: list[Line]) -> list[str]:
    """Speeds are followed, and nothing goes back and forth: few moves in any quarter of an hour."""
    orders = [(line.at_s, a) for line in lines if line.decision for a in line.decision.actions]
    shares = [at_s for at_s, a in orders if isinstance(a, SetShares)]
    stages = [
        at_s for at_s, a in orders if isinstance(a, EnterPlan) and a.plan.cause == "rebalance"
    ]
    often = lambda times, most: any(  # noqa: E731
        sum(at_s <= t < at_s + 900 for t in times) > most for at_s in times
    )
    found = [f"the layers are cut anew at {stages}"] if often(stages, 3) else []
    return found + ([f"other shares are set at {shares}"] if often(shares, 12) else [])
