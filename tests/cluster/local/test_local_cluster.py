"""The embedded cluster leaves no process and no folder, however its driver or its keeper ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.child import child
from support.cluster.stage import wait_gone
from support.shadowing_modules import make_modules
from support.waiting import until

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import processes
from elastic.errors import InternalError

pytestmark = pytest.mark.e2e

DRIVER = """
import json, sys, time
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
cluster = LocalCluster()
cluster.add(NodeOrder("a", 1)).result(180)
print(json.dumps({"pids": cluster.pids(), "folder": cluster.folder}), flush=True)
time.sleep(600)
"""


def wait_removed(folder: str) -> None:
    until(lambda: not Path(folder).exists(), f"the end of the folder {folder}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_dies_leaves_nothing(number: int) -> None:
    words = [sys.executable, "-c", DRIVER]
    with child(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        told = json.loads(driver.stdout.readline())
        assert len(told["pids"]) > 5
        driver.send_signal(number)
        driver.wait()
    wait_gone(told["pids"])
    wait_removed(told["folder"])


def kill_supervisor(cluster: LocalCluster) -> None:
    os.kill(cluster.pid, signal.SIGKILL)


def kill_cluster_process(cluster: LocalCluster) -> None:
    os.kill(processes.descendants(cluster.pid)[0], signal.SIGKILL)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", [LocalCluster.close, kill_supervisor, kill_cluster_process])
def test_no_end_leaves_anything(end: Callable[[LocalCluster], None]) -> None:
    with LocalCluster() as cluster:
        answers = [cluster.add(NodeOrder(name, 1)) for name in ("a", "b")]
        assert len({answer.result(180)["ray_id"] for answer in answers}) == 2
        pids, folder = cluster.pids(), cluster.folder
        end(cluster)
        wait_gone(pids)
        wait_removed(folder)
        until(lambda: cluster.ended, "the end of the cluster")
        with pytest.raises(InternalError, match="has ended"):
            cluster.add(NodeOrder("c", 1)).result(60)


def test_it_imports_nothing_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = make_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    with LocalCluster() as cluster:
        assert cluster.add(NodeOrder("a", 1)).result(180)["ray_id"]
    assert not imported.exists()


def test_killing_a_node_ends_all_its_processes_and_no_others() -> None:
    with LocalCluster() as cluster:
        raylet = cluster.add(NodeOrder("a", 1)).result(180)["pid"]
        other = cluster.add(NodeOrder("b", 1)).result(180)["pid"]
        below = processes.descendants(raylet)
        assert set(cluster.kill("a").result(60)["pids"]) >= {raylet, *below}
        wait_gone([raylet, *below])
        assert processes.started(other) is not None
        assert cluster.kill("a").result(60)["pids"] == []


def test_workers_are_forks_and_go_with_their_node() -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look() -> tuple[int, int, bool, str, int]:
        return (
            os.getpid(),
            os.getppid(),
            "elastic.worker.session.session" in sys.modules,
            os.environ["ONLY_HERE"],
            processes.raylet(),
        )

    with LocalCluster() as cluster:
        orders = [NodeOrder(name, 1, environment={"ONLY_HERE": name}) for name in ("a", "b")]
        added = [answer.result(180) for answer in [cluster.add(order) for order in orders]]
        cluster.connect("forks")
        try:
            task = ray.remote(look)
            asked = [
                task.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(a["ray_id"], soft=False)
                ).remote()
                for a in added
            ]
            (first, parent, loaded, here, one), (second, same, too, there, other) = ray.get(
                asked, timeout=180
            )
            assert (loaded, too, here, there) == (True, True, "a", "b")
            assert parent == same, "one process forks them all"
            assert [one, other] == [node["pid"] for node in added]
            assert first in cluster.kill("a").result(60)["pids"]
            wait_gone([first])
            assert second in cluster.kill("b").result(60)["pids"]
            wait_gone([second])
        finally:
            cluster.disconnect()


def test_nodes_carry_labels_and_workers() -> None:
    import ray

    with LocalCluster() as cluster:
        ray_id = cluster.add(
            NodeOrder("a", 3, {"elastic-pool": "spot", "ray.io/market-type": "spot"})
        ).result(180)["ray_id"]
        cluster.connect("labels")
        try:
            entry = next(node for node in ray.nodes() if node["NodeID"] == ray_id)
            assert entry["Resources"]["CPU"] == 3
            assert entry["Labels"]["elastic-pool"] == "spot"
            head = next(node for node in ray.nodes() if node["NodeID"] != ray_id)
            assert "CPU" not in head["Resources"]
        finally:
            cluster.disconnect()
