"""One GPU of a node fails in the middle of a run, by a made-up CUDA error: the run goes on without the node."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import (
    events,
    job,
    lost_only_what_no_copy_had,
    plans,
    run,
    survivors_kept_their_processes,
    went_on_as_if_nothing_happened,
)

from elastic.cluster.local import LocalCluster
from elastic.sim.replay import replay
from elastic.types import DrillAsked, Quarantine, WorkerFailed

pytestmark = pytest.mark.e2e
STEPS = 40


def test_a_device_that_fails_is_left_behind_and_its_node_quarantined(embedded: LocalCluster, tmp_path: Path) -> None:
    drill = [{"at_step": 12, "device_error": "rank:3", "gpu": 1, "place": "backward"}]
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 2, "usd_per_node_h": 1.0, "max_nodes": 2}]
    summary, lines = run(job(tmp_path, STEPS, drill, pools=pools, layout={4: "dp_shard=4", 2: "dp_shard=2"}), on=embedded)
    went_on_as_if_nothing_happened(summary, lines, STEPS)
    (asked,) = [e.drill["device_error"] for e in events(lines, DrillAsked)]
    (failed,) = [e for e in events(lines, WorkerFailed) if e.kind == "device"]
    assert [failed.worker.node_id] == asked and failed.step >= 12
    loss = next(t for t in summary["transitions"] if t["cause"] == "loss")
    lost_only_what_no_copy_had(loss, lines)
    assert loss["pause_s"] < 30, "that of the group's own timeout"
    after = next(plan for plan in plans(lines) if plan.generation == loss["generation"])
    assert asked[0] not in after.nodes and after.layout.world_size == 2
    (aside,) = [a for line in lines if line.decision for a in line.decision.actions if isinstance(a, Quarantine)]
    assert [aside.node_id] == asked and "uncorrectable ECC error" in aside.reason
    survivors_kept_their_processes(lines, set(asked))
    assert replay(lines).identical
