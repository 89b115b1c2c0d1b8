"""The private Ray names that are used still do what they did: one test for each name of elastic/cluster/_ray_private.py."""

from __future__ import annotations

import threading
import time

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster import _ray_private, processes
from elastic.cluster.local import HOST, LocalCluster, NodeOrder

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_drain_shows_among_the_draining_nodes(cluster: LocalCluster) -> None:
    ray_id = cluster.add(NodeOrder("d", 1)).result(60)["ray_id"]
    where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    busy = ray.remote(lambda s: time.sleep(s)).options(num_cpus=1, scheduling_strategy=where, max_retries=0).remote(100)
    ray.wait([busy], timeout=5)  # an idle node would leave at once
    assert ray_id not in _ray_private.draining_nodes()
    at_s = time.time() + 60
    assert _ray_private.drain(ray_id, at_s, "a test")
    deadline = time.monotonic() + 10
    while ray_id not in _ray_private.draining_nodes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert abs(_ray_private.draining_nodes()[ray_id] - at_s) < 0.01


def test_connect_leads_to_the_head_on_loopback(cluster: LocalCluster) -> None:
    assert ray.util.get_node_ip_address() == HOST
    assert ray.get_runtime_context().gcs_address == cluster.address


def test_the_thread_that_prints_errors_has_ended(cluster: LocalCluster) -> None:
    deadline = time.monotonic() + 5
    while any(thread.name == "ray_listen_error_messages" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    from ray._private.worker import global_worker

    assert global_worker.listener_thread is not None  # the name by which ray.init starts it


def test_no_agent_runs_on_the_embedded_cluster(cluster: LocalCluster) -> None:
    cluster.add(NodeOrder("lean", 1)).result(60)
    names = []
    for pid in processes.descendants(cluster.pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            names.append(file.read().replace(b"\0", b" ").decode())
    assert sum(name.startswith("sleep infinity") for name in names) >= 4  # two on the head, two on each node
    assert not [name for name in names if "Agent" in name.split(" ")[0] or "dashboard.py" in " ".join(name.split(" ")[:3])]
