"""The Backend on real Ray nodes, with a session that needs no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest
from support.cluster.stage import Stage, plan, wait_gone

from elastic.cluster.nodes import survey
from elastic.cluster.workers import admission_links, worker_group
from elastic.types import (
    Abort,
    EnterPlan,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    PlanEntered,
    Prepare,
    Quiesce,
    Quiesced,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Silent,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)  # fmt: skip
from elastic.worker.hosting.liveness import GAP_MOST_S

pytestmark = pytest.mark.e2e
Make = Callable[..., Stage]


def test_from_request_to_step_to_quiesce(
    stage: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = stage(job={"prints": True}, logs=str(tmp_path / "logs"))
    told: list[str] = []
    on.backend.show = told.append
    a, b = on.nodes(2)
    workers = [WorkerId(a, 0), WorkerId(b, 0)]
    on.backend.execute(EnterPlan(plan(1, workers)))
    assert on.wait(PlanEntered).generation == 1
    assert on.wait(StepDone).step == 1
    on.backend.execute(Quiesce(1, save=False))
    assert {on.wait(Quiesced).worker for _ in workers} == set(workers)
    assert (
        told
        and told[0] == "[rank 0] printed in step 1 by 0"
        and not any("by 1" in line for line in told)
    )
    files = [
        tmp_path / "logs" / f"{worker.node_id}-0-{on.backend.worker_group.pid(worker)}.log"
        for worker in workers
    ]
    assert set(files) == set((tmp_path / "logs").glob("*.log*"))
    assert all(
        f"generation 1 after step 0: rank {rank} of 2" in file.read_text()
        for rank, file in enumerate(files)
    )
    monkeypatch.setattr(worker_group, "SENT_EACH_MOST", 0)  # as it goes to many workers
    on.backend.execute(EnterPlan(plan(2, workers[:1])))
    assert on.wait(PlanEntered).generation == 2
    on.backend.execute(ReleaseNode(b))
    lost = on.wait(NodeLost)
    assert (lost.node_id, lost.cause) == (b, "released")


def test_capacity(stage: Make) -> None:
    on = stage()
    on.backend.execute(RequestNodes("spot", 4, "r1"))
    on.backend.execute(RequestNodes("spot", 4, "r1"))  # counts once
    failed = on.wait(RequestFailed)
    assert failed.request_id == "r1"
    assert failed.reason == "no capacity: 3 of 3 in use"
    ready = {on.wait(NodeReady).node.node_id for _ in range(3)}
    assert ready == {"spot-1", "spot-2", "spot-3"}
    assert not [
        e
        for e in on.backend.poll(on.backend.now_s() + 0.5)
        if isinstance(e, NodeReady | RequestFailed)
    ]


def test_a_killed_node_is_lost_before_ray_says_so(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = stage()
    a, b = on.nodes(2)
    on.backend.execute(EnterPlan(plan(1, [WorkerId(a, 0), WorkerId(b, 0)])))
    on.wait(StepDone)
    monkeypatch.setattr(survey, "SURVEY_S", 1e6)  # what Ray lists is not looked at any more
    on.backend.cluster.kill(b)
    failed = on.wait(lambda e: isinstance(e, WorkerFailed) and e.worker.node_id == b)
    lost = on.wait(NodeLost)
    assert failed.kind == "process"
    assert (lost.node_id, lost.cause) == (b, "raylet unreachable")
    on.wait(StepDone)  # the other continues


# which neighbors are asked, and when one is believed: tests/cluster/workers/test_admission_links.py
@pytest.mark.whole
def test_a_newcomer_is_not_refused_for_a_neighbor_that_dies(stage: Make) -> None:
    on = stage(job={"unreached": {"spot-2": "spot-1"}})
    (neighbor,) = on.nodes(1)
    on.backend.execute(RequestNodes("spot", 1, "another"))
    newcomer = on.wait(NodeReady).node.node_id
    on.backend.cluster.kill(neighbor)
    on.backend.execute(Prepare(newcomer))
    assert on.wait(lambda e: isinstance(e, NodePrepared | NodeRefused)) == NodePrepared(
        newcomer, ANY
    )
    assert (neighbor, newcomer) == ("spot-1", "spot-2")


def test_a_newcomer_that_does_not_reach_a_living_neighbor_is_refused(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_links, "DOUBT_S", 0.5)
    on = stage(job={"unreached": {"spot-2": "spot-1"}})
    on.nodes(1)
    on.backend.execute(RequestNodes("spot", 1, "another"))
    on.backend.execute(Prepare(on.wait(NodeReady).node.node_id))
    refused = on.wait(lambda e: isinstance(e, NodePrepared | NodeRefused))
    assert refused == NodeRefused(
        "spot-2", "spot-1 cannot be reached", "spot", neighbors=("spot-1",)
    )


def test_a_killed_process_is_replaced_on_its_node(stage: Make) -> None:
    on = stage()
    (a,) = on.nodes(1)
    pid = on.backend.worker_group.pid(WorkerId(a, 0))
    os.kill(pid, signal.SIGKILL)
    failed = on.wait(lambda e: isinstance(e, WorkerFailed | Silent))
    assert isinstance(failed, WorkerFailed) and failed.kind == "process"
    on.backend.execute(Prepare(a))
    again = on.wait(lambda e: isinstance(e, NodePrepared | NodeLost))
    assert isinstance(again, NodePrepared)
    assert again.pids[0] not in (0, pid)


def test_a_stopped_process_is_silent_once_and_can_be_killed(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = stage()
    a, b = on.nodes(2)
    here, there = WorkerId(a, 0), WorkerId(b, 0)
    on.backend.execute(EnterPlan(plan(1, [there])))
    on.wait(StepDone)
    pid = on.backend.worker_group.pid(there)
    liveness, look = on.backend.liveness, on.backend.liveness.look
    # in force at each look: 1 s on a machine at rest (test_liveness.py), more where it is late
    bounds: list[float] = []

    def recorded(now_s: float) -> list[Silent]:
        found: list[Silent] = look(now_s)
        bounds.append(liveness.wait_s + liveness.bound_s("stepping", 1))
        return found

    monkeypatch.setattr(liveness, "look", recorded)
    os.kill(pid, signal.SIGSTOP)
    silent = on.wait(Silent)
    assert (silent.worker, silent.generation, silent.phase) == (there, 1, "stepping")
    assert (
        min(bounds) < silent.silent_s + 0.01 and silent.silent_s < max(bounds) + GAP_MOST_S + 0.01
    )
    assert min(bounds) >= 1.5, "half a second for the call, and one"
    on.backend.execute(Abort(1, kill=(there,)))
    assert on.wait(Quiesced).worker == here
    wait_gone([pid])
    assert not [
        e for e in on.backend.poll(on.backend.now_s() + 0.5) if isinstance(e, Silent | NodeLost)
    ]
    on.backend.execute(Prepare(b))
    assert on.wait(NodePrepared).node_id == b


def test_an_order_for_a_worker_that_is_not_there_fails(stage: Make) -> None:
    on = stage()
    on.backend.execute(EnterPlan(plan(3, [WorkerId("nowhere", 0)])))
    failed = on.wait(WorkerFailed)
    assert (failed.kind, failed.generation) == ("process", 3)
    on.backend.execute(Prepare("nowhere"))
    assert on.wait(NodeLost).node_id == "nowhere"


def test_what_the_program_raises_arrives(stage: Make) -> None:
    on = stage(job={"prepare_raises": True})
    on.backend.execute(RequestNodes("spot", 1, "r"))
    on.backend.execute(Prepare(on.wait(NodeReady).node.node_id))
    failed = on.wait(WorkerFailed)
    assert (failed.kind, failed.error) == ("program", "ValueError: the program is wrong")


def test_a_session_that_cannot_be_imported_is_a_failed_process(stage: Make) -> None:
    on = stage(python_path=())
    on.backend.execute(RequestNodes("spot", 1, "r"))
    on.backend.execute(Prepare(on.wait(NodeReady).node.node_id))
    failed = on.wait(WorkerFailed)
    assert failed.kind == "process"
    assert "No module named 'support'" in failed.error


def test_after_stop_there_is_nothing(stage: Make) -> None:
    on = stage()
    (a,) = on.nodes(1)
    pid = on.backend.worker_group.pid(WorkerId(a, 0))
    on.backend.execute(Stop("succeeded", "done"))
    assert on.backend.poll(None) == []
    wait_gone([pid])
