"""A backend of one node without delays, to drive without a simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.ledger.journal import MemoryJournal
from elastic.types import (
    Action,
    Copy,
    CopyStored,
    DriverStarted,
    EnterPlan,
    Event,
    Layout,
    ModelProfile,
    Node,
    NodePrepared,
    NodeReady,
    PlanEntered,
    Pool,
    Prepare,
    Quiesce,
    Quiesced,
    RequestNodes,
    StepDone,
    TensorSpec,
)  # fmt: skip

MODEL = ModelProfile(2, 100, (TensorSpec("w", (10, 10), "float32"),))
POOL = Pool("p", max_nodes=1)
JOB = {
    "steps": 5,
    "global_batch": 4,
    "layout": "auto",
    "min_workers": 1,
    "peer_every": "auto",
    "durable_every": "auto",
}


def start(**changes: Any) -> DriverStarted:
    values: dict[str, Any] = {"run": "r", "epoch": 1, "job": JOB, "pools": (POOL,), "model": MODEL}
    return DriverStarted(**(values | changes))


class Tiny:
    """One node, no delays. `at_step`: called when that step is done; `log`: what happened, in
    order."""

    def __init__(
        self,
        journal: MemoryJournal | None = None,
        at_step: dict[int, Callable[[], object]] | None = None,
    ) -> None:
        self.journal, self.at_step = journal, at_step or {}
        self.out: list[Event] = []
        self.actions: list[Action] = []
        self.closed = 0
        self.time_s, self.step, self.generation = 0.0, 0, 0
        self.stopping = False
        self.on_poll: Callable[[], object] = lambda: None

    def now_s(self) -> float:
        return self.time_s

    def poll(self, until_s: float | None) -> list[Event]:
        self.on_poll()
        self.time_s += 0.25
        found, self.out = self.out, []
        if not found and self.generation and not self.stopping and self.step < 5:
            self.step += 1
            self.at_step.get(self.step, lambda: None)()
            found = [StepDone(self.generation, self.step, 1.0, 4, 0.25)]
            if self.step == 5:
                self.out = [self._copy()]
        return found

    def _copy(self) -> Event:
        return CopyStored(Copy(self.step, "durable", self.generation, Layout(), (2,), uri="u"))

    def execute(self, action: Action) -> None:
        if self.journal is not None:
            written = [
                a for line in self.journal.lines if line.decision for a in line.decision.actions
            ]
            assert action in written, "the journal line comes before the action"
        self.actions.append(action)
        if isinstance(action, RequestNodes):
            self.out.append(NodeReady(Node("n", "p")))
        elif isinstance(action, Prepare):
            self.out.append(NodePrepared("n"))
        elif isinstance(action, EnterPlan):
            self.generation = action.plan.generation
            self.out.append(PlanEntered(self.generation, 0))
        elif isinstance(action, Quiesce):
            self.stopping = True
            worker = next(a.plan.ranks[0] for a in self.actions if isinstance(a, EnterPlan))
            self.out += [Quiesced(worker, self.generation, self.step), self._copy()]

    def close(self) -> None:
        self.closed += 1
