"""When what happened around each transition of a run: how long it paused, and in which phases.
Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median

from elastic.observe.accounting.loss_checks import Undone
from elastic.types import DigestChecked, Plan, PlanEntered, StepDone

PHASES = ("detect", "quiesce", "groups", "build", "transfer", "probe", "first_step")
RECENT_STEPS = 21  # whose median is the ordinary step


@dataclass(frozen=True)
class Transition:
    """One generation that was entered. `pause_s`: from the last step finished before to the first
    one after, less one ordinary step; 0 for the first start. In `phases_s`, `quiesce` of a live
    transition is spent training. `loss_equal`: does its layout compute the loss that the one before
    did, None = nothing was known; one that does not may have been rolled back before it was
    entered. `probe_s`: what finding that out took."""

    generation: int
    cause: str
    at_step: int
    steps_lost: int
    pause_s: float
    phases_s: dict[str, float]
    from_layout: str
    to_layout: str
    source: str
    bytes_moved: int
    digest_ok: bool | None
    at_s: float = 0.0
    loss_equal: bool | None = None
    probe_s: float = 0.0


def undone(one: Undone) -> Transition:
    plan, before = one.plan, one.plan.resume.layout
    return Transition(
        plan.generation, plan.cause, one.step, 0, 0.0, dict.fromkeys(PHASES, 0.0),
        str(before) if before else "", str(plan.layout), plan.resume.source, 0, None, one.at_s,
    )  # fmt: skip


@dataclass
class TransitionTimes:
    """When what happened around each transition."""

    launch_to_first_step_s: float | None = None
    ordered_at_s: float = 0.0
    aborted_at_s: float | None = None
    settled_at_s: float | None = None  # when the last survivor had answered the abort
    drill_at_s: float | None = None
    last_step: int = 0
    last_step_at_s: float | None = None
    before: str = ""  # layout of the generation entered last
    steps_lost: int = 0  # by entering it: steps done before that do not count any more
    # of the newest transition: from the last step before to the first one after
    gap_s: float | None = None
    recent_s: list[float] = field(default_factory=list)
    open: tuple[Plan, PlanEntered, float] | None = None  # entered, without a step yet
    transitions: list[Transition] = field(default_factory=list)
    early: DigestChecked | None = None  # of a generation that has not finished a step yet

    @property
    def ordinary_s(self) -> float:
        return median(self.recent_s) if self.recent_s else 0.0

    def entered(self, plan: Plan, event: PlanEntered, reached: int, *, at_s: float) -> None:
        """`reached`: the step that this driver knew of, also of one that was reported late."""
        self.close(None)
        self.steps_lost = max(0, max(self.last_step, reached) - event.step)
        self.open, self.gap_s, self.last_step = (plan, event, at_s), None, event.step

    def step(self, event: StepDone, at_s: float, launched_at_s: float | None) -> None:
        plan = self.open[0] if self.open else None
        self.close(at_s)
        if self.launch_to_first_step_s is None and launched_at_s is not None:
            self.launch_to_first_step_s = at_s - launched_at_s
        if plan is None:
            if self.gap_s is not None:  # the second step shows what an ordinary one takes now
                pause_s = round(max(0.0, self.gap_s - event.step_time_s), 4)
                self.transitions[-1] = replace(self.transitions[-1], pause_s=pause_s)
                self.gap_s, self.recent_s = None, []
            self.recent_s = [*self.recent_s, event.step_time_s][-RECENT_STEPS:]
        self.last_step, self.last_step_at_s = event.step, at_s

    def digest(self, event: DigestChecked) -> None:
        self.transitions = [
            replace(t, digest_ok=event.ok) if t.generation == event.generation else t
            for t in self.transitions
        ]
        self.early = event

    def close(self, first_step_at_s: float | None) -> None:
        """The open transition is complete with its first step, or was overtaken by the next
        (None)."""
        if self.open is None:
            return
        plan, event, at_s = self.open
        self.open = None
        pause_s = 0.0
        if first_step_at_s is not None and self.last_step_at_s is not None:
            self.gap_s = first_step_at_s - self.last_step_at_s
            pause_s = max(0.0, self.gap_s - self.ordinary_s)
        phases_s = {name: round(float(event.phases_s.get(name, 0.0)), 4) for name in PHASES}
        phases_s["first_step"] = (
            round(first_step_at_s - at_s, 4) if first_step_at_s is not None else 0.0
        )
        phases_s |= self._before_entering(event)
        early = self.early if self.early and self.early.generation == plan.generation else None
        self.transitions.append(
            Transition(
                plan.generation, plan.cause, event.step, self.steps_lost,
                round(pause_s, 4), phases_s, self.before, str(plan.layout), plan.resume.source,
                event.bytes_moved, early.ok if early else None, at_s,
            )
        )  # fmt: skip
        self.before = str(plan.layout)
        self.aborted_at_s = self.settled_at_s = self.drill_at_s = None

    def _before_entering(self, event: PlanEntered) -> dict[str, float]:
        """detect and quiesce, as seen by the driver."""
        if self.aborted_at_s is not None:
            since_s = self.drill_at_s
            if since_s is None and self.last_step_at_s is not None:
                since_s = self.last_step_at_s + self.ordinary_s
            detect_s = 0.0 if since_s is None else max(0.0, self.aborted_at_s - since_s)
            settled_at_s = self.settled_at_s if self.settled_at_s is not None else self.ordered_at_s
            return {
                "detect": round(detect_s, 4),
                "quiesce": round(max(0.0, settled_at_s - self.aborted_at_s), 4),
            }
        left_at_s = event.left_at_s if event.left_at_s is not None else self.last_step_at_s
        if left_at_s is None or "quiesce" in event.phases_s:
            return {}
        return {"quiesce": round(max(0.0, left_at_s - self.ordered_at_s), 4)}
