"""`elastic profile` on a Ray cluster: one node of each kind of accelerator measures itself, in a
task that has all its GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.workers import remote_processes
from elastic.errors import CloudFailed, ElasticError, NoCapacity
from elastic.types.nouns import ACCELERATOR_LABEL
from elastic.worker.profile.measure import MeasureRequest, accelerator_here, measure

# beyond the time that measuring takes: for GPUs that others use, and for Ray's worker to start
WAIT_S = 120.0


def measured(
    address: str, wanted: MeasureRequest, kinds: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Kind of accelerator -> what was found there, with `host`. `kinds`: only these, where the
    cluster has them. Raises SpecError where the cluster cannot be reached, NoCapacity where a
    node's GPUs do not come free."""
    try:
        chosen = _chosen(remote_processes.connect(address), kinds)
        tasks = {kind: _task(node, wanted) for kind, node in chosen.items()}
        end = time.monotonic() + wanted.seconds + WAIT_S
        return dict(_result(kind, task, chosen[kind], end=end) for kind, task in tasks.items())
    finally:
        # ends the tasks of this driver, and with them their processes
        remote_processes.disconnect()


def _chosen(nodes: Sequence[RayNode], kinds: Sequence[str]) -> dict[str, RayNode]:
    """Of each kind the node with most GPUs; nodes without one count where there are no others."""
    found: dict[str, RayNode] = {}
    on_gpu = any(node.gpus for node in nodes)
    for node in nodes:
        kind = node.labels.get(ACCELERATOR_LABEL, "") if node.gpus else "CPU"
        if bool(node.gpus) == on_gpu and (kind not in found or node.gpus > found[kind].gpus):
            found[kind] = node
    if not found:
        raise NoCapacity("the Ray cluster has no node that could be measured")
    return {kind: node for kind, node in found.items() if kind in kinds} or found


def _task(node: RayNode, wanted: MeasureRequest) -> Any:
    where = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
    task: Any = ray.remote(_measure)
    return task.options(
        num_cpus=0, num_gpus=node.gpus, max_retries=0, scheduling_strategy=where
    ).remote(wanted)


def _measure(wanted: MeasureRequest) -> tuple[str, dict[str, Any]]:
    return accelerator_here(), measure(wanted)


def _result(kind: str, task: Any, node: RayNode, *, end: float) -> tuple[str, dict[str, Any]]:
    ready, _ = ray.wait([task], timeout=max(0.0, end - time.monotonic()))
    if not ready:
        raise NoCapacity(
            f"{node.address} has not measured its {node.gpus or 'CPU'} {kind} in time: are they "
            "in use? Try again when free"
        )
    try:
        here, found = ray.get(task)
    except RayTaskError as error:
        if isinstance(error.cause, ElasticError):
            raise error.cause from error
        raise CloudFailed(f"{node.address}: measuring raised {error.cause!r}") from error
    except RayError as error:
        raise CloudFailed(f"{node.address}: {' '.join(str(error).split())[:200]}") from error
    return kind or here, found | {"host": node.address}
