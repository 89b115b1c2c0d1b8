"""A backend on real Ray nodes and what it said so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from support.waiting import WITHIN_S, until

from elastic.cluster.ray import processes
from elastic.types import (
    Event,
    Layout,
    NodePrepared,
    NodeReady,
    Plan,
    Pool,
    Prepare,
    RequestNodes,
    Resume,
    WorkerId,
)

FAKE = "support.cluster.fake_session:FakeSession"
POOL = Pool("spot", market_type="spot", gpus_per_node=2, max_nodes=9)


def plan(
    generation: int, workers: list[WorkerId] | tuple[WorkerId, ...], resume: Resume | None = None
) -> Plan:
    """Data parallel over the workers."""
    n = len(workers)
    return Plan(
        generation, Layout(dp_shard=n), tuple(workers), (8,) * n, (4,), resume=resume or Resume()
    )


def living(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if processes.started(pid) is not None]


def wait_gone(pids: Collection[int], within_s: float = WITHIN_S) -> None:
    """Waits until the processes are gone."""
    until(lambda: not living(pids), lambda: f"the end of the processes {living(pids)}", within_s)


@dataclass
class Stage:
    """A backend and what it said so far."""

    backend: Any
    events: list[Event] = field(default_factory=list)

    def wait(self, done: Callable[[Event], bool] | type, timeout_s: float = WITHIN_S) -> Any:
        """The first event, from those not waited for yet, that is of the kind or satisfies the
        condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            for i, event in enumerate(self.events):
                if isinstance(event, done) if isinstance(done, type) else done(event):
                    del self.events[: i + 1]
                    return event
            assert time.monotonic() < deadline, (
                f"nothing within {timeout_s} s; the last: {self.events[-5:]}"
            )
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
