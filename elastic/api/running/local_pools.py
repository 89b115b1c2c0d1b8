"""The pools of a run, the job's own or a cluster file's; and on a machine that has not their GPUs:
CPU processes play the nodes, few of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from elastic.api.running.options import Options
from elastic.config.clusters import ClusterSpec, load_cluster
from elastic.config.job import JobSpec, PoolSpec, embedded_pools, load_drill, pool_of
from elastic.errors import SpecError
from elastic.text import n_of

LEFT_OUT = (
    "the job's drill ({}) is left out on a Ray cluster; `elastic run --drill FILE` asks for one "
    "there, or ElasticTrainer(job={{'drill': [...]}})"
)
PER_NODE, NODES = 2, 2  # processes and nodes of a pool, where the job does not need more


def adapted(spec: JobSpec, options: Options, address: str | None) -> JobSpec:
    """The job's own drill is for nodes that are there to be killed: on a cluster only `--drill`,
    or whoever says so in Python, asks for one. Raises SpecError for pools that this machine, where
    there is no other, has not."""
    drill = spec.drill
    if address is not None and options.drill is None and not options.own_drill:
        if drill and options.show:
            print(f"note: {LEFT_OUT.format(n_of(len(drill), 'event'))}", file=_out(options))
        drill = []
    if options.cluster is not None:
        spec = on_cluster(spec, _cluster_of(options.cluster, options.local, address))
    pools = spec.pools
    if address is None:
        from elastic.cluster.local.local_cluster import visible_gpus

        n_gpus = len(visible_gpus())
        if options.cluster is None and "pools" not in spec.model_fields_set:
            pools = embedded_pools(n_gpus)
        pools, said = here(spec, pools, n_gpus, local=options.local)
        if said and options.show:
            print(said, file=_out(options))
    if options.drill is not None:
        drill = load_drill(options.drill, pools[0].name)
    return spec.model_copy(update={"drill": drill, "pools": pools})


def on_cluster(spec: JobSpec, cluster: ClusterSpec) -> JobSpec:
    """On the pools of a cluster file; of the floor and of the price of the head what the file says
    counts where the job says nothing."""
    said: dict[str, Any] = {
        "pools": [
            pool_of(asdict(pool), f"{cluster.file}: pool {pool.name!r}") for pool in cluster.pools
        ],
        "head_usd_per_h": cluster.head_usd_per_h,
    }
    if cluster.on_demand_floor:
        said["on_demand_floor"] = cluster.on_demand_floor
    own = spec.model_fields_set - {"pools"}
    return spec.model_copy(update={key: value for key, value in said.items() if key not in own})


def _out(options: Options) -> TextIO:
    return options.stream or sys.stdout


def _cluster_of(file: str | Path, local: bool, address: str | None) -> ClusterSpec:
    """Raises SpecError where the cluster that it describes is not there to be used."""
    cluster = load_cluster(file)
    if address is None and not local:
        raise SpecError(
            f"{file}: this process is on no Ray cluster; start that one (`ray up {file}`), then "
            "submit the run to it (`ray job "
            "submit`) or set RAY_ADDRESS; or --local tries its pools on this machine"
        )
    return cluster


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
