"""Of each transition: did the new layout compute the same loss as the one before? From the probe
sample, from steps that were done again, and from what was rolled back for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.types import (
    DigestChecked,
    DriverStarted,
    Event,
    Job,
    Losses,
    Plan,
    PlanEntered,
    Probed,
    StepDone,
    WorkerFailed,
    WrongNumbers,
    agree,
    redone_as_before,
    repeats,
    tolerance,
    with_loss,
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
    _job: Job = Job()
    _draws: bool = False
    _plans: dict[int, Plan] = field(default_factory=dict)  # ordered, not entered
    _losses: Losses = field(default_factory=dict)
    _ordered: int = 0
    _entered: tuple[int, int] = (0, 0)  # generation, step
    _stop_s: float = 0.0
    _n_unusable: int = 0

    def event(self, event: Event, at_s: float) -> None:
        match event:
            case DriverStarted():
                self._job, self._draws = Job.from_plain(event.job), event.model.draws
            case Probed():
                self._probed(event)
            case PlanEntered():
                self._plans.pop(event.generation, None)
                self._entered = (event.generation, event.step)
            case StepDone():
                self._step(event)
            case WorkerFailed(kind="layout"):
                self.equal[event.generation] = False
                if plan := self._plans.pop(event.generation, None):
                    self.undone[event.generation] = Undone(plan, event.step, at_s)
            case WrongNumbers():
                self._losses = {
                    step: known for step, known in self._losses.items() if step <= event.good_step
                }
            case DigestChecked(ok=False):  # those before it are right
                self._losses = {
                    step: known
                    for step, known in self._losses.items()
                    if known[2] < event.generation
                }
            case _:
                pass

    def ordered(self, plan: Plan) -> None:
        if len(plan.unusable) > self._n_unusable and self._ordered:
            self.equal[self._ordered] = False  # found out by a step that was done again
        self._n_unusable, self._ordered = len(plan.unusable), plan.generation
        self._plans = {plan.generation: plan}

    def _probed(self, event: Probed) -> None:
        if event.generation == self._entered[0]:
            self._stop_s = event.seconds
            return
        self.probe_s[event.generation] = round(self._stop_s + event.seconds, 4)
        self._stop_s = 0.0
        if event.expected is not None:
            self.equal[event.generation] = agree(event.loss, event.expected, tolerance(self._job))

    def _step(self, event: StepDone) -> None:
        generation, step = self._entered
        if event.generation != generation or not repeats(self._job, self._draws):
            return
        if redone_as_before(self._losses, event, event.step - step, job=self._job):
            self.equal.setdefault(generation, True)
        self._losses = with_loss(self._losses, event)
