"""What a run is bound by: the evidence of its journal, with what the cost model knows of its
steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic.errors import SpecError
from elastic.observe.diagnosis.axis_rows import AxisRow, axis_rows
from elastic.observe.diagnosis.evidence import Evidence
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.diagnosis.verdicts import RunVerdict
from elastic.observe.profiles.profile_files import mean_collectives, mean_parts, read_profile
from elastic.planner.cost.axis_traffic import axis_bytes
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.cost.step_cost import step_cost
from elastic.storage import Storage
from elastic.types import Plan

# a part of a traced step -> its name in the cost model; waits for data and copies are told by the
# ledger
TRACED = {
    "compute": "products", "optimizer": "optimizer", "fsdp": "fsdp", "dp_replicate": "replicas",
    "tp": "tp", "cp": "cp", "pp": "pp", "bubble": "bubble", "commit": "commit",
    "other ranks": "jitter", "idle": "idle",
}  # fmt: skip


def diagnosed(
    seen: Evidence, storage: Storage | None = None, traced: Mapping[str, float] | None = None
) -> tuple[RunVerdict, ...]:
    """What would win most first. `storage`: of the run, where its profiles are; `traced`: what they
    say, where they were read already."""
    if seen.main is None:
        return verdicts(seen)
    traced = traced_step(storage, seen.main.profile).parts if traced is None else traced
    parts = traced or step_parts(seen, seen.main.plan)
    return verdicts(replace(seen, parts=parts, traced=bool(traced)))


@dataclass(frozen=True)
class TracedStep:
    """Of a profile, the mean of its ranks, by the names of the cost model: seconds of a step, and
    seconds in collectives, those that computation hides included. {} = there is no such profile any
    more, or none that can be read here."""

    parts: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)


def traced_step(storage: Storage | None, profile_id: str) -> TracedStep:
    try:
        ranks = read_profile(storage, profile_id) if storage is not None and profile_id else []
    except (SpecError, ValueError, KeyError, TypeError):  # a newer elastic's, or damaged
        return TracedStep()
    if not ranks:
        return TracedStep()
    return TracedStep(_named(mean_parts(ranks)), _named(mean_collectives(ranks)))


def _named(traced: Mapping[str, float]) -> dict[str, float]:
    return {TRACED[name]: seconds for name, seconds in traced.items() if name in TRACED}


def communication(seen: Evidence, plan: Plan, traced: TracedStep) -> tuple[AxisRow, ...]:
    """Of a step of that plan, axis by axis. `traced`: a profile of it."""
    return axis_rows(
        step_bytes(seen, plan), step_parts(seen, plan), measured=traced.parts,
        busy=traced.collectives,
    )  # fmt: skip


def communicated(seen: Evidence, storage: Storage | None = None) -> tuple[AxisRow, ...]:
    """Of the generation that trained longest."""
    main = seen.main
    return communication(seen, main.plan, traced_step(storage, main.profile)) if main else ()


def step_bytes(seen: Evidence, plan: Plan) -> Mapping[str, float]:
    """Bytes that a rank sends in a step of that plan, by what they are for; {} where the model is
    not known."""
    model, job = seen.state.model, seen.state.job
    if model is None or not plan.samples or not model.n_params:
        return {}
    per_node = max(plan.workers_per_node.values())
    step = Step(plan.n_microbatches, max(plan.samples), job.global_batch, per_node, job.precision)
    return axis_bytes(ModelCost.of(model), plan.layout, step)


def step_parts(seen: Evidence, plan: Plan) -> Mapping[str, float]:
    """Seconds of a step of that plan by what they are for, on the slowest GPU kind that it uses;
    {} where the model or the hardware is not known."""
    model, job = seen.state.model, seen.state.job
    kinds = {one.accelerator_type: one for one in seen.state.hardware}
    pools = {pool.name: pool for pool in seen.state.pools}
    used = [pools.get(node.pool) for name in plan.nodes if (node := seen.nodes.get(name))]
    known = [kinds.get(pool.accelerator_type) for pool in used if pool is not None]
    if model is None or model.sample is None or not plan.samples or not known or None in known:
        return {}
    slowest = min((one for one in known if one), key=lambda one: one.peak(job.precision))
    per_node = max(plan.workers_per_node.values())
    site = site_of(job, slowest, per_node, world=plan.layout.world_size)
    step = Step(plan.n_microbatches, max(plan.samples), job.global_batch, per_node, job.precision)
    return step_cost(site, ModelCost.of(model), plan.layout, step=step).parts
