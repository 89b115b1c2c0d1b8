"""An abort that comes between the last sum of an entry and the first batch."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.types import Abort, Job, Layout, Plan, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process_groups.groups import Groups
from elastic.worker.session import generation as module
from elastic.worker.session.generation import Generation
from elastic.worker.session.session import Session

ME = WorkerId("a", 0)


@pytest.fixture
def session() -> Any:
    """Without its thread."""
    found: Any = Session.__new__(Session)
    found._lock, found._orders, found._aborted = threading.Condition(), [], 0
    found._thread, found._stood, found._ahead = threading.main_thread(), (0, ""), None
    return found


def test_who_begins_to_read_meanwhile_does_not_wait_for_a_batch(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader_of(stepper: Any) -> Any:
        session.order(WorkerOrder(Abort(1)))
        return SimpleNamespace(ready=lambda step: False, close=lambda wait_s: None)

    def begins(step: int) -> Any:
        pytest.fail("it takes its first batch, and nothing would free it")

    monkeypatch.setattr(module, "SdcCheck", lambda *_, **__: None)
    entered: Any = Generation.__new__(Generation)
    entered.plan, entered.rank = Plan(1, Layout(), (ME,), (12,), (4,)), 0
    entered.groups, entered.loader = Groups(1, Layout(), torch.device("cpu")), None
    entered.state, entered.copies = SimpleNamespace(step=0), SimpleNamespace()
    entered._built = SimpleNamespace(
        loss_scale=SimpleNamespace(on=False), read_by=lambda dataset: None
    )
    entered.place = SimpleNamespace(
        job=Job(steps=4), dataset=None, script=None, program=SimpleNamespace(log=None),
        extra=SimpleNamespace(objects={}), faults=None, good_step=0, validation=None,
    )  # fmt: skip
    entered._loader_of, entered.profile = loader_of, SimpleNamespace(step=begins)
    session._generation = entered
    try:
        with pytest.raises(ConnectionAbortedError, match="generation 1 was aborted"):
            entered.run()
    finally:
        entered.groups.close()
