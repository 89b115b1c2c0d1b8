"""The user's own Ray cluster as a place: which nodes are used, where each rank stands, and the
pools of a job on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import util
from typing import TYPE_CHECKING, Any

from elastic.certify.harness.place import CPU_RANKS, MOST_RANKS, Place
from elastic.errors import SpecError
from elastic.types.nouns import ACCELERATOR_LABEL, MARKET_LABEL

if TYPE_CHECKING:
    from elastic.cluster.nodes.providers import RayNode
    from elastic.cluster.workers.remote_processes import Seat

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
NOTICE_S = 20


def address() -> str:
    """Of the Ray cluster that `elastic run` would use; '' = none. Raises SpecError where Ray is
    missing."""
    found = os.environ.get("RAY_ADDRESS") or ("auto" if os.environ.get(SUBMITTED) else "")
    if found and (util.find_spec("ray") is None or util.find_spec("pydantic") is None):
        raise SpecError(
            f"RAY_ADDRESS is {found}, but Ray or pydantic is not installed here; install them, or "
            "give --no-ray"
        )
    return found


def find(address: str, gpus: int | None) -> Place:
    """Connects to the cluster. `gpus`: how many to use, 0 = the CPU; without GPUs: how many
    processes. Raises SpecError."""
    from elastic.cluster.workers import remote_processes

    return place_of(address, remote_processes.connect(address), gpus)


def place_of(address: str, nodes: Sequence[RayNode], gpus: int | None) -> Place:
    """Raises SpecError where the cluster has less than is asked for."""
    on_gpu = gpus != 0 and any(node.gpus for node in nodes)
    free = {node.ray_id: node.gpus if on_gpu else node.cpus for node in nodes}
    most = min(sum(free.values()), MOST_RANKS)
    what = "GPUs" if on_gpu else "CPUs"
    n = gpus or (most if on_gpu else min(most, CPU_RANKS))
    if not 0 < n <= most:
        listed = ", ".join(f"{name_of(node)}: {free[node.ray_id]}" for node in nodes)
        raise SpecError(
            f"--gpus {n}: the nodes of the Ray cluster have {what} for at most {most} ranks "
            f"({listed or 'no node'})"
        )
    counts = shared_out(n, list(free.values()))
    used = tuple(node for node, count in zip(nodes, counts) if count)
    seats = tuple(_seat(node, on_gpu) for node, count in zip(nodes, counts) for _ in range(count))
    if not on_gpu:
        return Place("cpu-gloo", n, ray=True, address=address, nodes=used, seats=seats)
    names = tuple(
        node.labels.get(ACCELERATOR_LABEL, "GPU")
        for node, count in zip(nodes, counts)
        for _ in range(count)
    )
    return Place(
        "one-gpu" if n == 1 else "several-gpus", n, ("",) * n, names, True, address, used, seats
    )


def shared_out(n: int, free: Sequence[int]) -> list[int]:
    """How many of `n` each takes: as even as they have room."""
    counts = [0] * len(free)
    while n > 0:
        room = [i for i, most in enumerate(free) if counts[i] < most]
        counts[min(room, key=lambda i: counts[i])] += 1
        n -= 1
    return counts


def name_of(node: RayNode) -> str:
    return node.labels.get("elastic-node") or f"node-{node.ray_id[:6]}"


def _seat(node: RayNode, on_gpu: bool) -> Seat:
    from elastic.cluster.workers.remote_processes import Seat

    return Seat(node.ray_id, name_of(node), node.address, on_gpu)


def pools(place: Place) -> list[dict[str, Any]]:
    """Of a job whose nodes are those of the place: as their labels name them, else by market and
    accelerator."""
    from elastic.cluster.nodes.providers import pool_name

    found: dict[tuple[str, str, str], list[RayNode]] = {}
    for node in place.nodes:
        name = pool_name(node.labels)
        kind = node.labels.get(ACCELERATOR_LABEL, "GPU") if place.gpus else "CPU"
        found.setdefault((name, node.labels.get(MARKET_LABEL, "on-demand"), kind), []).append(node)
    ranks = {
        node.ray_id: sum(seat.ray_id == node.ray_id for seat in place.seats) for node in place.nodes
    }
    return [
        {
            "name": name or f"certify-{i}", "market_type": market, "accelerator_type": kind,
            "max_nodes": len(nodes), "gpus_per_node": max(ranks[node.ray_id] for node in nodes),
            "notice_s": NOTICE_S,
        }
        for i, ((name, market, kind), nodes) in enumerate(found.items())
    ]  # fmt: skip


def world(place: Place) -> int:
    """How many ranks a job on these pools has; 0 = the place is no cluster."""
    if not place.address:
        return 0
    from elastic.cluster.nodes.providers import pool_of, workers_of
    from elastic.config.job import PoolSpec

    found = [PoolSpec(**pool).pool() for pool in pools(place)]
    chosen = [(node, pool_of(node, found)) for node in place.nodes]
    return sum(workers_of(node, pool) for node, pool in chosen if pool is not None)
