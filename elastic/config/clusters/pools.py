"""Node types -> pools: hardware and prices from the catalog, and what the file's own section says
over that."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic import catalog
from elastic.config.clusters.cluster_file import CLOUDS, ClusterNodeType, Problem
from elastic.config.clusters.elastic_section import PLACE, Own, OwnPool
from elastic.types import Pool
from elastic.types.nouns import ACCELERATOR_LABEL

# Seconds between a spot notice and the end: AWS 2 minutes, Google Cloud and Azure 30 s, as their
# documents say.
NOTICE_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0, "kubernetes": 30.0}


def pools_of(
    provider: str, node_types: Sequence[ClusterNodeType], own: Own
) -> tuple[tuple[Pool, ...], dict[str, str], list[Problem]]:
    """The pools, where the price of each comes from, and what is wrong."""
    workers = [found for found in node_types if not found.head and found.max_nodes > 0]
    names = [worker.name for worker in workers]
    right = f"pools are {', '.join(names) or 'none'}"
    problems = [
        Problem((*PLACE, "pools", name), "there is no such pool", right)
        for name in own.pools
        if name not in names
    ]
    pools, sources = [], {}
    for worker in workers:
        said = own.pools.get(worker.name, OwnPool())
        pool, source, wrong = _pool(provider, worker, said)
        problems += wrong
        if pool is not None:
            pools.append(pool)
            sources[pool.name] = source
    return tuple(pools), sources, problems


def _pool(
    provider: str, worker: ClusterNodeType, said: OwnPool
) -> tuple[Pool | None, str, list[Problem]]:
    known = catalog.instance_type(worker.instance_type)
    gpus = said.gpus_per_node or int(worker.resources.get("GPU", 0)) or (known.gpus if known else 0)
    kind = (
        said.accelerator_type
        or worker.labels.get(ACCELERATOR_LABEL)
        or (known.gpu if known else "")
    )
    problems = _unknown(provider, worker, gpus)
    if not gpus and kind in ("", "CPU"):
        kind, gpus = "CPU", int(worker.resources.get("CPU", 0)) or (known.vcpus if known else 0)
    if not gpus:
        what = "nothing says how many GPUs its nodes have"
        right = "say resources: {GPU: n}, or gpus_per_node in metadata.elastic.pools"
        return None, "", problems or [worker.problem(what=what, right=right)]
    price, source = _price(worker, said)
    pool = Pool(
        worker.name,
        kind or "GPU",
        gpus,
        said.market_type or worker.market_type,
        price or 0.0,
        worker.min_nodes,
        worker.max_nodes,
        said.notice_s if said.notice_s is not None else NOTICE_S.get(provider, Pool.notice_s),
        worker.region,
        said.zone or worker.zone,
        said.ends_at_s,
        known.gpu_memory_bytes if known else 0,
        known.host_memory_bytes if known else 0,
        worker.instance_type,
        provider if provider in CLOUDS else "",
    )
    return pool, source, problems


def head_usd_per_h(head: ClusterNodeType | None, said: float | None) -> float:
    """What the head costs by the hour, as the file says or the catalog knows; 0 = neither does."""
    if head is None:
        return said or 0.0
    return _price(head, OwnPool(usd_per_node_h=said))[0] or 0.0


def _price(worker: ClusterNodeType, said: OwnPool) -> tuple[float | None, str]:
    """Dollars per hour of a node and where that comes from, in words; None = not known."""
    if said.usd_per_node_h is not None:
        return said.usd_per_node_h, "this file"
    if worker.market_type == "owned":
        return 0.0, "owned: no price"
    known = catalog.instance_type(worker.instance_type)
    price, region = (
        (None, "")
        if known is None
        else known.usd_per_h_or_elsewhere(worker.region, worker.market_type == "spot")
    )
    if price is None:
        return None, "not known"
    of_elsewhere = f" of {region}" if region != worker.region else ""
    asked = " (of on-demand nodes)" if worker.market_type == "reserved" else ""
    at = known.prices[region].at if known is not None else ""
    return price, f"table of {at or catalog.PRICES_AT}{of_elsewhere}{asked}"


def _unknown(provider: str, worker: ClusterNodeType, gpus: int) -> list[Problem]:
    """An instance type that the catalog does not have. Without GPUs it only lacks a price."""
    if provider not in ("aws", "gcp") or catalog.instance_type(worker.instance_type) is not None:
        return []
    key = {"aws": "InstanceType", "gcp": "machineType"}[provider]
    if not worker.instance_type:
        right = "name a type, as in p5.48xlarge or a3-highgpu-8g"
        return [worker.problem("node_config", what=f"{key} is missing", right=right)]
    near = catalog.nearest(worker.instance_type, provider)
    right = (
        f"did you mean {near}?"
        if near
        else "the catalog (elastic/catalog) knows the types with NVIDIA GPUs"
    )
    cpu_only = provider == "aws" and not gpus and not re.match(r"[pg]\d", worker.instance_type)
    what = f"unknown instance type '{worker.instance_type}'"
    return [worker.problem("node_config", key, what=what, right=right, warning=cpu_only)]
