"""Drills on real nodes: notice, kill, add, hang, and the driver itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.cluster.stage import POOL, Stage, plan

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import _ray_private
from elastic.types import (
    DrillAsked,
    EnterPlan,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    PlanEntered,
    Prepare,
    RequestFailed,
    RequestNodes,
    Silent,
    StepDone,
    StopAsked,
    WorkerId,
)  # fmt: skip

pytestmark = pytest.mark.e2e
Make = Callable[..., Stage]


def stepping(on: Stage, n: int) -> list[str]:
    nodes = on.nodes(n)
    on.backend.execute(EnterPlan(plan(1, [WorkerId(node, 0) for node in nodes])))
    on.wait(PlanEntered)
    return nodes


def test_a_notice_takes_the_node_at_its_deadline_and_capacity_with_it(stage: Make) -> None:
    on = stage(job={"drill": [{"at_step": 3, "notice": "rank0", "deadline_s": 2.0}]})
    a, _ = stepping(on, 2)
    begun_s = on.backend.now_s()
    asked = on.wait(DrillAsked)
    assert asked.drill == {"at_step": 3, "notice": [a], "deadline_s": 2.0}
    notice = on.wait(Notice)
    assert (notice.node_id, notice.origin) == (a, "drill")
    assert begun_s + 1.0 < notice.deadline_s <= on.backend.now_s() + 2.0
    assert on.wait(NodeLost).node_id == a
    assert on.backend.now_s() >= notice.deadline_s
    on.backend.execute(RequestNodes("spot", 2, "more"))
    assert "drills took 1 of its 3 nodes, 2 nodes in use" in on.wait(RequestFailed).reason


def test_kill_add_and_stop_through_the_inbox(stage: Make) -> None:
    on = stage()
    a, b = stepping(on, 2)
    on.wait(StepDone)
    storage = on.backend.storage
    storage.put("inbox/1.json", b'{"drill": {"kill": "any"}}')
    assert on.wait(DrillAsked).drill == {"kill": [b]}
    assert on.wait(NodeLost).node_id == b
    storage.put("inbox/2.json", b'{"drill": {"add": "spot"}}')
    assert on.wait(DrillAsked).drill == {"add": "spot"}
    assert on.wait(NodeReady).node.node_id not in (a, b)
    storage.put("inbox/3.json", b'{"drill": {"kill": "rank:7"}}')
    assert "no rank 7" in on.wait(DrillAsked).drill["error"]
    storage.put("inbox/4.json", b'{"stop": "enough"}')
    assert on.wait(StopAsked).reason == "enough"


def test_a_hang_makes_the_worker_silent(stage: Make) -> None:
    on = stage(job={"drill": [{"at_step": 2, "hang": "rank0"}], "max_silence_s": 2.0})
    (a,) = stepping(on, 1)
    assert on.wait(DrillAsked).drill["hang"] == [a]
    silent = on.wait(Silent)
    assert silent.worker == WorkerId(a, 0)
    assert silent.silent_s < 30.0, "as the job bounds it, on a machine however late"
    on.backend._end([WorkerId(a, 0)])


def test_the_driver_dies_only_when_that_is_written_down(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = stage(job={"drill": [{"at_step": 1, "kill_driver": True}]})
    killed: list[Any] = []
    monkeypatch.setattr(
        "elastic.cluster.backend.ray_backend.os.kill",
        lambda pid, number: killed.append((pid, number)),
    )
    stepping(on, 1)
    on.wait(DrillAsked)
    assert killed == []
    on.backend.poll(on.backend.now_s())
    assert killed == [(os.getpid(), signal.SIGKILL)]
    on.backend.drilling.die = False


def test_a_node_that_ray_drains_has_a_notice(stage: Make, cluster: LocalCluster) -> None:
    labels = {"elastic-node": "leaving", "elastic-pool": "leaving"}
    ray_id = cluster.add(NodeOrder("leaving", 2, labels)).result(180)["ray_id"]
    on = stage(embedded=False, pools=(replace(POOL, name="leaving"),))
    on.backend.execute(Prepare(on.wait(NodeReady).node.node_id))
    on.wait(NodePrepared)
    at_s = on.backend.now_s() + 60
    assert _ray_private.drain(ray_id, at_s, "a test")
    notice = on.wait(Notice)
    assert notice.node_id == "leaving"
    assert abs(notice.deadline_s - at_s) < 0.1
