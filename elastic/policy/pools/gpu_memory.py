"""What GPUs the pools have, and how much memory."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.policy.state.state import State
from elastic.types import Pool


def gpu_bytes(state: State, pool: Pool | None) -> int:
    """Of each GPU of the pool: as it says, else as its kind has; 0 = not known."""
    if pool is None or pool.accelerator_type == "CPU":
        return pool.memory_bytes_per_gpu if pool is not None else 0
    known = (
        profile.memory_bytes
        for profile in state.hardware
        if profile.accelerator_type == pool.accelerator_type
    )
    return pool.memory_bytes_per_gpu or next(known, 0)


def on_gpus(state: State, nodes: Iterable[str]) -> bool:
    """Are any of these nodes known to have GPUs?"""
    return any(pool.accelerator_type != "CPU" for pool in state.pools_of(nodes))
