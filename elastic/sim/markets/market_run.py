"""One run of the real fold, decide and driver loop on markets, and what came of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.driver import Decide, drive
from elastic.ledger.journal import Line, MemoryJournal
from elastic.policy.decide import decide as decide_by_default
from elastic.policy.state.fold import State
from elastic.sim.markets.market_backend import MarketBackend, PoolMarket
from elastic.sim.scripted_faults import Delays
from elastic.types import (
    CopyStored,
    DriverStarted,
    EnterPlan,
    HardwareProfile,
    Job,
    ModelProfile,
    NodeLost,
    Plan,
    PlanEntered,
    Pool,
    SampleProfile,
    StepDone,
)
from elastic.types.gates import newest_gates

COLLECTED_AFTER = 100_000  # new objects
KEPT_GENERATIONS = 8
MOMENTS = 200  # of a history, at least, over the time without faults
GIVEN_UP_TIMES = 40.0  # the time without faults, after which a run without a deadline is given up


@dataclass(frozen=True)
class RunSubject:
    """What is simulated. `step_s`: of a plan. `ideal_s`: of the whole job on all `n_nodes` that a
    run may have at once; `group_s`: on its spot pools alone (None = there are no others);
    `every_s`: on those too that stand by (None = none do);
    `efficient_s`: there too, were all nodes as efficient as those of the number that gets most out
    of each (None = they are), so that nobody can pay less. `batch_s`: of training that is looked
    at as one event. `productive`: share of `step_s` that the ledger calls so."""

    name: str
    job: Job
    pools: tuple[Pool, ...]
    model: ModelProfile
    step_s: Callable[[Plan], float]
    ideal_s: float
    delays: Delays
    hardware: tuple[HardwareProfile, ...] = ()
    batch_s: float = 60.0
    phase_samples: tuple[SampleProfile | None, ...] = ()  # as NodePrepared tells them
    efficient_s: float | None = None
    group_s: float | None = None
    every_s: float | None = None
    n_nodes: int = 0
    pool_hardware: tuple[tuple[str, HardwareProfile], ...] = ()
    productive: float = 1.0

    @property
    def given_up_s(self) -> float:
        """When a run without a deadline is given up; one of a few steps not before nodes start."""
        start_s = self.delays.boot_s + self.delays.prepare_s
        return GIVEN_UP_TIMES * max(self.ideal_s, start_s)

    def with_deadline(self, hours: float) -> RunSubject:
        return replace(self, job=replace(self.job, deadline_h=hours))


@dataclass(frozen=True)
class Moment:
    """What changed at `at_s`: nodes by pool that are paid for, those that train, progress in
    steps."""

    at_s: float
    nodes: Mapping[str, int]
    used: int
    step: int


@dataclass(frozen=True)
class RunResult:
    """`wall_s`: until it ended. `done`: all steps are, within the deadline where there is one.
    `goodput`: of the GPU-seconds that were paid for, the productive ones of steps that count.
    `causes`: how often a generation came of what. `n_events`: that the driver was told."""

    usd: float
    wall_s: float
    done: bool
    goodput: float
    taken: int
    causes: Mapping[str, int]
    reason: str
    step: int
    n_events: int = 0
    history: tuple[Moment, ...] = field(default=(), compare=False)
    lines: tuple[Line, ...] = field(default=(), compare=False)
    violations: tuple[str, ...] = ()
    gpu_seconds: float = 0.0  # that were paid for


class _Counted(MemoryJournal):
    """Keeps what the result needs, and the lines themselves only where they are wanted."""

    def __init__(self, keep: bool, every_s: float) -> None:
        super().__init__()
        self._keep, self._every_s = keep, every_s
        self.causes: dict[str, int] = {}
        self.n_events = 0
        self._world: dict[int, int] = {}  # generation -> ranks
        # last step of each batch -> GPU-seconds; of those that nobody goes back behind: their sum
        self._steps: dict[int, float] = {}
        self._sure_gpu_s = 0.0
        self.history: list[Moment] = []
        self._nodes: dict[str, str] = {}
        self._used, self._step = 0, 0

    def append(self, at_s: float, events: Any, decision: Any = None) -> None:
        if self._keep:
            super().append(at_s, events, decision)
        changed = False
        self.n_events += len(events)
        for _, event in events:
            changed |= self._see(event)
        for action in decision.actions if decision is not None else ():
            if isinstance(action, EnterPlan):
                plan = action.plan
                self._world = dict(list(self._world.items())[-KEPT_GENERATIONS:])
                self._world[plan.generation] = plan.layout.world_size
                self.causes[plan.cause] = self.causes.get(plan.cause, 0) + 1
        last_s = self.history[-1].at_s if self.history else float("-inf")
        if self._keep and (changed or at_s >= last_s + self._every_s):
            nodes: dict[str, int] = {}
            for pool in self._nodes.values():
                nodes[pool] = nodes.get(pool, 0) + 1
            self.history.append(Moment(at_s, nodes, self._used, self._step))

    def _see(self, event: Any) -> bool:
        if isinstance(event, StepDone):
            world = self._world.get(event.generation, 0)
            self._steps[event.step] = event.step_time_s * world * (event.step - self._step)
            self._step = event.step
            return False
        if isinstance(event, CopyStored) and event.copy.kind == "durable":
            for step in [step for step in self._steps if step <= event.copy.step]:
                self._sure_gpu_s += self._steps.pop(step)
        if isinstance(event, PlanEntered):
            self._used = self._world.get(event.generation, 0)
            for step in [step for step in self._steps if step > event.step]:
                del self._steps[step]
            self._step = event.step
            return True
        node = getattr(event, "node", None)
        if node is not None:
            self._nodes[node.node_id] = node.pool
            return True
        if isinstance(event, NodeLost):
            self._nodes.pop(event.node_id, None)
            return True
        return False

    @property
    def useful_gpu_s(self) -> float:
        """Of steps that count."""
        return self._sure_gpu_s + sum(self._steps.values())


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Hardly anything that a run makes refers to itself, and the collector would look through what
    thousands of workers hold again and again: a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_on(
    subject: RunSubject,
    markets: Mapping[str, PoolMarket],
    *,
    seed: int = 0,
    decide: Decide = decide_by_default,
    keep: bool = False,
) -> RunResult:
    """`keep`: the result has its history and its journal."""
    hours = subject.job.deadline_h
    until_s = 3600 * hours if hours is not None else subject.given_up_s
    plain = subject.job.plain() | {"drill": []}
    job = Job.from_plain(plain)
    backend = MarketBackend(
        subject.pools,
        job,
        markets,
        delays=subject.delays,
        until_s=until_s,
        step_s=subject.step_s,
        batch_s=subject.batch_s,
        seed=seed,
    )
    backend.phase_samples = subject.phase_samples
    journal = _Counted(keep, subject.ideal_s / MOMENTS)
    start = DriverStarted(
        subject.name, 1, plain, subject.pools, subject.model, subject.hardware,
        pool_hardware=subject.pool_hardware, **newest_gates(forms_ahead=False),
    )  # fmt: skip
    if hours is None:
        backend.give_up_at(until_s)
    with _seldom_collected():
        state: State = drive(backend, journal, start, decide=decide)
    paid = backend.gpu_seconds()
    return RunResult(
        backend.usd(),
        backend.now_s(),
        state.phase == "succeeded",
        subject.productive * journal.useful_gpu_s / paid if paid else 0.0,
        backend.n_taken,
        dict(sorted(journal.causes.items())),
        state.outcome_reason,
        state.step,
        journal.n_events,
        tuple(journal.history),
        tuple(journal.lines),
        tuple(backend.violations),
        paid,
    )
