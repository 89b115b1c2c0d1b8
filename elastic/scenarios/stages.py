"""Stages that scenarios are played on: nodes that the run starts itself, or a small Ray cluster on
this host that is there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.scenarios.one_process import program_file
from elastic.scenarios.scenario import Nodes, Scenario
from elastic.scenarios.watched_run import Stage

if TYPE_CHECKING:
    from elastic.cluster.local.local_cluster import LocalCluster

# of every scenario; until it is stopped
TRAINS: dict[str, Any] = {
    "steps": 1_000_000, "global_batch": 48, "seed": 7, "clip_grad_norm": 1.0, "peer_every": 4,
    "durable_every": 0, "budget_usd": 1000.0,
}  # fmt: skip
NOTICE_S = 20
OWN_NODES = 2


@contextmanager
def staged(scenario: Scenario, folder: Path, accelerator_type: str = "CPU") -> Iterator[Stage]:
    """On this host: the nodes that the scenario names, which the run starts and ends; or those of
    a Ray cluster that is there."""
    if scenario.on_cluster:
        with own_cluster() as cluster:
            yield on_cluster(cluster, job_of(scenario, cluster_pools()), folder)
        return
    nodes = scenario.nodes
    layout = {"layout": dict(nodes.layouts)} if nodes.layouts else {}
    job = {**job_of(scenario, pools_of(nodes, accelerator_type)), **layout}
    yield Stage(folder, job, nodes.total * nodes.workers)


def job_of(scenario: Scenario, pools: list[dict[str, Any]]) -> dict[str, Any]:
    key, name = ("script", scenario.script) if scenario.script else ("program", scenario.program)
    return {**TRAINS, key: program_file(name), **scenario.job, "pools": pools}


def pools_of(nodes: Nodes, accelerator_type: str) -> list[dict[str, Any]]:
    kind = {"accelerator_type": accelerator_type, "gpus_per_node": nodes.workers}
    spot = {
        "name": "spot", "market_type": "spot", "max_nodes": nodes.spot, "notice_s": NOTICE_S,
        "usd_per_node_h": 1.0, **kind,
    }  # fmt: skip
    on_demand = {
        "name": "on-demand", "market_type": "on-demand", "max_nodes": nodes.on_demand,
        "usd_per_node_h": 3.0, **kind,
    }  # fmt: skip
    return [spot, on_demand] if nodes.on_demand else [spot]


def cluster_pools() -> list[dict[str, Any]]:
    return [
        {
            "name": "own", "market_type": "spot", "accelerator_type": "CPU", "gpus_per_node": 1,
            "max_nodes": OWN_NODES, "notice_s": NOTICE_S,
        }
    ]  # fmt: skip


@contextmanager
def own_cluster() -> Iterator[LocalCluster]:
    """As if somebody else had started it: what uses it is given its address. CPU nodes of one
    worker, for any pool."""
    from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder

    with LocalCluster() as cluster:
        starting = [
            cluster.add(NodeOrder(f"own-{i}", 1, {"elastic-node": f"own-{i}"}))
            for i in range(OWN_NODES)
        ]
        for answer in starting:
            answer.result(90)
        yield cluster


def on_cluster(cluster: LocalCluster, job: dict[str, Any], folder: Path) -> Stage:
    environment = cluster.environment
    return Stage(folder, job, OWN_NODES, address=cluster.address, environment=environment)
