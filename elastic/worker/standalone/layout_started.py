"""The one layout of a job on as many ranks as somebody has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.config.job import JobSpec
from elastic.errors import SpecError
from elastic.types import Layout, parse_layout


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
    n = least.dp_shard if "dp_shard" in pins else world_size // least.world_size
    layout = replace(least, dp_shard=n)
    if layout.world_size != world_size:
        raise SpecError(
            f"{spec.name}: {world_size} ranks were started, layout '{spec.layout}' is for "
            f"multiples of {least.world_size} here, by dp_shard; start as many, or give --layout"
        )
    return layout
