"""What a worker still says whose node was lost a moment before: in the same round, from an answer that was here already."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.admission import Entrance
from elastic.cluster.backend import RayBackend
from elastic.cluster.crew import Answer, Broken
from elastic.cluster.missing import Arrived
from elastic.cluster.silence import Silence
from elastic.types import Event, Node, NodeLost, NodePrepared, WorkerFailed, WorkerId
from elastic.worker.gather import Gather
from elastic.worker.standing import Doing


@dataclass
class Beat:
    generation: int = 0
    phase: str = "idle"
    progress: int = 0
    said: tuple[str, ...] = ()
    arrived: Arrived = ()
    doing: Doing = ""
    where: str = ""


@pytest.mark.parametrize("lost", [True, False])
def test_a_prepared_worker_of_a_lost_node_is_no_news(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here, gone = WorkerId("n1", 0), WorkerId("n1", 1)
    backend: Any = object.__new__(RayBackend)
    backend.nodes = {"n1": Node("n1", "spot", 1, "ready")}
    backend.silence, backend.show, backend.run = Silence(1.0), None, SimpleNamespace(plans=(), step=0)
    backend.gather = Gather(lambda parts: None, backend._workers_of)
    backend.entrance = Entrance(SimpleNamespace())  # type: ignore[arg-type]

    def broke(broken: Broken) -> list[Event]:
        if lost:
            del backend.nodes["n1"]
        return [WorkerFailed(broken.worker, 0, "process", broken.error), *([NodeLost("n1", "gone")] if lost else [])]

    monkeypatch.setattr(backend, "_broke", broke)
    heard = [
        event
        for said in (Broken(gone, "process", "its process is gone"), Answer(here, Beat(), (NodePrepared("n1", (7,)),)))
        for event in (backend._heard(said) if isinstance(said, Answer) else backend._broke(said))
    ]
    assert [type(event) for event in heard] == [WorkerFailed, NodeLost if lost else NodePrepared]
