"""One embedded cluster per module; each test has backends of its own on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster.borrowed import Borrowed
from support.cluster.stage import FAKE, Stage
from support.places import TESTS

from elastic.cluster.local.local_cluster import LocalCluster
from elastic.types import Pool, Stop

SPOT = Pool("spot", market_type="spot", gpus_per_node=1, max_nodes=3, notice_s=5.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    from elastic.cluster.ray import _ray_private

    with LocalCluster() as local:
        local.connect("tests")
        _ray_private.mute_errors()
        yield local


@pytest.fixture
def stage(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes backends with the fake session; `embedded=False`: on the same nodes as on an existing
    cluster."""
    from elastic.cluster.backend.ray_backend import RayBackend, RayRun

    opened: list[Any] = []

    def make(embedded: bool = True, job: dict[str, Any] | None = None, **more: Any) -> Stage:
        name = more.pop("name", f"run{time.monotonic_ns()}")
        values = {"session": FAKE, "python_path": (str(TESTS),), "pools": (SPOT,), **more}
        run = RayRun(name, str(tmp_path), job or {}, **values)
        backend = RayBackend(run, Borrowed(cluster) if embedded else None)  # type: ignore[arg-type]
        opened.append(backend)
        return Stage(backend)

    yield make
    for backend in opened:
        backend.execute(Stop("stopped", "the test is over"))
