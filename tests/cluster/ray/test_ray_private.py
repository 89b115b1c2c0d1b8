"""The private Ray names that are used still do what they did: one test for each name of
elastic/cluster/ray/_ray_private.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from support.waiting import until

from elastic.cluster.local.local_cluster import HOST, LocalCluster, NodeOrder
from elastic.cluster.ray import _ray_private, processes
from elastic.driver import interruptible
from elastic.errors import Interrupted

pytestmark = pytest.mark.e2e


def test_drain_shows_among_the_draining_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    ray_id = cluster.add(NodeOrder("d", 1)).result(180)["ray_id"]
    where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    begun = tmp_path / "begun"

    def work() -> None:
        begun.touch()
        time.sleep(1000)  # sleeps: in a process of Ray's

    busy = ray.remote(work).options(num_cpus=1, scheduling_strategy=where, max_retries=0).remote()
    until(begun.exists, "the task")  # an idle node would leave at once
    assert ray_id not in _ray_private.draining_nodes()
    at_s = time.time() + 600
    assert _ray_private.drain(ray_id, at_s, "a test")
    until(lambda: ray_id in _ray_private.draining_nodes(), "the node among those that drain")
    assert abs(_ray_private.draining_nodes()[ray_id] - at_s) < 0.01
    del busy


def test_connect_leads_to_the_head_on_loopback(cluster: LocalCluster) -> None:
    assert ray.util.get_node_ip_address() == HOST
    assert ray.get_runtime_context().gcs_address == cluster.address


def test_connecting_keeps_who_listens_to_sigterm() -> None:
    def init(address: str, **named: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "init", init)
        with pytest.raises(Interrupted), interruptible():
            _ray_private.connect("a", "b")


def test_the_thread_that_prints_errors_has_ended(cluster: LocalCluster) -> None:
    until(
        lambda: all(thread.name != "ray_listen_error_messages" for thread in threading.enumerate()),
        "the end of the thread",
    )
    from ray._private.worker import global_worker

    assert global_worker.listener_thread is not None  # the name by which ray.init starts it


def test_a_driver_on_a_node_is_no_client(cluster: LocalCluster) -> None:
    from ray.util.client import ray as client

    assert not _ray_private.is_client()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(client), "is_connected", lambda *_: True)
        assert _ray_private.is_client()


def test_no_agent_runs_on_the_embedded_cluster(cluster: LocalCluster) -> None:
    cluster.add(NodeOrder("lean", 1)).result(180)
    names = []
    for pid in processes.descendants(cluster.pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            names.append(file.read().replace(b"\0", b" ").decode())
    # two on the head, two on each node
    assert sum(name.startswith("sleep infinity") for name in names) >= 4
    assert not [
        name
        for name in names
        if "Agent" in name.split(" ")[0] or "dashboard.py" in " ".join(name.split(" ")[:3])
    ]


def test_functions_of_ray_train_are_answered_by_us(tmp_path: Path) -> None:
    text = f"""
import ray.train
from elastic.cluster.ray._ray_private import become_train_worker, train_context
names = "world_rank", "world_size", "local_rank", "local_world_size", "node_rank"
ranks = dict(zip(names, range(1, 6)))
class Worker:
    def get_preemption_info(self):
        return ray.train.PreemptionInfo(5, {{"a": [1, 2]}})
    def get_checkpoint(self):
        return "a checkpoint"
    def get_context(self):
        return train_context({str(tmp_path / "r")!r}, ranks)
    def report(self, **given):
        self.given = given
worker = Worker()
become_train_worker(worker)
info = ray.train.get_preemption_info()
assert (info.deadline_ms, info.preempted_ranks, info.preempted_node_ids) == (5, [1, 2], ["a"])
assert ray.train.get_checkpoint() == "a checkpoint"
ray.train.report({{"loss": 1.0}})
assert worker.given.pop("metrics") == {{"loss": 1.0}}
mode = worker.given.pop("checkpoint_upload_mode")
assert mode.name == "SYNC" and not any(worker.given.values()), worker.given
context = ray.train.get_context()
assert isinstance(context, ray.train.TrainContext)
assert ranks == {{name: getattr(context, "get_" + name)() for name in names}}
assert context.get_experiment_name() == "r"
assert context.get_storage().experiment_fs_path == {str(tmp_path / "r")!r}
try:
    train_context("s3://bucket/r", ranks).get_storage()
except RuntimeError as error:
    assert "where the run lies in a folder; this one is s3://bucket/r" in str(error)
else:
    raise AssertionError("no error")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_is_read_again(tmp_path: Path) -> None:
    """In a process of its own: here a cluster is connected."""
    text = """
import os, sys
import ray
from ray._raylet import AuthenticationTokenLoader, get_authentication_mode
from elastic.cluster.local import cluster_token
from elastic.cluster.ray._ray_private import read_environment_again
def seen():
    token = AuthenticationTokenLoader.instance().get_raw_token(ignore_auth_mode=True) if get_authentication_mode() else None
    return token, ray._private.services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
at_first, tokens = seen(), []
for folder in sys.argv[1:]:
    cluster_token.write(folder)
    with cluster_token.replaced(cluster_token.environment(folder)):
        read_environment_again()
        token, stays = seen()
        assert stays
        tokens.append(token == open(folder + "/auth_token").read())
    read_environment_again()
    assert seen() == at_first, (seen(), at_first)
assert tokens == [True, True], tokens
"""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", text, *folders], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr


def test_the_launcher_says_what_it_refuses() -> None:
    types = {"head": {"resources": {}, "node_config": {}}}
    good = {
        "cluster_name": "a",
        "provider": {"type": "aws", "region": "r"},
        "head_node_type": "head",
        "available_node_types": types,
    }
    assert _ray_private.launcher_problem(good) is None
    # Ray fills in a copy
    assert good["available_node_types"] == {"head": {"resources": {}, "node_config": {}}}
    wrong = good | {"max_workers": "two"}
    assert _ray_private.launcher_problem(wrong) == (
        ("max_workers",),
        "'two' is not of type 'integer'",
    )
    found = _ray_private.launcher_problem(good | {"head_node_type": "boss"})
    assert found is not None
    assert "must be one of `available_node_types`" in found[1]
    found = _ray_private.launcher_problem(good | {"provider": {"type": "local"}})
    assert found is not None
    assert "not supported for on-premise clusters" in found[1]


def test_an_idle_node_ends_and_a_busy_one_does_not(cluster: LocalCluster, tmp_path: Path) -> None:
    ray_id = cluster.add(NodeOrder("idle", 1)).result(180)["ray_id"]
    where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
    begun, end = tmp_path / "begun", tmp_path / "end"

    def work() -> None:
        begun.touch()
        while not end.exists():
            time.sleep(0.05)  # sleeps: in a process of Ray's

    task = ray.remote(work).options(num_cpus=1, scheduling_strategy=where, max_retries=0).remote()
    until(begun.exists, "the task")
    assert not _ray_private.end_when_idle(ray_id, "a test")
    end.touch()
    ray.get(task)

    def ended() -> bool:
        _ray_private.end_when_idle(ray_id, "a test")
        return not any(node["NodeID"] == ray_id and node["Alive"] for node in ray.nodes())

    until(ended, "the end of the node")


def test_no_autoscaler_runs_on_the_embedded_cluster(cluster: LocalCluster) -> None:
    """test_autoscaler.py has one that runs."""
    assert not _ray_private.autoscaler_v2()
    assert _ray_private.scaling() == _ray_private.Scaling(
        Counter(), Counter(), Counter(), Counter()
    )
