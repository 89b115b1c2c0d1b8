"""Pools of GPUs on a machine that has none: CPU processes play their nodes, few of them."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.config.job import JobSpec, PoolSpec
from elastic.errors import SpecError

PER_NODE, NODES = 2, 2  # processes and nodes of a pool, where the job does not need more


def here(
    spec: JobSpec, pools: Sequence[PoolSpec], n_gpus: int, *, local: bool
) -> tuple[list[PoolSpec], str]:
    """The pools as this machine alone can have them, and what to say of that; '' = as they are.
    Raises SpecError where it has none of their GPUs, unless `local` says to try them all the same.
    """
    if any(pool.accelerator_type == "CPU" or pool.gpus_per_node <= n_gpus for pool in pools):
        return list(pools), ""
    wanted = ", ".join(
        f"{pool.name} has nodes of {pool.gpus_per_node} {pool.accelerator_type}" for pool in pools
    )
    why = f"{wanted}, but this machine has {n_gpus or 'no'} GPU{'s' * (n_gpus != 1)}"
    if n_gpus:
        right = (
            "name smaller nodes, or let CPU processes play them: CUDA_VISIBLE_DEVICES= and --local"
        )
        raise SpecError(f"{spec.where}: {why}; {right}")
    if not local:
        raise SpecError(
            f"{spec.where}: {why}, and this process is on no Ray cluster: submit the run to one "
            "(`ray job submit`), or set RAY_ADDRESS; or let CPU processes play the nodes: --local, "
            "or use_gpu=False of a ScalingConfig"
        )
    found = _sized(spec, pools)
    listed = " + ".join(f"{pool.name} {pool.max_nodes} x {pool.gpus_per_node}" for pool in found)
    return found, f"{why}: CPU processes play them ({listed}), at the pools' prices"


def _sized(spec: JobSpec, pools: Sequence[PoolSpec]) -> list[PoolSpec]:
    """As small as the job allows: what is tried is how pools are used, not how fast they are."""
    smallest = min(spec.least_layouts(), key=lambda layout: layout.world_size)
    least = max(spec.min_workers, smallest.world_size)
    each = max(PER_NODE, smallest.tp * smallest.cp)  # such a group never leaves its node
    sizes = [min(pool.gpus_per_node, each) for pool in pools]
    if sum(size * pool.max_nodes for size, pool in zip(sizes, pools, strict=True)) < least:
        sizes = [pool.gpus_per_node for pool in pools]
    counts = [min(pool.max_nodes, NODES) for pool in pools]
    for n, (pool, size) in enumerate(zip(pools, sizes, strict=True)):
        short = least - sum(size * count for size, count in zip(sizes, counts, strict=True))
        counts[n] = min(pool.max_nodes, counts[n] + max(0, -(-short // size)))
    return [
        pool.model_copy(
            update={
                "accelerator_type": "CPU", "gpus_per_node": size, "max_nodes": count,
                "min_nodes": min(pool.min_nodes, count), "memory_bytes_per_gpu": 0,
                "host_memory_bytes": 0, "instance_type": "", "cloud": "",
            }
        )
        for pool, size, count in zip(pools, sizes, counts, strict=True)
    ]  # fmt: skip
