"""Which pool a node counts to, capacity and GPUs: no Ray cluster needed."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.local.local_cluster import NodeOrder
from elastic.cluster.nodes.providers import (
    ClusterNodes,
    EmbeddedNodes,
    RayNode,
    machine_bytes,
    pool_of,
)
from elastic.errors import InternalError
from elastic.types import Node, NodeReady, Pool, RequestFailed

SPOT = Pool("spot", "A100", 4, "spot", max_nodes=2)
ON_DEMAND = Pool("od", "A100", 4, "on-demand", max_nodes=2)
CPUS = Pool("cpus", "CPU", 2, "owned", max_nodes=2)
POOLS = (SPOT, ON_DEMAND, CPUS)


def ray_node(
    ray_id: str = "abcdef0123456789", cpus: int = 8, gpus: int = 4, **labels: str
) -> RayNode:
    return RayNode(
        ray_id,
        "127.0.0.1",
        1,
        {k.replace("ray_io_", "ray.io/").replace("_", "-"): v for k, v in labels.items()},
        cpus,
        gpus,
        False,
    )


@pytest.mark.parametrize(
    ("node", "pool"),
    [
        (ray_node(elastic_pool="od"), "od"),
        (ray_node(pool="spot"), "spot"),
        (ray_node(pool="nobody's"), None),
        (ray_node(gpus=0), "cpus"),
        (ray_node(gpus=0, cpus=0), None),
        (ray_node(), "spot"),
    ],
)
def test_the_pool_of_a_node(node: RayNode, pool: str | None) -> None:
    found = pool_of(node, POOLS)
    assert (found.name if found else None) == pool


def test_the_pool_by_market_and_accelerator() -> None:
    labels = {"ray.io/market-type": "on-demand", "ray.io/accelerator-type": "A100"}
    node = RayNode("a", "h", 1, labels, 8, 4, False)
    assert pool_of(node, POOLS) == ON_DEMAND
    other = RayNode("a", "h", 1, {**labels, "ray.io/accelerator-type": "H100"}, 8, 4, False)
    assert pool_of(other, POOLS) is None


def test_a_group_of_rays_that_is_no_pools_is_like_no_label() -> None:
    """But a pool that is called as a group takes no other, and a head trains only where it is
    named."""
    stranger = RayNode("a", "h", 1, {"ray.io/node-group": "big"}, 8, 4, False)
    assert pool_of(stranger, POOLS) == SPOT
    assert pool_of(stranger, POOLS, {"spot": "spot"}) == ON_DEMAND
    assert pool_of(stranger, POOLS, {"od": "big"}) == ON_DEMAND
    assert pool_of(replace(stranger, head=True), POOLS) is None
    labels = {**stranger.labels, "elastic-pool": "nobody's"}
    assert pool_of(replace(stranger, labels=labels), POOLS) is None
    nodes = ClusterNodes(POOLS)
    there = [stranger, *(ray_node(name, ray_io_node_group=name) for name in ("spot", "od"))]
    ready = nodes.news({node.ray_id: node for node in there})
    assert [event.node.pool for event in ready if isinstance(event, NodeReady)] == [
        "cpus", "spot", "od",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "label", "pool"),
    [
        (("GPU",), "H100", "GPU"),
        (("CPU",), "H100", "CPU"),
        (("CPU", "GPU"), "H100", "GPU"),
        (("GPU", "A100-80GB-SXM"), "A100", "A100-80GB-SXM"),
        (("A100-80GB-SXM", "H100-80GB"), "H100", "H100-80GB"),
        (("RTX-4090",), "GeForce-RTX-4090", "RTX-4090"),
        (("A100-80GB-SXM",), "H100", None),
        (("P100",), "P4", None),
        (("P100",), "P100", "P100"),
    ],
)
def test_ray_labels_each_node_with_gpus_by_itself(
    kinds: tuple[str, ...], label: str, pool: str | None
) -> None:
    """A GPU is known by any spelling, nodes with GPUs serve a pool of CPUs too."""
    pools = [Pool(kind, kind, 4) for kind in kinds]
    found = pool_of(ray_node(ray_io_accelerator_type=label), pools)
    assert (found.name if found else None) == pool


def test_living_nodes_of_no_pool_are_named_once() -> None:
    nodes = ClusterNodes((Pool("a", "A100", 4, max_nodes=2),))
    alive = {
        "1": ray_node("1", ray_io_accelerator_type="H100", pool="b"), "2": ray_node("2", gpus=0),
        "3": replace(ray_node("3", gpus=0), head=True),
    }  # fmt: skip

    def asked(request_id: str) -> str:
        nodes.request("a", 1, request_id)
        (failed,) = nodes.news(alive)
        assert isinstance(failed, RequestFailed)
        return failed.reason

    none = "no capacity: all that the cluster has of it are in use (0)"
    others = "127.0.0.1 (4 GPUs, pool=b, ray.io/accelerator-type=H100), 127.0.0.1 (8 CPUs)"
    assert [asked("x"), asked("y")] == [f"{none}; of no pool: {others}", none]


def test_nodes_of_a_cluster_come_leave_and_come_back() -> None:
    nodes = ClusterNodes((SPOT,))
    alive = {f"{i}" * 16: ray_node(f"{i}" * 16, pool="spot") for i in (1, 2, 3)}
    assert nodes.news(alive) == [
        NodeReady(Node(name, "spot", 4)) for name in ("spot-11111111", "spot-22222222")
    ]
    assert nodes.news(alive) == []
    nodes.release("spot-11111111")
    third = nodes.news(alive)
    assert [e.node.node_id for e in third if isinstance(e, NodeReady)] == ["spot-33333333"]
    nodes.lost("spot-33333333")
    del alive["3" * 16]
    assert nodes.news(alive) == []  # the released one waits until it is asked for
    nodes.request("spot", 2, "r")
    nodes.request("spot", 2, "r")
    events = nodes.news(alive)
    assert [e.node.node_id for e in events if isinstance(e, NodeReady)] == ["spot-11111111"]
    assert [e.request_id for e in events if isinstance(e, RequestFailed)] == ["r"]


def test_a_node_that_is_about_to_be_taken_is_not_given_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was released for that, and would be prepared again and again until it is gone."""
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    nodes = ClusterNodes((Pool("spot", "CPU", 1, "spot", max_nodes=2),))
    alive = {"a": ray_node("a"), "b": replace(ray_node("b"), draining=True)}
    assert {e.node.node_id for e in nodes.news(alive) if isinstance(e, NodeReady)} == {
        "spot-a",
        "spot-b",
    }
    nodes.release("spot-a", taken_in_s=20.0)
    nodes.release("spot-b")

    def asked(request_id: str) -> list[type]:
        nodes.request("spot", 1, request_id)
        return [type(event) for event in nodes.news(alive)]

    assert asked("at once") == [RequestFailed]
    now_s[0] += 21.0
    assert asked("when it stands all the same") == [NodeReady], "nobody has taken it"
    assert asked("Ray drains the other one") == [RequestFailed]


def test_a_quarantined_node_is_given_after_all_others_and_not_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    nodes = ClusterNodes((Pool("spot", "CPU", 1, "spot", max_nodes=3),))
    alive = {name: ray_node(name) for name in "abcd"}
    assert [e.node.node_id for e in nodes.news(alive) if isinstance(e, NodeReady)] == [
        "spot-a", "spot-b", "spot-c",
    ]  # fmt: skip

    def given(request_id: str, *, there: str = "abcd") -> list[str]:
        nodes.request("spot", 1, request_id)
        found = nodes.news({name: alive[name] for name in there})
        return [e.node.node_id if isinstance(e, NodeReady) else e.reason for e in found]  # type: ignore[union-attr]

    for name, out_s in (("spot-a", 300.0), ("spot-b", 0.0)):
        nodes.quarantine(name, out_s)
        nodes.release(name)
    assert given("never asked for before", there="abcd") == ["spot-d"]
    nodes.release("spot-c")
    assert given("released, and nothing known against it") == ["spot-c"]
    assert given("its time is over") == ["spot-b"]
    nodes.lost("spot-c")
    (why,) = given("none is left", there="abd")
    assert why == (
        "no capacity: all that the cluster has of it are in use (2); 1 node of it quarantined, the "
        "first one for another 5:00"
    )
    now_s[0] += 301.0
    assert given("and after its time", there="abd") == ["spot-a"]


def test_a_quarantined_node_that_was_lost_is_not_taken_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    nodes = ClusterNodes((Pool("spot", "CPU", 1, "spot", max_nodes=2),))
    alive = {"a": ray_node("a")}
    nodes.news(alive)
    nodes.quarantine("spot-a", 300.0)
    nodes.lost("spot-a")
    assert nodes.news({}) == [] and nodes.news(alive) == []
    now_s[0] += 301.0
    assert [type(event) for event in nodes.news(alive)] == [NodeReady]


class FakeCluster:
    def __init__(self) -> None:
        self.orders: list[NodeOrder] = []
        self.answers: list[Future[dict[str, Any]]] = []

    def add(self, order: NodeOrder) -> Future[dict[str, Any]]:
        self.orders.append(order)
        self.answers.append(Future())
        return self.answers[-1]

    def kill(self, name: str) -> None:
        return None


def test_gpus_of_this_machine_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,6")
    cluster = FakeCluster()
    pool = Pool("gpu", "A100", 2, max_nodes=9)
    nodes = EmbeddedNodes(cluster, (pool,))  # type: ignore[arg-type]
    nodes.request("gpu", 3, "r")
    assert [order.gpus for order in cluster.orders] == [("0", "2"), ("5", "6")]
    (failed,) = nodes.news({})
    assert isinstance(failed, RequestFailed)
    assert "has 2 GPUs and 0 are free" in failed.reason
    cluster.answers[0].set_result({"ray_id": "x"})
    cluster.answers[1].set_exception(InternalError("no"))
    ready, lost = nodes.news({})
    assert ready == NodeReady(Node("gpu-1", "gpu", 2, host_memory_bytes=machine_bytes() // 9)), (
        "nine may share the machine"
    )
    assert isinstance(lost, RequestFailed)
    nodes.request("gpu", 1, "again")
    assert cluster.orders[-1].gpus == ("5", "6")
    nodes.release("gpu-1")
    nodes.request("gpu", 1, "more")
    assert cluster.orders[-1].gpus == ("0", "2")
    assert len({order.name for order in cluster.orders}) == 4


def test_why_there_is_no_node() -> None:
    nodes = EmbeddedNodes(FakeCluster(), (Pool("spot", "CPU", 1, "spot", max_nodes=2),))  # type: ignore[arg-type]

    def why(request_id: str) -> str:
        nodes.request("spot", 1, request_id)
        (failed,) = nodes.news({})
        assert isinstance(failed, RequestFailed)
        return failed.reason

    nodes.request("spot", 2, "both")
    assert why("a third") == "no capacity: 2 of 2 in use"
    nodes.change_capacity("spot", -1)
    nodes.lost("spot-1")
    assert why("another") == "no capacity: drills took 1 of its 2 nodes, 1 node in use"
