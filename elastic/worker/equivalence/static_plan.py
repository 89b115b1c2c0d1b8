"""The one plan of a job at a fixed layout: no planner looks for it. Integers only, but for the
checks of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.config.job import JobSpec
from elastic.data.budget import KEY as BUDGET
from elastic.errors import SpecError
from elastic.types import Layout, ModelProfile, Plan, Resume, WorkerId, parse_layout
from elastic.types.grid import fills_rounds


def layout_of(spec: JobSpec, world_size: int, asked: str | None = None) -> Layout:
    """`asked`, else the job's own where it is one of `world_size` ranks, else (`auto`) dp_shard
    over all ranks, or over what the axes that the job pins leave of them. Raises SpecError."""
    texts, job = [asked] if asked is not None else spec.layouts(), spec.job()
    found = [layout for text in texts if (layout := job.layout_of(text)).world_size == world_size]
    if texts and not found:
        there = " or ".join(f"'{text}' ({parse_layout(text).world_size} ranks)" for text in texts)
        raise SpecError(
            f"{spec.name}: {world_size} ranks were started, its layout is {there}; start as many, "
            "or give --layout"
        )
    layout = found[0] if found else _rest_sharded(spec, job.pins, world_size)
    if layout.dp > spec.global_batch:
        raise SpecError(
            f"{spec.name}: layout '{layout}' has {layout.dp} data-parallel ranks, "
            f"global_batch={spec.global_batch} has fewer "
            "samples; start fewer ranks, or give --layout with tp or pp"
        )
    return layout


def _rest_sharded(spec: JobSpec, pins: Mapping[str, Any], world_size: int) -> Layout:
    least = Layout(**pins)
    layout = (
        least if "dp_shard" in pins else replace(least, dp_shard=world_size // least.world_size)
    )
    if layout.world_size != world_size:
        raise SpecError(
            f"{spec.name}: {world_size} ranks were started, layout '{spec.layout}' is for "
            f"multiples of {least.world_size} here, by dp_shard; start as many, or give --layout"
        )
    return layout


def plan_of(
    spec: JobSpec, model: ModelProfile, layout: Layout, *, generation: int, resume: Resume
) -> Plan:
    """Everything cut as evenly as it goes. Raises SpecError for a layout that the model cannot be
    cut into."""
    if why := model.refusal(layout):
        raise SpecError(f"{spec.name}: layout '{layout}': {why}")
    if model.tp_limit % layout.tp:
        raise SpecError(
            f"{spec.name}: layout '{layout}' has tp={layout.tp}, but tp must divide "
            f"{model.tp_limit} for this model"
        )
    if layout.pp > 1 and not model.pipeline:
        raise SpecError(
            f"{spec.name}: layout '{layout}' has pp={layout.pp}, but no pipeline stages are "
            "possible here; take pp=1"
        )
    refused = {
        "cp": ("compile", spec.compile),
        "tp": ("float8", spec.float8),
        "pp": (BUDGET, spec.microbatch_tokens),
    }
    for axis, (key, on) in refused.items():
        if on and getattr(layout, axis) > 1:
            raise SpecError(
                f"{spec.name}: layout '{layout}' has {axis}={getattr(layout, axis)}, {key}: "
                f"{str(on).lower()} does not go with that"
            )
    if layout.n_stages > max(1, model.n_blocks):
        stages = (
            f"pp={layout.pp}"
            if layout.n_stages == layout.pp
            else f"{layout.n_stages} pipeline stages"
        )
        raise SpecError(
            f"{spec.name}: layout '{layout}' has {stages}, but the model has {model.n_blocks} "
            "blocks"
        )
    n = n_microbatches(spec, layout)
    samples = tuple(n * units for units in even(spec.global_batch // n, layout.dp))
    ranks = tuple(WorkerId(f"rank-{rank}", 0) for rank in range(layout.world_size))
    every = spec.durable_every if isinstance(spec.durable_every, int) else 0
    layers = even(model.n_blocks, layout.n_stages)
    return Plan(generation, layout, ranks, samples, layers, n, resume, durable_every=every)


def even(total: int, parts: int) -> tuple[int, ...]:
    """The first parts take one more."""
    base, more = divmod(total, parts)
    return tuple(base + (i < more) for i in range(parts))


def n_microbatches(spec: JobSpec, layout: Layout) -> int:
    """The same on every rank, so it divides the global batch; with pp up to two for each stage.
    Raises SpecError."""
    fits = [
        n
        for n in range(1, spec.global_batch + 1)
        if not spec.global_batch % n and spec.global_batch // n >= layout.dp
    ]
    fits = [n for n in fits if fills_rounds(layout.pp, layout.n_stages, n)]
    if layout.microbatch_size:
        enough = [
            n for n in fits if -(-(spec.global_batch // n) // layout.dp) <= layout.microbatch_size
        ]
        if not enough:
            raise SpecError(
                f"{spec.name}: no number of microbatches of at most {layout.microbatch_size} "
                "samples divides "
                f"global_batch={spec.global_batch} over {layout.dp} data-parallel ranks"
            )
        return enough[0]
    return 1 if layout.pp == 1 else max(n for n in fits if n <= 2 * layout.pp)
