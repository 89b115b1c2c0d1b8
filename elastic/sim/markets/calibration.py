"""What a real run has measured, as the delays of a simulated cluster: starts, pauses, copies and
steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.sim.scripted_faults import Delays
from elastic.types import (
    CopyStored,
    EnterPlan,
    NodePrepared,
    NodeReady,
    Plan,
    PlanEntered,
    Prepare,
    RequestFailed,
    RequestNodes,
    StepDone,
)

WARM_STEPS = 2  # of a generation, that are slower than those after them


@dataclass(frozen=True)
class Calibration:
    """`step_s`: layout -> median seconds of a step, warm; `ratio`: these by what was predicted for
    them, the median, for layouts that the run has not had. `delays`: medians of what was seen; what
    was not keeps its default. `seen`: how many of each."""

    delays: Delays
    step_s: Mapping[str, float]
    ratio: float
    seen: Mapping[str, int]


@dataclass
class _Seen:
    # of nodes that may still come: pool, request, moment
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    preparing_s: dict[str, float] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    steps: dict[int, list[float]] = field(default_factory=dict)  # generation -> seconds
    values: dict[str, list[float]] = field(default_factory=dict)  # delay -> what was seen of it

    def withdraw(self, request_id: str) -> None:
        """Nothing more comes of it."""
        self.asked = [row for row in self.asked if row[1] != request_id]

    def came(self, pool: str, at_s: float) -> None:
        """The oldest request of the pool has given a node."""
        row = next((row for row in self.asked if row[0] == pool), None)
        if row is not None:
            self.asked.remove(row)
            self.note("boot_s", at_s - row[2])

    def note(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(max(0.0, seconds))


def calibrated(lines: Iterable[Line], defaults: Delays | None = None) -> Calibration:
    """Raises SpecError for a run without a step."""
    seen = _Seen()
    for line in lines:
        for at_s, event in line.events:
            _take(seen, event, at_s)
        for action in line.decision.actions if line.decision else ():
            if isinstance(action, RequestNodes):
                seen.withdraw(action.request_id)
                seen.asked += [(action.pool, action.request_id, line.at_s)] * action.count
            elif isinstance(action, Prepare):
                seen.preparing_s[action.node_id] = line.at_s
            elif isinstance(action, EnterPlan):
                seen.plans[action.plan.generation] = action.plan
    by_layout: dict[str, list[float]] = {}
    ratios: list[float] = []
    for generation, times in seen.steps.items():
        plan = seen.plans.get(generation)
        if plan is not None and len(times) > WARM_STEPS:
            warm = times[WARM_STEPS:]
            by_layout.setdefault(str(plan.layout), []).extend(warm)
            model_s = plan.model_step_s or plan.predicted_step_time_s  # of older journals
            if model_s:
                ratios.append(median(warm) / model_s)
    if not by_layout:
        raise SpecError("this run has no generation of three steps: it measures nothing")
    found = {name: median(values) for name, values in seen.values.items()}
    return Calibration(
        replace(defaults or Delays(), **found),
        {layout: median(times) for layout, times in by_layout.items()},
        median(ratios) if ratios else 1.0,
        {name: len(values) for name, values in seen.values.items()},
    )


def _take(seen: _Seen, event: object, at_s: float) -> None:
    if isinstance(event, NodeReady):
        seen.came(event.node.pool, at_s)
    elif isinstance(event, RequestFailed):
        seen.withdraw(event.request_id)
    elif isinstance(event, NodePrepared):
        began_s = seen.preparing_s.pop(event.node_id, None)
        if began_s is not None:
            seen.note("prepare_s", at_s - began_s)
    elif isinstance(event, PlanEntered):
        plan = seen.plans.get(event.generation)
        if plan is not None and plan.resume.source != "fresh":
            slow = plan.resume.source == "durable"
            seen.note("restore_s" if slow else "enter_s", sum(event.phases_s.values()))
    elif isinstance(event, CopyStored):
        seen.note("store_s" if event.copy.kind == "durable" else "copy_s", event.seconds)
    elif isinstance(event, StepDone):
        seen.steps.setdefault(event.generation, []).append(event.step_time_s)
