"""A small actor on the head of an autoscaled cluster: the one that asks the autoscaler for nodes,
for all runs together, and releases what nobody wants any more, also when no driver is left to say
so.

Drivers speak to it every second (Order); it answers with what the cluster does about it (Report).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from elastic.cluster.nodes.demand import Demand, DemandReport, SeenNode
from elastic.cluster.nodes.node_types import (
    KUBERNETES,
    ResourceBundle,
    bundle_of,
    monitor_here,
    read_types,
    type_of,
)
from elastic.cluster.nodes.providers import RayNode, groups_of, living, pool_of
from elastic.cluster.ray import _ray_private
from elastic.cluster.ray.actors import end_actors
from elastic.types import Pool
from elastic.worker.hosting.thread_boundary import ThreadBoundary

log = logging.getLogger(__name__)

NAME, NAMESPACE = "watcher", "elastic"
LOOK_S = 0.5
ASK_AGAIN_S = 10.0  # somebody else may have set the cluster's one request
LINGER_S = 30.0  # without runs and nodes, until the watcher ends
LINGER_MOST_S = 1800.0  # launches that are under way may still become nodes
FAILED_LINE = re.compile(r"Failed to launch \d+ nodes? of type (\S+): (.*)")
REASON_MOST = 300
LOG_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class AutoscalerReport:
    """`given`: Ray id -> pool of the nodes that are the run's. By pool: `coming` instances that
    have not joined yet and are not those that another run waits for before it, how many launches
    `failed` so far and `why` the last one did, why a pool is `refused`. `impossible`: the cluster
    cannot have all that is asked of it together, and starts nothing. `replaced`: a newer driver has
    the run. `looked_s`: seconds since its last look at the cluster ended, well or not: one that
    hangs in a look still answers orders, and asks for nothing more. `machines`: what is `coming`
    has a machine, that is paid for (of a pod nobody knows). `stay`: nodes that were released and
    that the cluster keeps, for whoever asks next."""

    given: Mapping[str, str] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    impossible: bool = False
    replaced: bool = False
    looked_s: float = 0.0
    machines: bool = True
    stay: frozenset[str] = frozenset()


class AutoscalerAgent:
    """`quiet_s`: after a start without any driver's word (its process was replaced) it leaves the
    request alone for so long."""

    def __init__(self, quiet_s: float) -> None:
        here = self._monitor = monitor_here()
        # None = not known
        self._types = read_types(here.config) if here is not None and here.config else None
        self._demand = Demand(ends_unasked=self._types is not None)
        self._pools: dict[str, Pool] = {}
        place = ray.get_runtime_context()
        of_ray = Path(place.get_temp_dir(), "session_latest", "logs", "monitor.log")
        self._reasons = Reasons(here.log if here else of_ray)
        self._scaling = _ray_private.Scaling(Counter(), Counter(), Counter(), Counter())
        self._asked: Counter[ResourceBundle] | None = None  # None = not known
        self._asked_s = 0.0
        # how often an order changed, and up to which change it was asked
        self._heard = self._asked_for = 0
        self._quiet_until_s = time.monotonic() + quiet_s
        self._busy_s = self._looked_s = time.monotonic()
        self._drains = Drains()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._me = place.current_actor
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def serves(self) -> bool:
        """Is there an autoscaler that starts nodes? On Kubernetes it runs in a container of its
        own."""
        if self._monitor is None:
            return KUBERNETES in os.environ
        return bool(self._monitor.config)

    def order(self, order: DemandReport) -> AutoscalerReport:
        with self._lock:
            run = self._demand.runs.get(order.namespace)
            before = run.order if run is not None else None
            if not self._demand.hear(order, time.monotonic()):
                return AutoscalerReport(replaced=True)
            self._pools |= {pool.name: pool for pool in order.pools}
            self._quiet_until_s = 0.0
            if before != order:
                self._heard += 1
                self._wake.set()
            return self._report(order)

    def end(self, run: str, epoch: int) -> None:
        """The run is over."""
        with self._lock:
            self._demand.end(run, epoch, time.monotonic())
        self._wake.set()

    def leave(self) -> None:
        ray.actor.exit_actor()

    def pending(self) -> dict[str, Any]:
        """What stands, for a person or a test: what is asked of the cluster, whose nodes, which are
        to go."""
        with self._lock:
            return {
                "asked": sum((self._asked or Counter()).values()),
                "runs": sorted(self._demand.runs),
                "leaving": sorted(self._demand.leaving),
            }

    def _report(self, order: DemandReport) -> AutoscalerReport:
        types = {pool.name: self._type_name(pool) for pool in order.pools}
        every = {pool.name: self._type_name(pool) for pool in self._pools.values()}
        scaling, reasons = self._scaling, self._reasons.by_type
        bundles = {pool.name: bundle_of(pool, self._types) for pool in order.pools}
        asked: Mapping[ResourceBundle, int] = self._asked or {}
        as_ray_says = Counter(
            {(frozenset(b.resources), frozenset(b.selector)): n for b, n in asked.items()}
        )
        current = self._asked_for == self._heard and bool(asked)
        coming = self._demand.coming(order.namespace, scaling.coming, every, now_s=time.monotonic())
        return AutoscalerReport(
            self._demand.given(order.namespace),
            {name: coming[name] for name in types},
            {name: scaling.failed[kind] for name, kind in types.items()},
            {name: reasons[kind] for name, kind in types.items() if kind in reasons},
            {name: bundle for name, bundle in bundles.items() if isinstance(bundle, str)},
            current and scaling.infeasible == as_ray_says,
            looked_s=time.monotonic() - self._looked_s,
            machines=self._types is not None,
            stay=frozenset(self._demand.stay),
        )

    def _type_name(self, pool: Pool) -> str:
        kind = type_of(pool, self._types) if self._types is not None else None
        return kind.name if kind else pool.name

    # ----------------------------------------------------------------------- what it does by itself

    def _run(self) -> None:
        boundary = ThreadBoundary(log, "watching the cluster's nodes")
        while True:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            well = boundary.holds(self._look)
            self._looked_s = time.monotonic()
            if not well:  # as where the head does not answer: nothing new is known
                time.sleep(LOOK_S)

    def _look(self) -> None:
        scaling, nodes, draining = _ray_private.scaling(), living(), _ray_private.draining_nodes()
        self._reasons.read()
        now_s = time.monotonic()
        with self._lock:
            self._scaling = scaling
            seen = self._seen(nodes, draining)
            self._demand.look(seen, now_s)
            heard = self._heard
            kinds = {pool.name: type_of(pool, self._types or {}) for pool in self._pools.values()}
            least = {name: kind.least for name, kind in kinds.items() if kind is not None}
            most = {name: kind.most for name, kind in kinds.items() if kind is not None}
            wanted = self._demand.wanted(seen, now_s, most)
            drain = self._demand.to_drain(seen, least)
            overdue = [run.order.namespace for run in self._demand.overdue(now_s)]
            self._demand.forget_gone()
        if self._demand.runs or now_s > self._quiet_until_s:
            self._ask(wanted, now_s)
            self._asked_for = heard
        for ray_id in drain:
            self._drains.end(ray_id)
        for namespace in overdue:
            end_actors(namespace)
        self._maybe_leave(now_s)

    def _seen(self, nodes: list[RayNode], draining: Mapping[str, float]) -> dict[str, SeenNode]:
        """A node is first of a pool that a run has now: runs may call the same type differently."""
        known = {name: self._type_name(pool) for name, pool in self._pools.items()}
        groups = groups_of(nodes) if self._types is None else known
        now = {pool.name for run in self._demand.runs.values() for pool in run.order.pools}
        parts = [[p for p in self._pools.values() if (p.name in now) is so] for so in (True, False)]
        found = {
            node.ray_id: pool_of(node, parts[0], groups) or pool_of(node, parts[1], groups)
            for node in nodes
            if not node.head
        }
        return {
            ray_id: SeenNode(pool.name, ray_id in draining)
            for ray_id, pool in found.items()
            if pool is not None
        }

    def _ask(self, wanted: Counter[str], now_s: float) -> None:
        total: Counter[ResourceBundle] = Counter()
        for name, n in wanted.items():
            bundle = bundle_of(self._pools[name], self._types)
            if isinstance(bundle, ResourceBundle):
                total[bundle] += n
        if total != self._asked or (total and now_s - self._asked_s > ASK_AGAIN_S):
            bundles = sorted(total.elements(), key=str)
            request_resources(
                bundles=[dict(bundle.resources) for bundle in bundles],
                bundle_label_selectors=[dict(bundle.selector) for bundle in bundles],
            )
            self._asked, self._asked_s = total, now_s

    def _maybe_leave(self, now_s: float) -> None:
        kinds = {self._type_name(pool) for pool in self._pools.values()}
        under_way = any(self._scaling.asked[kind] + self._scaling.coming[kind] for kind in kinds)
        if self._demand.runs or self._demand.leaving or now_s < self._quiet_until_s or self._asked:
            self._busy_s = now_s
        elif now_s - self._busy_s > (LINGER_MOST_S if under_way else LINGER_S):
            self._me.leave.remote()


class Drains:
    """Each in a thread of its own: that of a machine which nobody reaches takes minutes, and the
    others cost money."""

    def __init__(self) -> None:
        self._running: dict[str, threading.Thread] = {}

    def end(self, ray_id: str) -> None:
        """Returns at once; again and again until the node is gone."""
        self._running = {
            known: thread for known, thread in self._running.items() if thread.is_alive()
        }
        if ray_id not in self._running:
            self._running[ray_id] = threading.Thread(
                target=self._end, args=(ray_id,), name="drain", daemon=True
            )
            self._running[ray_id].start()

    def _end(self, ray_id: str) -> None:
        try:
            _ray_private.end_when_idle(ray_id, "released by elastic")
        except (OSError, RuntimeError, RayError) as error:  # retried
            log.warning("node %s cannot be drained: %s", ray_id, error)


@dataclass
class Reasons:
    """Why launches failed, by node type: only the autoscaler's log has what the cloud said."""

    path: Path
    by_type: dict[str, str] = field(default_factory=dict)
    _read_bytes: int = 0

    def read(self) -> None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                # a new file after rotation
                begin = self._read_bytes if self._read_bytes <= size else 0
                file.seek(max(begin, size - LOG_MOST_BYTES))
                text = file.read()
        except OSError:
            return
        whole = text.rpartition(b"\n")[0]
        self._read_bytes = size - (len(text) - len(whole))
        for kind, why in FAILED_LINE.findall(whole.decode(errors="replace")):
            self.by_type[kind] = why.strip()[:REASON_MOST]
