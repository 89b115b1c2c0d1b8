"""A driver that attaches learns from the workers what no storage has taken; one without storage
asks them for others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.cluster.stage import FAKE, plan

from elastic.cluster.backend.attach import Attached
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.ray import processes
from elastic.cluster.workers.worker_actor import Worker, WorkerSetup
from elastic.cluster.workers.worker_group import WorkerGroup, _Member
from elastic.errors import SpecError
from elastic.types import EnterPlan, StepDone, WorkerId
from elastic.types.orders import WorkerOrder

A, B = WorkerId("a", 0), WorkerId("b", 0)


class Refused(ray.exceptions.RayError, SpecError):
    """As Ray raises it."""


class Actor:
    """Calls of a worker's shell as Ray makes them; `mute`: it does not answer."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.mute = worker, False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: lambda: getattr(self.worker, method)(*given))


@pytest.fixture
def two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[WorkerGroup, dict[WorkerId, Worker]]:
    """A worker group of epoch 2 over two workers: of epoch 1, which gave both generation 3, and the first 4
    and 5."""
    monkeypatch.setattr(processes, "stand_back", lambda: False)

    def get(ref: Any) -> Any:
        try:
            return ref()
        except SpecError as error:
            raise Refused(str(error)) from error

    monkeypatch.setattr(ray, "wait", lambda refs, **options: (list(refs), []))
    monkeypatch.setattr(ray, "get", get)
    worker_group = WorkerGroup(WorkerSetup(A, 1, "spot", {}, "", 2), "test", local=False)
    workers = {
        me: Worker(WorkerSetup(me, 1, "spot", {"folder": ""}, str(tmp_path), 1, FAKE))
        for me in (A, B)
    }
    for me, worker in workers.items():
        worker.session = SimpleNamespace(order=lambda order: None)
        for generation in (3, 4, 5) if me == A else (3,):
            worker.order(1, WorkerOrder(EnterPlan(plan(generation, [A, B]))))
        worker_group._join(me, _Member(Actor(worker), "", 1, generation=worker.ordered))
    return worker_group, workers


def test_plans_that_are_not_written_down_are_found_and_steps_of_theirs_are_news(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_group, _ = two
    assert [p.generation for p in worker_group.plans_after(3)] == [
        4,
        5,
    ] and worker_group.plans_after(5) == ()
    monkeypatch.setattr(WorkerGroup, "adopt", lambda self, keep: [])
    before = Attached(
        RayRun("r", "u", {}, (), 2, attach=True, plans=(plan(3, [A, B]),), step=20),
        worker_group,
        outlives=True,
    )
    assert [p.generation for p in before.plans] == [3, 4, 5] and [
        p.generation for p in before.found
    ] == [4, 5]
    assert before.is_known(StepDone(3, 20, 1.0, 1, 0.1)) and not before.is_known(
        StepDone(4, 19, 1.0, 1, 0.1)
    )
    assert [event.worker for event in before.missed("c")] == []  # type: ignore[attr-defined]
    worker_group.forget(B)
    assert [event.worker for event in before.missed("b")] == [B]  # type: ignore[attr-defined]


def test_workers_say_whether_another_driver_has_attached(two: Any) -> None:
    worker_group, workers = two
    assert worker_group.replaced() == ""
    workers[B].worker_info(3)
    assert "replaced by that of epoch 3" in worker_group.replaced()
