"""What Ray says of a worker that is gone, in the driver's words."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayError

from elastic.cluster.actors import WorkerSetup
from elastic.cluster.crew import Broken, Crew, _Member
from elastic.types import WorkerId

ME = WorkerId("spot-1", 0)


def crew_whose_poll_raises(error: RayError, monkeypatch: pytest.MonkeyPatch) -> Crew:
    def raises(ref: Any) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", raises)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    crew = Crew(WorkerSetup(ME, 1, "spot", {}, "", 1), "test", local=True)
    crew._members[ME] = _Member(actor=None, ray_id="", incarnation=1, poll="the poll", pid=4711)
    return crew


def test_the_memory_monitor_takes_a_worker_not_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    report = OutOfMemoryError("Task was killed due to the node running low on memory.\nTop 10 memory users: ...")
    crew = crew_whose_poll_raises(report, monkeypatch)
    (broken,) = crew.collect(0.0)
    assert broken == Broken(
        ME, "process", "its process is gone: Ray's memory monitor killed it, since the host's memory was nearly used up", 4711
    )
    assert crew.workers() == []


def test_a_dead_node_is_a_worker_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crew_whose_poll_raises(NodeDiedError("the node of the actor died"), monkeypatch)
    (broken,) = crew.collect(0.0)
    assert isinstance(broken, Broken) and broken.kind == "process" and "the node of the actor died" in broken.error


def test_a_connection_that_may_come_back_says_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = crew_whose_poll_raises(ActorUnavailableError("unavailable", actor_id=None), monkeypatch)
    assert crew.collect(0.0) == [] and crew.workers() == [ME]
