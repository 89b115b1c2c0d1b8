"""What a real run has measured, as the delays of a simulated cluster: starts, pauses, copies and
steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.sim.scripted_faults import Delays, change_of
from elastic.types import (
    Abort,
    CopyStored,
    Decision,
    DrillAsked,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    Prepare,
    RequestFailed,
    RequestNodes,
    Silent,
    StepDone,
)

WARM_STEPS = 2  # of a generation, that are slower than those after them


@dataclass(frozen=True)
class Calibration:
    """`step_s`: phase and layout -> seconds from step to step, warm; `ratio`: these by what was
    predicted for them, the median, for layouts that the run has not had. `delays`: medians of what
    was seen; what was not keeps its default. `first_prepare_s`: of nodes before the first plan,
    which may share a machine; None = as later. `seen`: how many of each. `work`, `data`,
    `productive`: shares of the time from step to step that steps take, their batches, and steps
    less batches and copies. `start`: what the run's first driver knew."""

    delays: Delays
    step_s: Mapping[tuple[int, str], float]
    ratio: float
    seen: Mapping[str, int]
    first_prepare_s: float | None = None
    evaluation_s: float = 0.0
    work: float = 1.0
    data: float = 0.0
    productive: float = 1.0
    start: DriverStarted | None = None


@dataclass
class _Generation:
    plan: Plan
    ordered_s: float
    steps: list[tuple[float, StepDone]] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)  # before each step, by evaluations

    @property
    def warm(self) -> list[StepDone]:
        return [step for _, step in self.steps[WARM_STEPS:]]

    @property
    def between_s(self) -> float:
        """What passes from step to step beside the steps themselves."""
        pairs = zip(self.steps[WARM_STEPS - 1 :], self.steps[WARM_STEPS:], strict=False)
        stalls = self.stalls_s[WARM_STEPS:]
        rest = [
            now_s - before_s - step.step_time_s - stall_s
            for ((before_s, _), (now_s, step)), stall_s in zip(pairs, stalls, strict=False)
        ]
        return max(0.0, fmean(rest)) if rest else 0.0


@dataclass
class _Seen:
    # of nodes that may still come: pool, request, moment
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    preparing_s: dict[str, float] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)  # nodes, which a driver that attaches meets anew
    generations: dict[int, _Generation] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # delay -> what was seen of it
    start: DriverStarted | None = None
    drill_s: float | None = None  # when a node was last killed or stopped by a drill
    abort_s: float | None = None
    stall_s: float = 0.0  # since the last step, by evaluations

    def withdraw(self, request_id: str) -> None:
        """Nothing more comes of it."""
        self.asked = [row for row in self.asked if row[1] != request_id]

    def new_driver(self, start: DriverStarted) -> None:
        """What the one before had asked for and waited for is nothing to it; its nodes are there
        where it attaches."""
        self.start = self.start or start
        self.living = self.living if start.attached else set()
        self.asked, self.preparing_s, self.drill_s, self.abort_s = [], {}, None, None

    def came(self, node: Node, at_s: float) -> None:
        """The oldest request of the pool has given a node."""
        if node.node_id in self.living:
            return
        self.living.add(node.node_id)
        row = next((row for row in self.asked if row[0] == node.pool), None)
        if row is not None:
            self.asked.remove(row)
            self.note("boot_s", at_s - row[2])

    def note(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(max(0.0, seconds))

    def ordered(self, plan: Plan, at_s: float) -> None:
        if plan.generation in self.generations:
            return
        self.generations[plan.generation] = _Generation(plan, at_s)
        if self.abort_s is not None:
            self.note("quiesce_s", at_s - self.abort_s)
        self.abort_s = self.drill_s = None


def calibrated(lines: Iterable[Line], defaults: Delays | None = None) -> Calibration:
    """Raises SpecError for a run without a step."""
    seen = _Seen()
    for line in lines:
        for at_s, event in line.events:
            _take(seen, event, at_s)
        if line.decision is not None:
            _order(seen, line.decision, line.at_s)
    trained = [one for one in seen.generations.values() if one.warm]
    if not trained:
        raise SpecError("this run has no generation of three steps: it measures nothing")
    changes_s = _changes(seen)
    delays = {
        name: median(values)
        for name, values in seen.values.items()
        if name not in ("first_prepare_s", "evaluation_s")
    }
    for name, kinds in (("restore_s", ("durable",)), ("enter_s", ("live", "peer"))):
        found = [s for kind, s in changes_s.items() if kind.endswith(kinds)]
        delays |= {name: median(found)} if found else {}
    by_layout: dict[tuple[int, str], list[_Generation]] = {}
    for one in trained:
        by_layout.setdefault((one.plan.phase, str(one.plan.layout)), []).append(one)
    steps = [step for one in trained for step in one.warm]
    work_s = sum(step.step_time_s for step in steps)
    waited_s = sum(step.data_s + step.copy_s for step in steps)
    whole_s = work_s + sum(one.between_s * len(one.warm) for one in trained)
    ratios = _ratios(trained)
    first = seen.values.get("first_prepare_s", [])
    if first and "prepare_s" not in delays:  # nobody has joined later
        delays["prepare_s"] = median(first)
    return Calibration(
        replace(defaults or Delays(), changes_s=changes_s, **delays),
        # the mean: a step that takes longer now and then counts as often as it comes
        {
            layout: fmean(step.step_time_s + one.between_s for one in ones for step in one.warm)
            for layout, ones in by_layout.items()
        },
        median(ratios) if ratios else 1.0,
        {name: len(values) for name, values in seen.values.items()}
        | ({"changes": len(changes_s)} if changes_s else {}),
        median(first) if first else None,
        median(seen.values.get("evaluation_s", [0.0])),
        work_s / whole_s if whole_s else 1.0,
        sum(step.data_s for step in steps) / whole_s if whole_s else 0.0,
        max(0.0, work_s - waited_s) / whole_s if whole_s else 1.0,
        seen.start,
    )


def _ratios(trained: Sequence[_Generation]) -> list[float]:
    """Measured by predicted seconds of each generation."""
    found = []
    for one in trained:
        model_s = one.plan.model_step_s or one.plan.predicted_step_time_s  # of older journals
        if model_s:
            found.append(median(step.step_time_s for step in one.warm) / model_s)
    return found


def _changes(seen: _Seen) -> dict[str, float]:
    """From the order of a generation, or from the last step before where that was live, to its
    first step, less an ordinary one."""
    found: dict[str, list[float]] = {}
    for one in seen.generations.values():
        if len(one.steps) < 2:
            continue
        before = seen.generations.get(one.plan.resume.generation)
        began_s = one.ordered_s
        if one.plan.resume.source == "live" and before is not None and before.steps:
            began_s = max(began_s, before.steps[-1][0])
        ordinary = one.warm or [one.steps[1][1]]
        ordinary_s = median(step.step_time_s for step in ordinary)
        change_s = max(0.0, one.steps[0][0] - began_s - ordinary_s)
        found.setdefault(change_of(one.plan), []).append(change_s)
    return {kind: median(times) for kind, times in found.items()}


def _order(seen: _Seen, decision: Decision, at_s: float) -> None:
    for action in decision.actions:
        if isinstance(action, RequestNodes):
            seen.withdraw(action.request_id)
            seen.asked += [(action.pool, action.request_id, at_s)] * action.count
        elif isinstance(action, Prepare):
            seen.preparing_s[action.node_id] = at_s
        elif isinstance(action, EnterPlan):
            seen.ordered(action.plan, at_s)
        elif isinstance(action, Abort):
            seen.abort_s = at_s if seen.abort_s is None else seen.abort_s
            if seen.drill_s is not None:
                seen.note("detect_s", at_s - seen.drill_s)


def _take(seen: _Seen, event: Event, at_s: float) -> None:
    if isinstance(event, DriverStarted):
        seen.new_driver(event)
    elif isinstance(event, NodeReady):
        seen.came(event.node, at_s)
    elif isinstance(event, RequestFailed):
        seen.withdraw(event.request_id)
    elif isinstance(event, NodePrepared):
        began_s = seen.preparing_s.pop(event.node_id, None)
        if began_s is not None:
            seen.note("prepare_s" if seen.generations else "first_prepare_s", at_s - began_s)
    elif isinstance(event, DrillAsked):
        seen.drill_s = at_s if "kill" in event.drill or "hang" in event.drill else None
        if "add" in event.drill:
            seen.asked.append((event.drill["add"], "drill", at_s))
    elif isinstance(event, NodeLost):
        seen.living.discard(event.node_id)
        if seen.drill_s is not None and event.cause != "released":
            seen.note("confirm_s", at_s - seen.drill_s)
    elif isinstance(event, Silent) and seen.drill_s is not None:
        seen.note("silent_s", at_s - seen.drill_s)
    elif isinstance(event, CopyStored):
        seen.note("store_s" if event.copy.kind == "durable" else "copy_s", event.seconds)
    elif isinstance(event, Evaluated):
        seen.note("evaluation_s", event.seconds)
        seen.stall_s += event.seconds
    elif isinstance(event, StepDone) and event.generation in seen.generations:
        one = seen.generations[event.generation]
        one.steps.append((at_s, event))
        one.stalls_s.append(seen.stall_s)
        seen.stall_s = 0.0
