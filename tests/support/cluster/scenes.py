"""Scenes on a cluster that the real autoscaler runs (autoscaled.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from support.cluster.autoscaled import PORT
from support.cluster.stage import FAKE, Stage, plan
from support.places import TESTS
from support.waiting import until

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.nodes.autoscaler_agent import NAME, NAMESPACE
from elastic.cluster.ray import _ray_private
from elastic.types import (
    EnterPlan,
    NodeLost,
    NodePrepared,
    NodeReady,
    Pool,
    Prepare,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    StepDone,
    Stop,
    WorkerId,
)

SPOT = Pool("spot", market_type="spot", max_nodes=2, gpus_per_node=1)
SAFE = Pool("safe", market_type="on-demand", max_nodes=2, gpus_per_node=1)
LEASE_S = 6.0
ADDRESS = f"127.0.0.1:{PORT}"


@dataclass
class Stagehand:
    folder: Path
    open: list[Any] = field(default_factory=list)

    def stage(self, name: str, lease_s: float = 900.0, **more: Any) -> Stage:
        """`more`: of its RayRun."""
        uri = self.folder / name
        uri.mkdir(exist_ok=True)
        given = {
            "job": {"orphan_lease_s": lease_s}, "pools": (SPOT, SAFE), "address": ADDRESS,
            "session": FAKE, "python_path": (str(TESTS),), **more,
        }  # fmt: skip
        return Stage(RayBackend(RayRun(name, str(uri), **given)))

    def nodes(self) -> dict[str, str]:
        """What the provider has, and somebody pays for."""
        return dict(json.loads((self.folder / "nodes").read_text()))

    def launches(self) -> list[str]:
        path = self.folder / "launches"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def watcher(self) -> dict[str, Any]:
        try:
            return dict(ray.get(ray.get_actor(NAME, NAMESPACE).pending.remote(), timeout=60))
        except ValueError:
            return {}

    def requested(self) -> int:
        """Bundles that Ray itself has as the cluster's request."""
        from ray.autoscaler.v2.sdk import get_cluster_status

        demands = get_cluster_status(
            ray.get_runtime_context().gcs_address
        ).resource_demands.cluster_constraint_demand
        return sum(entry.count for demand in demands for entry in demand.bundles_by_count)

    def nothing_left(self) -> bool:
        alive = [node for node in ray.nodes() if node["Alive"]]
        return not self.nodes() and not self.requested() and len(alive) == 1

    def state(self) -> str:
        log = Path("/tmp/ray/session_latest/logs/monitor.log").read_text().splitlines()[-12:]
        return "\n".join(
            map(str, [self.nodes(), self.launches(), self.watcher(), _ray_private.scaling(), *log])
        )


def asked(on: Stage, pool: str, count: int, number: int) -> None:
    on.backend.execute(RequestNodes(pool, count, f"r{number}"))


def over(on: Stage) -> None:
    """Without a Stop it would only let go, for the next driver."""
    on.backend.execute(Stop("succeeded", "all done"))
    on.backend.close()


def given_and_given_back(hand: Stagehand) -> None:
    """A node comes, works, and its meter stops within seconds after it was released; nothing else
    was ever launched."""
    on = hand.stage("first")
    assert type(on.backend.provider).__name__ == "AutoscalerNodes"
    asked(on, "spot", 1, 1)
    node = on.wait(NodeReady).node
    assert (node.pool, node.gpus) == ("spot", 1)
    until(lambda: list(hand.nodes().values()) == ["spot"], "the provider has written it down")
    on.backend.execute(Prepare(node.node_id))
    on.wait(NodePrepared)
    on.backend.execute(EnterPlan(plan(1, [WorkerId(node.node_id, 0)])))
    on.wait(StepDone)
    on.backend.execute(ReleaseNode(node.node_id))
    on.wait(NodeLost)
    began_s = time.monotonic()
    until(
        lambda: on.backend.poll(0.0) is not None and not hand.nodes(),
        "the provider has ended the node",
    )
    print(f"released to ended: {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    until(lambda: not hand.requested(), "the request is gone")
    assert hand.launches() == ["spot 1"]
    over(on)


def drought_then_on_demand(hand: Stagehand) -> None:
    """A launch that fails tells the cloud's reason and is not repeated; the next pool is asked and
    answers."""
    text = (
        "An error occurred (InsufficientInstanceCapacity) when calling the RunInstances "
        "operation: none is left"
    )
    (hand.folder / "spot.error").write_text(text)
    on = hand.stage("second")
    asked(on, "spot", 2, 1)
    failed = on.wait(RequestFailed)
    assert (failed.pool, failed.request_id, failed.reason) == ("spot", "r1", text)
    asked(on, "safe", 1, 2)
    assert on.wait(NodeReady).node.pool == "safe"
    before = len(hand.launches())
    (hand.folder / "spot.error").unlink()
    on.backend.provider.launch_most_s = 2.0
    (hand.folder / "spot.silent").touch()
    asked(on, "spot", 1, 3)
    assert on.wait(RequestFailed).reason == "no capacity: no answer within 2 s"
    (hand.folder / "spot.silent").unlink()
    assert len(hand.launches()) <= before + 2 and list(hand.nodes().values()) == ["safe"]
    hand.open.append(on)


def no_more_than_asked(hand: Stagehand) -> None:
    """Nodes that come although no run asked for them go again. What cannot be had fails, and leaves
    what there is alone."""
    on = hand.open[0]
    before = len(hand.launches())
    two: dict[str, Any] = {
        "bundles": [{"CPU": 2}] * 2,
        "bundle_label_selectors": [{"ray.io/node-group": "safe"}] * 2,
    }
    until(lambda: request_resources(**two) or len(hand.nodes()) == 2, "a node nobody asked for")
    until(lambda: list(hand.nodes().values()) == ["safe"] and hand.requested() == 1, "it has gone")
    assert len(hand.launches()) <= before + 2 and len(on.backend.nodes) == 1
    on.backend.provider.change_capacity("spot", 9)
    on.backend.provider.launch_most_s = 180.0
    asked(on, "spot", 4, 5)
    assert "max_workers" in on.wait(RequestFailed).reason
    assert list(hand.nodes().values()) == ["safe"]


def done_and_cleared(hand: Stagehand) -> None:
    """A run that is over ends everything that it has, also what is just being launched."""
    on = hand.open.pop()
    before = len(hand.launches())
    asked(on, "safe", 1, 7)
    until(lambda: len(hand.launches()) > before, "a launch has begun")
    over(on)
    began_s = time.monotonic()
    until(hand.nothing_left, "nothing is left", 180)
    print(f"the run's end to nothing left: {time.monotonic() - began_s:.1f} s", file=sys.stderr)


def pool_of_another_name(hand: Stagehand) -> None:
    """A node of the only type of its market is the pool's, whatever the type is called."""
    on = hand.stage("named", pools=(replace(SAFE, name="steady"),))
    asked(on, "steady", 1, 1)
    assert on.wait(NodeReady).node.pool == "steady"
    over(on)
    until(hand.nothing_left, "nothing is left", 180)


def attached_after_the_watcher_died(hand: Stagehand) -> None:
    """It has forgotten whose the nodes are; the workers know where they are, and train on."""
    on = hand.stage("fourth")
    asked(on, "safe", 1, 1)
    node = on.wait(NodeReady).node
    on.backend.execute(Prepare(node.node_id))
    on.wait(NodePrepared)
    worker, plans = WorkerId(node.node_id, 0), (plan(1, [WorkerId(node.node_id, 0)]),)
    on.backend.execute(EnterPlan(plans[0]))
    on.wait(StepDone)
    pid = on.backend.worker_group.pid(worker)
    on.backend.close()
    ray.kill(ray.get_actor(NAME, NAMESPACE), no_restart=False)
    after = hand.stage("fourth", attach=True, epoch=2, plans=plans)
    assert after.wait(NodeReady).node.node_id == node.node_id
    after.wait(lambda event: isinstance(event, StepDone) and event.step > 3)
    assert after.backend.worker_group.pid(worker) == pid
    over(after)
    until(hand.nothing_left, "nothing is left", 180)


DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import ray
ray.init({address!r}, namespace="elastic-third", log_to_driver=False)
from support.cluster.scenes import *
on = Stagehand(Path({folder!r})).stage("third", LEASE_S)
on.backend.execute(RequestNodes("safe", 1, "r1"))
node = on.wait(NodeReady).node
on.backend.execute(Prepare(node.node_id))
on.wait(NodePrepared)
print("prepared", flush=True)
while True:
    on.backend.poll(on.backend.now_s() + 1)
"""


def killed_driver(hand: Stagehand) -> None:
    """Without its driver a run saves and leaves after the lease; its nodes end and its request is
    cleared."""
    text = DRIVER.format(here=str(TESTS), address=ADDRESS, folder=str(hand.folder))
    said = hand.folder / "third.err"
    with (
        said.open("w") as err,
        subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=err, text=True
        ) as driver,
    ):
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "prepared", said.read_text()[-3000:]
        os.kill(driver.pid, signal.SIGKILL)
    assert list(hand.nodes().values()) == ["safe"]
    began_s = time.monotonic()
    until(hand.nothing_left, "nothing is left", LEASE_S + 60)
    print(
        f"killed to nothing left: {time.monotonic() - began_s:.1f} s, lease {LEASE_S} s",
        file=sys.stderr,
    )


SCENES: dict[str, Callable[[Stagehand], None]] = {
    "given_and_given_back": given_and_given_back, "drought_then_on_demand": drought_then_on_demand,
    "no_more_than_asked": no_more_than_asked, "done_and_cleared": done_and_cleared,
    "pool_of_another_name": pool_of_another_name,
    "attached_after_the_watcher_died": attached_after_the_watcher_died,
    "killed_driver": killed_driver,
}  # fmt: skip
