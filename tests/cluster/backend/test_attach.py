"""On an existing cluster workers outlive their driver: a new one attaches, an old one is fenced,
and without one they end."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable

import pytest
from support.cluster.stage import POOL, Stage, living, plan, wait_gone

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.errors import LostContact
from elastic.types import (
    EnterPlan,
    NodeLost,
    NodePrepared,
    NodeReady,
    PlanEntered,
    Prepare,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)  # fmt: skip

pytestmark = pytest.mark.e2e
Make = Callable[..., Stage]


@pytest.fixture(scope="module", autouse=True)
def two_nodes(cluster: LocalCluster) -> None:
    """Nodes that somebody else started."""
    for name in ("x", "y"):
        labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
        cluster.add(NodeOrder(name, 2, labels)).result(180)


def prepared(on: Stage) -> list[WorkerId]:
    """All nodes of the cluster, prepared."""
    found = [on.wait(NodeReady).node for _ in range(2)]
    for node in found:
        on.backend.execute(Prepare(node.node_id))
    for _ in found:
        on.wait(NodePrepared)
    return [WorkerId(node.node_id, k) for node in found for k in range(node.gpus)]


def drop(on: Stage) -> None:
    """What any end of the driver but a Stop leaves: nobody polls, nobody ends the actors."""
    on.backend.close()


def test_nodes_that_are_there_are_reported_and_used(stage: Make) -> None:
    on = stage(embedded=False, pools=(POOL,))
    workers = prepared(on)
    assert {str(w) for w in workers} == {"x/0", "x/1", "y/0", "y/1"}
    on.backend.execute(RequestNodes("spot", 1, "r1"))
    assert "all that the cluster has of it are in use (2)" in on.wait(RequestFailed).reason
    on.backend.execute(ReleaseNode("y"))
    assert on.wait(NodeLost).cause == "released"
    assert not [e for e in on.backend.poll(on.backend.now_s() + 1.5) if isinstance(e, NodeReady)]
    on.backend.execute(RequestNodes("spot", 1, "r2"))
    assert on.wait(NodeReady).node.node_id == "y"


def test_a_new_driver_finds_the_workers_and_goes_on(stage: Make) -> None:
    first = stage(embedded=False, pools=(POOL,), name="again")
    workers = prepared(first)
    running = plan(1, workers)
    first.backend.execute(EnterPlan(running))
    first.wait(lambda e: isinstance(e, StepDone) and e.step >= 3)
    pids = [first.backend.worker_group.pid(worker) for worker in workers]
    drop(first)
    second = stage(
        embedded=False, pools=(POOL,), name="again", attach=True, epoch=2, plans=(running,), step=2
    )
    second.wait(NodeReady)
    # those after the last one that was written down, without a gap
    steps = [second.wait(StepDone) for _ in range(8)]
    assert [(e.generation, e.step) for e in steps] == [(1, step) for step in range(3, 11)]
    assert [second.backend.worker_group.pid(worker) for worker in workers] == pids
    second.backend.execute(EnterPlan(plan(2, workers[:2])))
    assert second.wait(PlanEntered).generation == 2
    second.backend.execute(Stop("stopped", "enough"))
    wait_gone(pids)


def test_workers_that_did_not_outlive_the_driver_are_told_at_once(stage: Make) -> None:
    first = stage(embedded=False, pools=(POOL,), name="missed")
    workers = prepared(first)
    running = plan(1, workers)
    first.backend.execute(EnterPlan(running))
    first.wait(StepDone)
    pids = {worker: first.backend.worker_group.pid(worker) for worker in workers}
    drop(first)
    gone = workers[-1]
    os.kill(pids[gone], signal.SIGKILL)
    wait_gone([pids[gone]])
    second = stage(
        embedded=False, pools=(POOL,), name="missed", attach=True, epoch=2, plans=(running,)
    )
    failed = second.wait(lambda e: isinstance(e, WorkerFailed) and e.kind == "process")
    assert (failed.worker, failed.error) == (gone, "it was gone when the driver came back")
    second.backend.execute(Stop("stopped", "enough"))
    wait_gone(list(pids.values()))


class Sign:
    """A lease whose state is the test's."""

    epoch, trouble, lost, certain, unheard_s = 1, None, False, True, 0.0

    def give_up(self) -> None:
        self.lost = True

    def release(self) -> None:
        """There is nothing to release."""


@pytest.mark.parametrize(
    "seen_by", [pytest.param("the lease", marks=pytest.mark.whole), "nobody yet"]
)
def test_a_driver_that_was_replaced_while_storage_was_away_harms_no_worker(
    stage: Make, seen_by: str
) -> None:
    first = stage(embedded=False, pools=(POOL,), name=f"away-{seen_by[:3]}")
    workers = prepared(first)
    first.backend.lease = lease = Sign()
    running = plan(1, workers)
    first.backend.execute(EnterPlan(running))
    first.wait(StepDone)
    lease.certain = False
    assert not first.backend.certain
    pids = [first.backend.worker_group.pid(worker) for worker in workers]
    name, more = first.backend.run.name, {"attach": True, "epoch": 2, "plans": (running,)}
    second = stage(embedded=False, pools=(POOL,), name=name, **more)
    second.wait(NodeReady)
    lease.lost = seen_by == "the lease"
    with pytest.raises(LostContact, match="another one drives the run") as raised:
        first.backend._end(workers) if lease.lost else first.wait(WorkerFailed)
    assert raised.value.exit_code == 4
    first.backend.close()
    second.wait(lambda e: isinstance(e, StepDone) and e.step > 5)
    assert [second.backend.worker_group.pid(worker) for worker in workers] == pids
    second.backend.execute(Stop("stopped", "enough"))
    wait_gone(pids)


def test_without_attach_old_workers_end(stage: Make) -> None:
    first = stage(embedded=False, pools=(POOL,), name="fresh")
    workers = prepared(first)
    pids = [first.backend.worker_group.pid(worker) for worker in workers]
    drop(first)
    stage(embedded=False, pools=(POOL,), name="fresh", epoch=2)
    wait_gone(pids)


def test_the_driver_of_an_older_epoch_is_refused(stage: Make) -> None:
    first = stage(embedded=False, pools=(POOL,), name="fenced")
    workers = prepared(first)
    second = stage(embedded=False, pools=(POOL,), name="fenced", attach=True, epoch=2)
    assert {second.wait(NodePrepared).node_id for _ in range(2)} == {"x", "y"}
    pids = [second.backend.worker_group.pid(worker) for worker in workers]
    with pytest.raises(LostContact, match="driver of epoch 1 has been replaced by that of epoch 2"):
        first.wait(WorkerFailed)
    first.backend.close()
    second.backend.execute(EnterPlan(plan(1, workers)))
    assert isinstance(
        second.wait(lambda event: isinstance(event, StepDone | WorkerFailed)), StepDone
    )
    assert living(pids) == pids


def test_orphans_save_and_end(stage: Make, tmp_path) -> None:
    # what orders are made of: imported later it would outlast the short lease
    torch = "elastic.worker.session.generation"
    importlib.import_module(torch)
    on = stage(
        embedded=False,
        pools=(POOL,),
        job={"orphan_lease_s": 6.0, "slow_quiesce_s": 0.5, "imports": [torch]},
    )
    workers = prepared(on)
    on.backend.execute(EnterPlan(plan(1, workers[:3])))
    on.wait(StepDone)
    pids = [on.backend.worker_group.pid(worker) for worker in workers]
    at = time.monotonic()
    drop(on)
    wait_gone(pids)
    assert time.monotonic() - at > 2.0, "they have waited for a driver"
    # one per local rank at each step that they stopped at
    assert len(list(tmp_path.glob("saved-*"))) >= 2


def test_a_node_that_joins_later_is_reported(stage: Make, cluster: LocalCluster) -> None:
    on = stage(embedded=False, pools=(POOL,))
    assert {on.wait(NodeReady).node.node_id for _ in range(2)} == {"x", "y"}
    cluster.add(NodeOrder("z", 2, {"elastic-node": "z", "elastic-pool": "spot"})).result(180)
    assert on.wait(NodeReady).node.node_id == "z"
    cluster.add(NodeOrder("other", 2, {"elastic-pool": "nobody's"})).result(180)
    cluster.kill("z")
    lost = on.wait(NodeLost)
    # it had no worker whose end would tell
    assert (lost.node_id, lost.cause) == ("z", "Ray lists it as dead")
    assert not [
        e for e in on.backend.poll(on.backend.now_s() + 2.0) if isinstance(e, NodeReady | NodeLost)
    ]


def test_a_drill_kills_a_node_of_the_cluster(stage: Make, cluster: LocalCluster) -> None:
    cluster.add(
        NodeOrder("victim", 2, {"elastic-node": "victim", "elastic-pool": "victims"})
    ).result(180)
    on = stage(
        embedded=False,
        pools=(POOL.__class__("victims", gpus_per_node=2, market_type="spot", max_nodes=1),),
    )
    on.backend.execute(Prepare(on.wait(NodeReady).node.node_id))
    on.wait(NodePrepared)
    on.backend.storage.put("inbox/1.json", b'{"drill": {"kill": "victim"}}')
    assert on.wait(NodeLost).node_id == "victim"
