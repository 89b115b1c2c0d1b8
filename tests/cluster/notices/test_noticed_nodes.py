"""A notice on a metadata server leads a run on a real Ray cluster away from the node, and training
continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from support.cluster.metadata_server import MetadataServer
from support.e2e.runs import POOLS, events, job, went_on_as_if_nothing_happened
from support.places import ROOT

from elastic import api
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder
from elastic.cluster.ray import _ray_private
from elastic.ledger.journal import read
from elastic.types import DrainNode, NodeWarned, Notice, StepDone

pytestmark = pytest.mark.whole
STEPS, AT_STEP, IN_S = 60, 10, 14
ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"


@pytest.fixture(scope="module")
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as started:
        yield started


@pytest.fixture(scope="module")
def address(server: MetadataServer) -> Iterator[str]:
    """A Ray cluster that somebody else started: two spot instances of one worker, each with
    metadata of its own."""
    with LocalCluster((str(ROOT),)) as made:
        started = []
        for name in ("x", "y"):
            server.node(name)
            labels = {"elastic-node": name, "elastic-pool": "spot", "ray.io/market-type": "spot"}
            started.append(
                made.add(NodeOrder(name, 1, labels, environment={ENDPOINT: server.endpoint(name)}))
            )
        for answer in started:
            answer.result(180)
        with made.introduced():
            yield made.address


def test_the_node_is_left_and_training_goes_on(
    server: MetadataServer, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job(tmp_path / "job", STEPS, [], pools=[{**POOLS[0], "gpus_per_node": 1}])
    journal = tmp_path / "job" / "runs" / "noticed" / "journal.jsonl"
    told: dict[str, Any] = {}
    drained: list[tuple[str, bool]] = []
    drain = _ray_private.drain

    def record(ray_id: str, deadline_s: float, why: str) -> bool:
        labels = next(node["Labels"] for node in ray.nodes() if node["NodeID"] == ray_id)
        drained.append((labels["elastic-node"], drain(ray_id, deadline_s, why)))
        return drained[-1][1]

    monkeypatch.setattr(_ray_private, "drain", record)
    ended = threading.Event()

    def cloud() -> None:
        """Writes the notice when training is under way."""
        while not ended.wait(0.05):
            lines = read(journal) if journal.is_file() else []
            if any(event.step >= AT_STEP for event in events(lines, StepDone)):
                break
        server.node("y").aws["events/recommendations/rebalance"] = {
            "noticeTime": "2026-01-01T00:00:00Z"
        }
        told["at_s"] = time.time()
        server.interrupt("x", in_s=IN_S)

    thread = threading.Thread(target=cloud)
    thread.start()
    try:
        result = api.run(
            folder, options=api.Options(run_name="noticed", address=address, show=False)
        )
    finally:
        ended.set()
        thread.join()
    lines = read(result.folder / "journal.jsonl")
    went_on_as_if_nothing_happened(result.summary, lines, STEPS)
    at_s, notice = next(
        (at_s, e) for line in lines for at_s, e in line.events if isinstance(e, Notice)
    )
    assert notice.node_id == "x" and notice.origin.startswith(
        "AWS: spot instance-action terminate at "
    )
    assert at_s - told["at_s"] < 30, "a look every second, on a machine under load"
    assert told["at_s"] + IN_S - 3 < notice.deadline_s < told["at_s"] + IN_S + 30
    left = [t for t in result.summary["transitions"] if t["cause"] == "notice"]
    assert len(left) == 1 and left[0]["steps_lost"] == 0 and left[0]["source"] == "live"
    warned = events(lines, NodeWarned)
    assert [(event.node_id, event.risk) for event in warned] == [("y", True)], (
        "a warning, and y stays"
    )
    orders = [
        a
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, DrainNode)
    ]
    assert [order.node_id for order in orders] == ["x"]
    assert drained == [("x", True)], "and in Ray, once it is decided"
