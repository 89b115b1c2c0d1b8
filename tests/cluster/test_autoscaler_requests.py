"""When a request to the autoscaler counts as failed, and how nodes are given back. No Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import until

from elastic.cluster import _ray_private, autoscaler
from elastic.cluster.autoscaler import AutoscalerNodes
from elastic.cluster.watcher import Drains, Report
from elastic.types import Pool, RequestFailed

SPOT = Pool("spot", market_type="spot", max_nodes=2)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(autoscaler, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def nodes_of(reports: dict[str, Report]) -> AutoscalerNodes:
    desk: Any = SimpleNamespace(heard=lambda: (reports["now"], True), tell=lambda *told: None)
    return AutoscalerNodes((SPOT,), desk=desk)


def test_an_instance_that_is_replaced_gives_the_next_one_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The autoscaler ends one on which Ray does not start, after minutes, and launches another: no drought."""
    clock, reports = Clock(monkeypatch), {"now": Report()}
    nodes = nodes_of(reports)
    nodes.request("spot", 1, "r1")
    for at_s, coming in ((1005, 1), (1190, 1), (1191, 0), (1195, 0), (1200, 1), (1400, 1)):
        clock.now_s, reports["now"] = float(at_s), Report(coming={"spot": coming})
        assert nodes.news({}) == [], at_s
    clock.now_s, reports["now"] = 1600.0, Report()
    (failed,) = nodes.news({})
    assert isinstance(failed, RequestFailed) and failed.reason == "no capacity: no answer within 180 s"


def test_one_that_never_joins_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reports = Clock(monkeypatch), {"now": Report(coming={"spot": 1})}
    nodes = nodes_of(reports)
    nodes.request("spot", 1, "r1")
    clock.now_s += 839
    assert nodes.news({}) == []
    clock.now_s += 2
    (failed,) = nodes.news({})
    assert isinstance(failed, RequestFailed) and failed.reason == "1 of its nodes did not join within 840 s"


def test_a_machine_that_nobody_reaches_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, asked = threading.Event(), list[str]()

    def end_when_idle(ray_id: str, why: str) -> bool:
        asked.append(ray_id)
        return ray_id != "dead" or reached.wait(60)

    monkeypatch.setattr(_ray_private, "end_when_idle", end_when_idle)
    drains = Drains()
    try:
        for ray_id in ("dead", "idle", "dead"):
            drains.end(ray_id)
        until(lambda: "idle" in asked, "the other node")
        assert sorted(asked) == ["dead", "idle"], "and the dead one is asked once at a time"
    finally:
        reached.set()
