"""How a driver connects to its cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend import driver_hold
from elastic.cluster.backend.ray_run import RayRun
from elastic.errors import LostContact


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect to Ray cluster"), RuntimeError("no GCS")]
)
def test_a_cluster_that_accepts_and_does_not_answer_is_told_in_words(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **_: Any) -> None:
        raise error

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(driver_hold, "ray", ray)
    run = RayRun("r", "/runs/r", {}, (), address="10.0.0.1:6379")
    said = rf"^run 'r': the Ray cluster at 10\.0\.0\.1:6379 does not answer \(.*{error}\); run it again"
    with pytest.raises(LostContact, match=said):
        driver_hold.connect(run, None)
