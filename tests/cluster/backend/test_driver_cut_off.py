"""What the driver makes of workers that do not answer while its own host is cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend import ray_backend
from elastic.cluster.backend.ray_backend import RayBackend
from elastic.types import Event, Layout, NodesMute, Plan, Silent, WorkerFailed, WorkerId
from elastic.worker.hosting.inbox import InboxOrders
from elastic.worker.hosting.liveness import Liveness
from elastic.worker.process.beat import Beat

RANKS = (WorkerId("a", 0), WorkerId("b", 0))
MUTE = NodesMute(2, 3.0)


class Deaf(RayBackend):
    """Its two workers have answered at 0 s, and do not answer any more."""

    def __init__(self) -> None:
        quiet: Any = SimpleNamespace
        self.suspected: list[str] = []
        self.survey = quiet(
            liveness_known=True, news=lambda now_s: [MUTE], draining={}, suspect=lambda ids: None
        )
        self.liveness, self.nodes = Liveness(0.5), {}
        self._plan = Plan(3, Layout(dp_shard=2), RANKS, (4, 4), (4,))
        self.inbox = quiet(take=InboxOrders)
        self.entrance = quiet(settled=lambda nodes, at_s: ([], []))
        self.gather = quiet(late=lambda at_s: [])
        self.drilling: Any = quiet(pass_deadlines=lambda now_s: None)
        self.cloud_feed: Any = quiet(news=lambda *_, now_s: [])
        for worker in RANKS:
            self.liveness.called(worker)
            self.liveness.answered(worker, Beat((), 3, "stepping", 7, 0, 1))
            self.liveness.called(worker)

    def now_s(self) -> float:
        return 0.0

    def _suspect(self, nodes: Any) -> None:
        self.suspected += nodes


def heard(backend: Deaf, patch: pytest.MonkeyPatch, until_s: float) -> list[Event]:
    found = []
    for quarter in range(int(until_s * 4)):
        patch.setattr(ray_backend, "time", SimpleNamespace(monotonic=lambda q=quarter: q / 4))
        found += backend._look()
    return [event for event in found if event != MUTE]


def test_nobody_is_silent_and_nothing_is_stuck_while_no_other_host_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Deaf()
    backend.survey.liveness_known = False  # type: ignore[misc]
    assert heard(backend, monkeypatch, 1000.0) == []
    assert backend._look()[0] == MUTE


def test_where_it_counts_both_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Deaf()
    found = heard(backend, monkeypatch, 1000.0)
    assert {event.worker for event in found if isinstance(event, Silent)} == set(RANKS)
    assert not [event for event in found if isinstance(event, WorkerFailed)]
    assert set(backend.suspected) == {"a", "b"}
