"""The Backend over ranks that cannot be replaced, without any process: what it passes on, and when
it ends them all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.api.tiny_job import MODEL

from elastic.errors import LostContact
from elastic.observe import find_runs
from elastic.storage import open_storage
from elastic.types import (
    Abort,
    DriverStarted,
    Event,
    Layout,
    Node,
    NodePrepared,
    Plan,
    Pool,
    Prepare,
    Quarantine,
    Quiesce,
    RequestFailed,
    RequestNodes,
    StepDone,
    Stop,
    StopAsked,
    StoreCopy,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.hosting.session_processes import Heard
from elastic.worker.process.beat import Beat
from elastic.worker.standalone.process_backend import ProcessBackend, RankLost

WORKERS = [WorkerId("node-0", 0), WorkerId("node-0", 1)]


@dataclass
class Hosted:
    workers: list[WorkerId] = field(default_factory=lambda: list(WORKERS))
    said: list[Heard] = field(default_factory=list)
    orders: list[tuple[WorkerId, Any]] = field(default_factory=list)

    def collect(self, wait_s: float) -> list[Heard]:
        said, self.said = self.said, []
        return said

    def order(self, worker: WorkerId, order: WorkerOrder) -> bool:
        self.orders.append((worker, order.action))
        return True

    def order_all(self, action: Any) -> None:
        self.orders += [(worker, action) for worker in self.workers]

    def living(self) -> list[WorkerId]:
        return self.workers

    def tell(self, worker: WorkerId, *events: Event) -> None:
        said = tuple(enumerate(events, 1))
        self.said.append(Heard(worker, Beat(said, 1, "stepping", 1, 1, 1)))


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """The parameter: when a person started it."""
    hosted, heard = Hosted(), list[Event]()
    lease: Any = SimpleNamespace(lost=False, certain=True, trouble=None, unheard_s=0.0, epoch=3)
    job = {"program": "p", "steps": 4, "global_batch": 4}
    start = DriverStarted("tiny", 3, job, (Pool("ranks", max_nodes=1),), MODEL)
    backend = ProcessBackend(
        hosted,  # type: ignore[arg-type]
        (Node("node-0", "ranks", 2),),
        open_storage(tmp_path),
        lease,
        start,
        heard.append,
        begun_at_s=getattr(request, "param", None),
    )
    yield SimpleNamespace(hosted=hosted, backend=backend, heard=heard, lease=lease)
    backend.close()


def look(on: Any) -> list[Event]:
    return list(on.backend.poll(on.backend.now_s()))


def test_a_node_is_prepared_when_all_its_ranks_are(stage: Any) -> None:
    stage.backend.execute(Prepare("node-0"))
    assert [worker for worker, _ in stage.hosted.orders] == WORKERS
    stage.hosted.tell(WORKERS[0], NodePrepared("node-0", (11,)))
    assert look(stage) == []
    stage.hosted.tell(WORKERS[1], NodePrepared("node-0", (12,)))
    assert look(stage) == [NodePrepared("node-0", (11, 12))] == stage.heard


def test_what_concerns_all_sessions_goes_to_all(stage: Any) -> None:
    for action in (Quiesce(1, save=True), StoreCopy(1), Abort(1)):
        stage.backend.execute(action)
    sent = [action for worker, action in stage.hosted.orders if worker == WORKERS[1]]
    assert sent == [Quiesce(1, save=True), StoreCopy(1), Abort(1)]


def test_a_rank_that_is_gone_is_told_of_and_then_all_end(stage: Any) -> None:
    """And whatever its launcher does to those who are left is no wish to stop."""
    stage.hosted.said.append(Heard(WORKERS[1], None))
    stage.backend.ask_stop("signal SIGTERM")
    (failed,) = look(stage)
    assert isinstance(failed, WorkerFailed) and (failed.worker, failed.kind) == (
        WORKERS[1],
        "process",
    )
    with pytest.raises(RankLost, match="run 'tiny': the process of node-0/1 is gone; all ranks"):
        look(stage)


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Abort(1, (WORKERS[1],)), "node-0/1 does not answer any more"),
        (Quarantine("node-0", "wrong numbers"), "node-0 is quarantined: wrong numbers"),
    ],
)
def test_nobody_is_replaced(action: Any, says: str, stage: Any) -> None:
    stage.backend.execute(action)
    with pytest.raises(RankLost, match=says):
        look(stage)


@pytest.mark.parametrize(("stage", "n"), [(None, 1), (4e9, 0)], indirect=["stage"])
def test_an_order_of_before_a_persons_start_is_not_obeyed(stage: Any, n: int) -> None:
    find_runs.order(stage.backend.storage, {"stop": "of before"})
    assert look(stage) == [StopAsked("of before")] * n


def test_there_are_no_other_nodes(stage: Any) -> None:
    stage.backend.execute(RequestNodes("ranks", 0, "r0"))
    stage.backend.execute(RequestNodes("ranks", 1, "r1"))
    (failed,) = look(stage)
    assert isinstance(failed, RequestFailed) and failed.request_id == "r1"


def test_a_wish_to_stop_comes_from_any_rank_and_through_the_inbox(
    stage: Any, tmp_path: Path
) -> None:
    stage.backend.ask_stop("Ctrl-C")
    stage.hosted.said.append(Heard(WORKERS[1], StopAsked("signal SIGTERM (rank 1)")))
    open_storage(tmp_path).put("inbox/1.json", json.dumps({"stop": "enough"}).encode())
    reasons = [event.reason for event in look(stage) if isinstance(event, StopAsked)]
    assert reasons == ["signal SIGTERM (rank 1)", "Ctrl-C", "enough"]


def test_a_hung_rank_is_silent(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said something once, and then nothing."""
    plan = Plan(1, Layout(dp_shard=2), tuple(WORKERS), (2, 2), (4,))
    stage.backend.gather.expect(plan)
    stage.hosted.tell(WORKERS[0], StepDone(1, 1, 1.0, 4, 0.01))
    stage.hosted.tell(WORKERS[1])
    look(stage)
    seen = stage.backend.liveness._workers[WORKERS[1]]
    assert seen.open, "its next beat is not awaited"


def test_a_run_that_somebody_else_has_taken_is_left(stage: Any) -> None:
    stage.lease.lost = True
    with pytest.raises(LostContact, match=r"its lease \(epoch 3\) was taken over"):
        look(stage)


def test_after_the_end_nothing_is_carried_out(stage: Any) -> None:
    stage.backend.execute(Stop("succeeded", "done"))
    stage.backend.execute(StoreCopy(1))
    assert stage.hosted.orders == [] and look(stage) == []
