"""Threads that follow something as long as the driver lives continue after what nobody thought
of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.cluster.backend.drills import Schedule
from elastic.cluster.nodes import survey as nodes_survey
from elastic.cluster.nodes.survey import Survey
from elastic.cluster.notices import notice_watchers
from elastic.cluster.notices.notice_watchers import NoticeWatchers
from elastic.cluster.notices.sources.detect import Sources
from elastic.cluster.notices.sources.watch import Watch
from elastic.cluster.prices import market
from elastic.cluster.prices.market import Market, Ticker
from elastic.types import Pool
from elastic.worker.hosting.thread_boundary import ThreadBoundary


class Odd(Exception):
    """Not one of the package's, nor of Ray's or Python's."""


class Raises:
    """Raises each time; `again` is set at the third."""

    def __init__(self) -> None:
        self.n, self.again = 0, threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.n += 1
        if self.n == 3:
            self.again.set()
        raise Odd("of another kind")


def ticker(raises: Raises, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(Market, "look", raises)
    patch.setattr(market, "is_looked_up", lambda pool: True)
    return Ticker([Pool("spot")], refresh_s=0.01).close


def notices(raises: Raises, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(notice_watchers, "AGAIN_S", 0.01)
    patch.setattr(NoticeWatchers, "_place", raises)
    return NoticeWatchers().close


def survey(raises: Raises, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    place = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "own")
    # else Ray would be started, and each later test of this process be on a cluster
    patch.setattr(nodes_survey.ray, "get_runtime_context", lambda: place)
    patch.setattr(nodes_survey, "living", list)
    patch.setattr(Survey, "_look", lambda self: None)
    patch.setattr(nodes_survey, "PROBE_S", 0.01)
    patch.setattr(Survey, "_probe", raises)
    return Survey().close


def watch(raises: Raises, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return Watch(
        lambda: Sources((SimpleNamespace(name="odd", every_s=0.01, read=raises, greet=raises),))
    ).close


@pytest.mark.parametrize("thread", [ticker, notices, survey, watch])
def test_a_thread_goes_on(
    thread: Callable[..., Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    raises = Raises()
    close = thread(raises, monkeypatch)
    try:
        assert raises.again.wait(30), "the thread has ended"
    finally:
        close()


def test_the_same_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    boundary, raises = ThreadBoundary(logging.getLogger("test"), "looking"), Raises()
    assert [boundary.holds(raises) for _ in range(3)] == [False] * 3
    assert boundary.holds(lambda: None)
    assert [record.message for record in caplog.records] == [
        "looking: Odd: of another kind; retried"
    ]


def test_an_order_to_add_a_node_of_no_pool_is_refused() -> None:
    drilling = DrillRunner(Schedule((), None), None, None, {}, [Pool("spot")])  # type: ignore[arg-type]
    (asked,) = drilling.carry_out({"add": "spto"}, None, 0.0)
    assert asked.drill == {"add": "spto", "error": "drill: there is no pool 'spto'"}
