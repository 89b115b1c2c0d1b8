"""Data-parallel ranks make a new pipeline at the same calls, since its first call has collectives:
also where their batch shares are unequal, and so the rows of their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.types import Layout
from elastic.worker.step import forward_backward
from elastic.worker.step.forward_backward import ForwardBackward

CALLS = (  # kind, rows of the first and of the second data-parallel rank
    ("probe", 4, 4), ("training", 8, 4), ("training", 8, 4), ("evaluation", 8, 4),
    ("probe", 4, 4), ("training", 8, 4), ("training", 6, 4), ("training", 6, 4),
)  # fmt: skip


def test_pipelines_are_new_at_the_same_calls_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(forward_backward, "Pipeline", lambda *a, **k: made.append(k) or len(made))
    monkeypatch.setattr(forward_backward, "carries", lambda program: False)
    shares = SimpleNamespace(samples=lambda step: now)
    ranks: list[Any] = [
        SimpleNamespace(
            groups=SimpleNamespace(pp=object()), shares=shares, state=SimpleNamespace(step=1),
            plan=SimpleNamespace(layout=Layout(pp=2)), device=None, program=None,
            _stages=list, _pipelines={},
        )
        for _ in range(2)
    ]  # fmt: skip
    new: list[list[bool]] = [[], []]
    for kind, *rows in CALLS:
        now = tuple(rows) if kind == "training" else ()
        for rank, n_rows, seen in zip(ranks, rows, new, strict=True):
            before = len(made)
            ForwardBackward.pipeline_of(rank, n_rows, 2, kind)
            seen.append(len(made) > before)
    assert new[0] == new[1] == [True, True, False, True, False, False, True, False]
