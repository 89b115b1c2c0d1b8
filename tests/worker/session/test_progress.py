"""A worker says that it makes progress with what has no steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.types import Progress, WorkerId
from elastic.worker.session import session as module
from elastic.worker.session.session import Session


@pytest.mark.parametrize(
    ("phase", "local_rank", "rank", "told"),
    [
        ("preparing", 0, None, True),
        ("preparing", 1, None, False),
        ("evaluating", 1, 0, True),
        ("evaluating", 0, 1, False),
        ("finishing", 0, 0, True),
        ("stepping", 0, 0, False),
        ("loading", 0, 0, True),
        ("loading", 1, 1, True),
        ("loading", 1, None, False),
    ],
)
def test_once_a_minute_by_one_of_them(
    phase: str, local_rank: int, rank: int | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = SimpleNamespace(now_s=1000.0), list[Any]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    session: Any = Session.__new__(Session)
    session.me, session._phase, session._progress, session._told_s, session._put = (
        WorkerId("a", local_rank),
        "",
        0,
        0.0,
        said.append,
    )
    session._generation = None if rank is None else SimpleNamespace(number=3, rank=rank)
    for _ in range(130):
        session._at_phase(phase, 5)
        clock.now_s += 1.0
    assert session._progress == 130
    assert said == [Progress(session.me, 0 if rank is None else 3, phase)] * (2 * told)
