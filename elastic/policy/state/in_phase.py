"""The State in one phase of the job (see policy/phases.py): keys of the job, what a sample asks of
the model, and what is known of layouts are those of the phase."""

from __future__ import annotations

from typing import Any

from elastic.policy.state.state import State
from elastic.types import DriverStarted, Job, NodePrepared, Plan
from elastic.types.replacing import replace


def in_phase_of(state: State, step: int) -> State:
    """As it is once so many steps are done."""
    return in_phase(state, state.job.phase_at(step)) if state.job.phases else state


def in_phase(state: State, number: int) -> State:
    if number == state.job.phase:
        return state
    model, tight = state.model, {**state.infeasible_in, state.job.phase: state.infeasible}
    if model is not None and state.phase_samples:
        model = replace(model, sample=state.phase_samples[number])
    return replace(
        state, job=state.job.in_phase(number), model=model, infeasible=tight.pop(number, {}),
        infeasible_in=tight,
    )  # fmt: skip


def entering(state: State, plan: Plan) -> State:
    """The fold of an order to enter a plan: what was measured of steps is of another phase, where
    the plan's is another."""
    if plan.phase == state.job.phase:
        return state
    predicted_s = plan.predicted_step_time_s
    return replace(
        in_phase(state, plan.phase), step_time_s=predicted_s, speeds={},
        worker_step_s=predicted_s * len(plan.ranks),
    )  # fmt: skip


def prepared(state: State, event: NodePrepared) -> dict[str, Any]:
    """What a node that is prepared tells of samples, where nobody has before."""
    model = state.model
    if event.phase_samples and not state.phase_samples:
        sample = event.phase_samples[state.job.phase]
        known = replace(model, sample=sample) if model is not None and sample else model
        return {"model": known, "phase_samples": event.phase_samples}
    if model is not None and model.sample is None and event.sample is not None:
        model = replace(model, sample=event.sample)
    return {"model": model}


def job_of(state: State, event: DriverStarted, saved: int) -> Job:
    """In the phase that the run is in: of its plan, or of its newest checkpoint."""
    job = Job.from_plain(event.job)
    running = state.target or state.plan
    if event.attached and running is not None and running.phase < max(1, len(job.phases)):
        return job.in_phase(running.phase)
    return job.in_phase(job.phase_at(saved)) if job.phases else job
