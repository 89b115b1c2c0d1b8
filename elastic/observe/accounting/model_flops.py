"""How much of what its GPUs could compute a run has needed: its model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.policy.state.fold import State
from elastic.types import Node, Plan


def mfu(state: State, plan: Plan, nodes: Mapping[str, Node], *, step_s: float) -> float | None:
    """The model's own FLOP, nothing counted twice, over what the plan's GPUs could do in a step in
    the type of its products; None = the model, a node or its hardware is not known."""
    sample = state.model.sample if state.model is not None else None
    if sample is None or step_s <= 0:
        return None
    job = state.job.in_phase(plan.phase)
    kinds = {pool.name: pool.accelerator_type for pool in state.pools}
    dtype = "float8" if job.float8 else job.precision
    peaks = {one.accelerator_type: one.peak(dtype) for one in state.hardware}
    peak = 0.0
    for node_id, n_workers in plan.workers_per_node.items():
        node = nodes.get(node_id)
        each = peaks.get(kinds.get(node.pool, "")) if node is not None else None
        if not each:
            return None
        peak += n_workers * each
    return sample.flop * job.global_batch / (peak * step_s) if peak else None
