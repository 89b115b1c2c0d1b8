"""Of each transition: did the new layout compute the same loss as the one before? From the probe
sample, from steps that were done again, and from what was rolled back for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.policy.state.fold import Change, State
from elastic.types import (
    Plan,
    PlanEntered,
    Probed,
    StepDone,
    WorkerFailed,
    agree,
    redone_as_before,
    repeats,
    tolerance,
)  # fmt: skip


@dataclass(frozen=True)
class Undone:
    """A transition that was rolled back before its first step."""

    plan: Plan
    step: int
    at_s: float


@dataclass
class LossChecks:
    """`equal`: by generation; one that is not there: nothing was known. `probe_s`: seconds of its
    probes, that of the generation before where it had stopped included."""

    equal: dict[int, bool] = field(default_factory=dict)
    probe_s: dict[int, float] = field(default_factory=dict)
    undone: dict[int, Undone] = field(default_factory=dict)
    _entered: int = 0  # generation
    _stop_s: float = 0.0
    _n_unusable: int = 0  # in the newest plan

    def take(self, change: Change) -> None:
        event, before = change.event, change.before
        if isinstance(event, StepDone):
            self._step(event, before)
        elif change.after.generation > before.generation and change.after.target is not None:
            n_unusable = len(change.after.target.unusable)
            if n_unusable > self._n_unusable and before.generation:
                self.equal[before.generation] = False  # found out by a step that was done again
            self._n_unusable = n_unusable
        elif isinstance(event, Probed):
            self._probed(event, before)
        elif isinstance(event, PlanEntered):
            self._entered = event.generation
        elif isinstance(event, WorkerFailed) and event.kind == "layout":
            self.equal[event.generation] = False
            plan = before.plans.get(event.generation)
            if plan is not None and event.generation > self._entered:
                self.undone.setdefault(event.generation, Undone(plan, event.step, change.at_s))

    def _probed(self, event: Probed, before: State) -> None:
        if event.generation == self._entered:
            self._stop_s = event.seconds
            return
        self.probe_s[event.generation] = round(self._stop_s + event.seconds, 4)
        self._stop_s = 0.0
        if event.expected is not None:
            self.equal[event.generation] = agree(event.loss, event.expected, tolerance(before.job))

    def _step(self, event: StepDone, before: State) -> None:
        draws = before.model is not None and before.model.draws
        if (
            event.generation == self._entered  # also where it is being aborted
            and event.step in before.losses
            and repeats(before.job, draws)
            and redone_as_before(
                before.losses, event, event.step - before.entered_step, job=before.job
            )
        ):
            self.equal.setdefault(event.generation, True)
