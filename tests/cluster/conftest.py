"""One embedded cluster per module; each test has backends of its own on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster import processes
from elastic.cluster.local import LocalCluster, NodeOrder
from elastic.types import Event, Layout, NodePrepared, NodeReady, Plan, Pool, Prepare, RequestNodes, Resume, WorkerId

SPOT = Pool("spot", market_type="spot", gpus_per_node=1, max_nodes=3, notice_s=5.0)
POOL = Pool("spot", market_type="spot", gpus_per_node=2, max_nodes=9)
HERE = str(Path(__file__).parent)


def plan(generation: int, workers: list[WorkerId] | tuple[WorkerId, ...], resume: Resume | None = None) -> Plan:
    """Data parallel over the workers."""
    n = len(workers)
    return Plan(generation, Layout(dp_shard=n), tuple(workers), (8,) * n, (4,), resume=resume or Resume())


def wait_gone(pids: Iterable[int], within_s: float = 180.0) -> float:
    """Waits until the processes are gone; returns how long it took."""
    began = time.monotonic()
    while left := [pid for pid in pids if processes.started(pid) is not None]:
        assert time.monotonic() - began < within_s, f"{left} live on after {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - began


@dataclass
class Borrowed:
    """A LocalCluster that outlives the backend which closes it: only the nodes that were started through it end."""

    cluster: LocalCluster
    started: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def add(self, order: NodeOrder) -> Any:
        self.started.append(order.name)
        return self.cluster.add(order)

    def close(self) -> None:
        for name in self.started:
            self.cluster.kill(name).result(60)


@dataclass
class Stage:
    """A backend and what it said so far."""

    backend: Any
    events: list[Event] = field(default_factory=list)

    def wait(self, done: Callable[[Event], bool] | type, timeout_s: float = 120.0) -> Any:
        """The first event, from those not waited for yet, that is of the kind or satisfies the condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            for i, event in enumerate(self.events):
                if isinstance(event, done) if isinstance(done, type) else done(event):
                    del self.events[: i + 1]
                    return event
            assert time.monotonic() < deadline, f"nothing within {timeout_s} s; the last: {self.events[-5:]}"
            self.events += self.backend.poll(self.backend.now_s() + 0.5)

    def nodes(self, n: int) -> list[str]:
        """Requests and prepares `n` nodes of the pool spot."""
        self.backend.execute(RequestNodes("spot", n, f"r{time.monotonic_ns()}"))
        ready = [self.wait(NodeReady).node.node_id for _ in range(n)]
        for node_id in ready:
            self.backend.execute(Prepare(node_id))
        for _ in range(n):
            self.wait(NodePrepared)
        return ready


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    from elastic.cluster import _ray_private

    with LocalCluster() as local:
        local.connect("tests")
        _ray_private.mute_errors()
        yield local


@pytest.fixture
def stage(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes backends with the fake session; `embedded=False`: on the same nodes as on an existing cluster."""
    from elastic.cluster.backend import RayBackend, RayRun

    opened: list[Any] = []

    def make(embedded: bool = True, job: dict[str, Any] | None = None, **more: Any) -> Stage:
        name = more.pop("name", f"run{time.monotonic_ns()}")
        values = {"session": "fake_session:FakeSession", "python_path": (HERE,), "pools": (SPOT,), **more}
        run = RayRun(name, str(tmp_path), job or {}, **values)
        backend = RayBackend(run, Borrowed(cluster) if embedded else None)  # type: ignore[arg-type]
        opened.append(backend)
        return Stage(backend)

    yield make
    for backend in opened:
        backend.close()
