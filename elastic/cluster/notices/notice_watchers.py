"""Who watches for notices: a light actor on each node of a cluster (no CPU, no GPU, no
credentials); this process itself where all nodes are on this machine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.notices.sources.detect import ProbedMachine, sources_of
from elastic.cluster.notices.sources.watch import NoticeReport, Watch
from elastic.cluster.ray import _ray_private, processes
from elastic.cluster.ray.actors import kill
from elastic.worker.hosting.thread_boundary import ThreadBoundary, waiting

log = logging.getLogger(__name__)

HELD_S = 20.0  # how long a watcher without news holds a question
ROUND_S = 0.5
TOGETHER_S = 0.05  # in which answers of several nodes are taken together
AGAIN_S = 5.0  # until a watcher that has ended is started again
DRAIN_LEAST_S = 1.0


class NodeWatcher:
    """The actor: the watch of its node."""

    def __init__(self) -> None:
        processes.end_with(processes.raylet())
        self._watch = Watch(partial(sources_of, ProbedMachine(dict(os.environ))))

    def news(self, seen: int, wait_s: float) -> NoticeReport:
        return self._watch.news(seen, wait_s)

    def pid(self) -> int:
        return os.getpid()


class NoticeWatchers:
    """One for each node that is kept, started and asked in a thread of its own: nobody waits for
    them."""

    def __init__(self) -> None:
        self._wanted: Mapping[str, str] = {}
        self._actors: dict[str, tuple[str, Any]] = {}  # node id -> Ray id, actor
        self._asked: dict[Any, tuple[str, int]] = {}  # answer to come -> node id, version seen
        self._placed: Mapping[str, str] | None = None  # what was wanted when all of it was there
        self._not_before_s: dict[str, float] = {}
        self._news: SimpleQueue[tuple[str, NoticeReport]] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notice_watchers", daemon=True)
        self._thread.start()

    def keep(self, nodes: Mapping[str, str]) -> None:
        """`nodes`: node id -> Ray id, all that are to be watched from now on."""
        if self._wanted != nodes:
            self._wanted = dict(nodes)

    def take(self) -> list[tuple[str, NoticeReport]]:
        """What has come since the last call."""
        return waiting(self._news)

    def close(self) -> None:
        self._wanted = {}
        self._ended.set()
        self._thread.join(HELD_S)

    def _run(self) -> None:
        boundary = ThreadBoundary(log, "watching for notices")
        while not self._ended.is_set():
            # it fails where the head does not answer
            if not (boundary.holds(self._place) and boundary.holds(self._collect)):
                self._ended.wait(AGAIN_S)
        for node_id in list(self._actors):
            self._end(node_id)

    def _place(self) -> None:
        wanted, now_s = self._wanted, time.monotonic()
        if wanted is self._placed:
            return
        for node_id, (ray_id, _) in list(self._actors.items()):
            if wanted.get(node_id) != ray_id:
                self._end(node_id)
        for node_id, ray_id in wanted.items():
            if node_id in self._actors or now_s < self._not_before_s.get(node_id, 0.0):
                continue
            where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
            actor_class: Any = ray.remote(NodeWatcher)
            actor = actor_class.options(
                num_cpus=0, max_restarts=0, max_concurrency=2, scheduling_strategy=where
            ).remote()
            self._actors[node_id] = (ray_id, actor)
            self._ask(node_id, 0)
        self._placed = wanted if len(self._actors) == len(wanted) else None

    def _ask(self, node_id: str, seen: int) -> None:
        self._asked[self._actors[node_id][1].news.remote(seen, HELD_S)] = (node_id, seen)

    def _collect(self) -> None:
        if not self._asked:
            self._ended.wait(ROUND_S)
            return
        refs = list(self._asked)
        ready, _ = ray.wait(refs, num_returns=1, timeout=ROUND_S)
        if ready and len(refs) > 1:  # all that there are, in one round: each looks at all refs
            self._ended.wait(TOGETHER_S)
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            node_id, seen = self._asked.pop(ref)
            try:
                report = ray.get(ref)
            except Exception:  # noqa: BLE001 - it has ended, or its answer cannot be read: another one is started
                self._end(node_id)
                self._not_before_s[node_id] = time.monotonic() + AGAIN_S
                continue
            if report.version > seen:
                self._news.put((node_id, report))
            self._ask(node_id, report.version)

    def _end(self, node_id: str) -> None:
        _, actor = self._actors.pop(node_id)
        self._placed = None
        self._asked = {ref: asked for ref, asked in self._asked.items() if asked[0] != node_id}
        kill(actor)


class LocalNoticeWatcher:
    """For nodes on this machine: they all end with it. Metadata addresses are asked only where this
    machine is known to be of a cloud."""

    def __init__(self) -> None:
        self._watch = Watch(partial(sources_of, ProbedMachine(dict(os.environ), named_only=True)))
        self._nodes: Mapping[str, str] = {}
        self._report = NoticeReport(0)
        self._told: dict[str, int] = {}

    def keep(self, nodes: Mapping[str, str]) -> None:
        self._nodes = dict(nodes)
        self._told = {
            node_id: version for node_id, version in self._told.items() if node_id in nodes
        }

    def take(self) -> list[tuple[str, NoticeReport]]:
        report = self._watch.news(0, 0.0)
        new = [node_id for node_id in self._nodes if self._told.get(node_id, 0) < report.version]
        self._told |= dict.fromkeys(new, report.version)
        return [(node_id, report) for node_id in new]

    def close(self) -> None:
        self._watch.close()


def drain_in_ray(ray_id: str, deadline_s: float, why: str) -> None:
    """Tells Ray, in the background, to place nothing more there; it cannot be taken back."""
    at_s = max(deadline_s, time.time() + DRAIN_LEAST_S)
    threading.Thread(target=_drain, args=(ray_id, at_s, why), name="drain", daemon=True).start()


def _drain(ray_id: str, deadline_s: float, why: str) -> None:
    try:
        if not _ray_private.drain(ray_id, deadline_s, why):
            log.info("Ray does not drain %s: it is gone, or its deadline is over", ray_id[:8])
    except (RayError, OSError, RuntimeError, ValueError) as error:
        log.warning("Ray could not be told to drain %s: %s", ray_id[:8], error)
