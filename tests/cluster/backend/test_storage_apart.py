"""A run's storage on a cluster of several hosts: a folder that is each host's own is found out
before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cluster.far_session import DISK
from support.cluster.stage import POOL, Stage, wait_gone

from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.errors import SpecError
from elastic.types import APART, NodePrepared, NodeReady, NodeRefused, Prepare, Stop, WorkerId

pytestmark = pytest.mark.e2e
Make = Callable[..., Stage]
FAR = "support.cluster.far_session:FarSession"


@pytest.fixture(scope="module", autouse=True)
def two_hosts(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nodes that somebody else started: one on the driver's host, one with a disk of its own."""
    for name, environment in (("near", {}), ("far", {DISK: str(tmp_path_factory.mktemp("disk"))})):
        labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
        cluster.add(NodeOrder(name, 2, labels, environment=environment)).result(180)


def test_a_folder_of_each_host_is_refused(stage: Make, tmp_path: Path) -> None:
    on = stage(embedded=False, pools=(POOL,), session=FAR)
    assert {on.wait(NodeReady).node.node_id for _ in range(2)} == {"near", "far"}
    on.backend.execute(Prepare("near"))
    assert on.wait(NodePrepared).node_id == "near"
    on.backend.execute(Prepare("far"))
    refused = on.wait(NodeRefused)
    assert refused.node_id == "far" and refused.reason.startswith(
        f"{APART}: a file that the driver has written is not there"
    )
    on.backend.execute(Stop("stopped", "enough"))
    assert not [file for file in tmp_path.rglob("admission/*") if file.is_file()]


# the shell's part: tests/cluster/workers/test_admission_links.py
@pytest.mark.whole
def test_a_run_whose_first_node_is_elsewhere_is_refused(stage: Make) -> None:
    on = stage(embedded=False, pools=(POOL,), session=FAR)
    for _ in range(2):
        on.wait(NodeReady)
    on.backend.execute(Prepare("far"))
    with pytest.raises(
        SpecError,
        match=f"^node far: {APART}: .*; give `storage` a folder that all nodes share and may write",
    ):
        on.wait(NodePrepared)
    pids = [on.backend.worker_group.pid(WorkerId("far", gpu)) for gpu in range(2)]
    on.backend.close()
    wait_gone(pids, 60.0)
