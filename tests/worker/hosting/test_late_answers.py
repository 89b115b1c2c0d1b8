"""What a worker still says whose node was lost a moment before: in the same round, from an answer
that was here already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.worker.beats import beat_of

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.workers.admission_links import Entrance
from elastic.cluster.workers.worker_group import BrokenWorker, PollAnswer
from elastic.types import (
    Event,
    Job,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    Plan,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.hosting.aggregate import Gather
from elastic.worker.hosting.liveness import Liveness, patience_s
from elastic.worker.hosting.rendezvous_stores import RendezvousStores


@pytest.mark.parametrize(
    ("job", "step_s", "least_s"),
    [
        ({}, 0.1, 60.0),
        ({}, 10.0, 200.0),
        ({"compile": True}, 0.1, 360.0),
        ({"max_silence_s": 500.0}, 0.1, 560.0),
    ],
)
def test_gloo_gives_up_behind_all_that_ranks_may_wait(
    job: dict[str, Any], step_s: float, least_s: float
) -> None:
    """A worker that joins and compiles for minutes does not break the commit that the others stand
    in."""
    liveness = Liveness(0.5, job.get("max_silence_s"), patience_s(Job.from_plain(job)))
    nobody: Any = None
    stores = RendezvousStores(SimpleNamespace(address=lambda: "127.0.0.1"), nobody, liveness)  # type: ignore[arg-type]
    worker = WorkerId("n1", 0)
    plan = Plan(3, Layout(), (worker,), (4,), (4,), predicted_step_time_s=step_s)
    order = stores.host(plan)
    liveness.stepped(3, step_s)
    assert order.timeout_s == least_s > liveness.missing_bound_s(3, False)


@pytest.mark.parametrize("lost", [True, False])
def test_a_prepared_worker_of_a_lost_node_is_no_news(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, gone = WorkerId("n1", 0), WorkerId("n1", 1)
    backend: Any = object.__new__(RayBackend)
    backend.nodes = {"n1": Node("n1", "spot", 1, "ready")}
    backend.liveness, backend.show = Liveness(1.0), None
    backend.before = SimpleNamespace(is_known=lambda message: False)
    backend.gather = Gather(lambda parts: None, backend._workers_of)
    backend.entrance = Entrance(SimpleNamespace())  # type: ignore[arg-type]

    def broke(broken: BrokenWorker) -> list[Event]:
        if lost:
            del backend.nodes["n1"]
        return [
            WorkerFailed(broken.worker, 0, "process", broken.error),
            *([NodeLost("n1", "gone")] if lost else []),
        ]

    monkeypatch.setattr(backend, "_broke", broke)
    heard = [
        event
        for said in (
            BrokenWorker(gone, "process", "its process is gone"),
            PollAnswer(here, beat_of(0, "idle"), (NodePrepared("n1", (7,)),)),
        )
        for event in (
            backend._heard(said) if isinstance(said, PollAnswer) else backend._broke(said)
        )
    ]
    assert [type(event) for event in heard] == [WorkerFailed, NodeLost if lost else NodePrepared]
