"""Layouts that compute another function than the one before them: what this run does not take any
more, and why.

It is found out in two ways. The loss of one fixed sample is computed where a generation stops and
where the next one has entered (Probed), and must be the same. And after a loss some steps are done
again: each has the loss that it had. Where one differs, the axes that are new in that layout are
closed for the rest of the run; where none is new, that very layout is.

A step that differs although no axis is new says that steps of this model do not repeat (its data
are drawn anew, say): such comparisons end then, and what was closed by them is open again. A probe
sample that differs in the very same layout closes nothing either; it counts as a roll-back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.policy.state.state import State
from elastic.types import (
    Layout,
    ModelProfile,
    Plan,
    Probed,
    Resume,
    StepDone,
    agree,
    repeats,
    tolerance,
)
from elastic.types.replacing import replace

AXES = ("pp", "cp", "tp", "ep", "dp")
VERY = "layout "  # before the name of a single layout in State.unusable
KEPT_PROBES = 200
REDONE = "done again"  # in a reason that comes of a step, not of the probe sample


def new_axes(layout: Layout, old: Layout | None) -> tuple[str, ...]:
    """Axes with several ranks that had one in the old layout."""
    return tuple(
        axis
        for axis in AXES
        if getattr(layout, axis) > 1 and (old is None or getattr(old, axis) == 1)
    )


def closed_by(layout: Layout, old: Layout | None) -> tuple[str, ...]:
    """What is not taken any more where `layout` computes something else than `old`."""
    found = new_axes(layout, old)
    return found or (() if layout == old else (f"{VERY}{layout}",))


def before(state: State, plan: Plan) -> Layout | None:
    """The layout that the plan's state comes from; where it starts over, that of the plan before
    it."""
    older = [number for number in state.plans if number < plan.generation]
    return plan.resume.layout or (state.plans[max(older)].layout if older else None)


def in_words(names: tuple[str, ...]) -> str:
    """What becomes of these."""
    axes = [name for name in names if not name.startswith(VERY)]
    if axes:
        return f"this run takes no layout with {' or '.join(axes)} any more"
    return (
        "this run does not take it any more"
        if names
        else "it is the same layout, so that it is not the layout's fault"
    )


# ---------------------------------------------------------------------------------- for the planner


def usable_model(state: State) -> ModelProfile:
    """The model as the planner is to see it: with the axes closed that this run has closed."""
    assert state.model is not None
    axes = {
        f"no_{name}": why
        for name, why in state.unusable.items()
        if name in AXES and name not in state.model.closed
    }
    changes: dict[str, Any] = dict(axes)
    if "no_pp" in axes:
        changes["pipeline"] = False
    if "no_tp" in axes:
        changes["tp_limit"] = 1
    return replace(state.model, **changes) if changes else state.model


def unusable_layouts(state: State) -> dict[str, str]:
    """Single layouts, in words -> why."""
    return {
        name.removeprefix(VERY): why
        for name, why in state.unusable.items()
        if name.startswith(VERY)
    }


def probe_of(state: State, resume: Resume) -> float | None:
    """What the probe sample's loss must be there, where the workers that take over cannot know it
    themselves."""
    return state.probes.get(resume.step) if resume.source in ("peer", "durable") else None


def comparable(state: State, step: int) -> bool:
    """Would a layout that computes something else be found out when it resumes from that step?"""
    return step in state.probes or step + 1 in state.losses


# ------------------------------------------------------------------------------------------ fold


def probed(state: State, event: Probed) -> State:
    """What the loss of the probe sample is at a step; not of a layout in which it differs."""
    current = state.is_current(event.generation) or (
        state.aborting is not None and event.generation == state.generation
    )
    differs = event.expected is not None and not agree(
        event.loss, event.expected, tolerance(state.job)
    )
    if not current or differs or event.generation in state.distrusted or _other(state, event):
        return state
    probes = {**state.probes, event.step: event.loss}
    kept = sorted(probes)[-KEPT_PROBES:]
    told = {**state.probed_in, event.step: event.generation}
    return replace(
        state,
        compared=state.compared | _compared(state, event),
        probes={step: probes[step] for step in kept},
        probed_in={step: told[step] for step in kept if step in told},
    )


def _compared(state: State, event: Probed) -> frozenset[str]:
    """Axes that only one of the two layouts has whose probe sample had the same loss."""
    plan = state.plans.get(event.generation)
    if not state.trusts_compared or event.expected is None or plan is None:
        return frozenset()
    old = state.layouts.get(state.probed_in.get(event.step, 0), plan.resume.layout)
    if old is None:
        return frozenset()
    return frozenset(new_axes(plan.layout, old) + new_axes(old, plan.layout))


def _other(state: State, event: Probed) -> bool:
    """Was it another sample than that of the phase which begins at that step? A generation tells it
    too where it ends with its phase."""
    plan, job = state.plans.get(event.generation), state.job
    if plan is None or not job.phases:
        return False
    begins = job.in_phase(job.phase_at(event.step))
    return job.in_phase(plan.phase).data_phase != begins.data_phase


def begun_otherwise(state: State, event: Probed) -> tuple[float, Layout] | None:
    """What the probe sample's loss was where the run began, and in which layout, where one that
    begins anew has another: the first values of a model are the same in all layouts (but for those
    that a script has made). None = it is the same, or nobody knows, or the layout is not at
    fault."""
    plan, before = state.plans.get(event.generation), state.probes.get(event.step)
    old = state.layouts.get(state.probed_in.get(event.step, 0))
    if plan is None or before is None or old is None or plan.resume.source != "fresh":
        return None
    if event.step != plan.resume.step or not repeats(state.job, draws=False):
        return None
    if agree(event.loss, before, tolerance(state.job)) or not closed_by(plan.layout, old):
        return None
    return before, old


def until(numbers: Mapping[int, float], step: int) -> dict[int, float]:
    """Without what was found after that step, which is done again."""
    return {known: number for known, number in numbers.items() if known <= step}


def repeatable(state: State) -> bool:
    return not state.unrepeatable and repeats(
        state.job, state.model is not None and state.model.draws
    )


def without_repeats(state: State, event: StepDone) -> State:
    """Steps turn out not to repeat: nothing is concluded from that any more."""
    text = (
        f"step {event.step} had another train_loss when it was {REDONE} in a layout with no new "
        "axis"
    )
    unusable = {name: why for name, why in state.unusable.items() if REDONE not in why}
    return replace(state, unrepeatable=text, losses={}, unusable=unusable)
