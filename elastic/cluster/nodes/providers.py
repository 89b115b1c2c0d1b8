"""Where nodes come from: the embedded cluster starts them, an existing Ray cluster has them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic import catalog
from elastic.cluster.local.local_cluster import LocalCluster, NodeOrder, visible_gpus
from elastic.cluster.ray import processes
from elastic.text import duration, n_of
from elastic.types import Event, Node, NodeReady, Pool, RequestFailed
from elastic.types.nouns import (
    ACCELERATOR_LABEL,
    GROUP_LABEL,
    MARKET_LABEL,
    POOL_LABEL,
    POOL_LABELS,
)

log = logging.getLogger(__name__)

NODE_LABEL = "elastic-node"
HEAD = "node:__internal_head__"  # a resource of the head alone
SHOWN_MOST = 3  # nodes of no pool in one line


class NodeProvider(Protocol):
    """Gives and takes nodes; returns at once, what comes of it is in `news`. `autoscaled`: Ray ends
    what is released."""

    autoscaled: bool

    def request(self, pool: str, count: int, request_id: str) -> None: ...
    def release(self, node_id: str, taken_in_s: float | None = None) -> None:
        """Give the node back; its workers have been ended. `taken_in_s`: until somebody takes it,
        where that is announced."""

    def quarantine(self, node_id: str, out_s: float) -> None:
        """Before it is released: it is not given again for so long, and then after all others."""

    def lost(self, node_id: str) -> None:
        """The node is gone; it is not ours any more."""

    def kill(self, node_id: str, pids: Sequence[int]) -> None:
        """A drill: the whole node at once. `pids`: its workers."""

    def change_capacity(self, pool: str, by: int) -> None: ...
    def news(self, alive: Mapping[str, RayNode]) -> list[Event]:
        """NodeReady and RequestFailed since the last call."""

    def ray_id(self, node_id: str) -> str | None: ...
    def close(self, end: bool) -> None:
        """No more news. `end`: the run is over, what it has is released; else another driver has
        it."""


@dataclass(frozen=True)
class RayNode:
    """A living node as Ray lists it."""

    ray_id: str
    address: str
    port: int
    labels: Mapping[str, str]
    cpus: int
    gpus: int
    head: bool
    memory_bytes: int = 0  # of the host, as Ray measured or was told; 0 = not known
    draining: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Where its raylet listens."""
        return self.address, self.port


@dataclass
class EmbeddedNodes:
    """Nodes of a LocalCluster: they exist only when asked for, at most `max_nodes` of a pool at a
    time."""

    cluster: LocalCluster
    pools: Sequence[Pool]
    autoscaled: bool = field(init=False, default=False)
    _capacity: dict[str, int] = field(init=False)
    _names: dict[str, str] = field(default_factory=dict)  # node id -> pool, from the request on
    _ray_ids: dict[str, str] = field(default_factory=dict)
    _gpus: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _starting: list[tuple[str, str, Future[dict[str, Any]]]] = field(default_factory=list)
    _failed: list[Event] = field(default_factory=list)
    _requests: set[str] = field(default_factory=set)
    _count: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._capacity = {pool.name: pool.max_nodes for pool in self.pools}

    def request(self, pool: str, count: int, request_id: str) -> None:
        if request_id in self._requests:
            return
        self._requests.add(request_id)
        for _ in range(count):
            why = self._start(pool, request_id)
            if why:
                self._failed.append(RequestFailed(pool, request_id, why))
                return

    def _start(self, name: str, request_id: str) -> str:
        """Starts a node; returns why not."""
        pool = next((p for p in self.pools if p.name == name), None)
        if pool is None:
            return f"there is no pool '{name}'"
        used = sum(1 for p in self._names.values() if p == name)
        if used >= self._capacity[name]:
            taken = pool.max_nodes - self._capacity[name]
            if taken <= 0:
                return f"no capacity: {used} of {pool.max_nodes} in use"
            return (
                f"no capacity: drills took {taken} of its {pool.max_nodes} nodes, "
                f"{n_of(used, 'node')} in use"
            )
        gpus: tuple[str, ...] = ()
        if pool.accelerator_type != "CPU":
            held = {gpu for gpus in self._gpus.values() for gpu in gpus}
            free = [gpu for gpu in visible_gpus() if gpu not in held]
            if len(free) < pool.gpus_per_node:
                return (
                    f"no capacity: a node of '{name}' has {pool.gpus_per_node} GPUs and "
                    f"{len(free)} are free on this machine"
                )
            gpus = tuple(free[: pool.gpus_per_node])
        self._count[name] = self._count.get(name, 0) + 1
        node_id = f"{name}-{self._count[name]}"
        labels = {NODE_LABEL: node_id, POOL_LABEL: name, MARKET_LABEL: pool.market_type}
        self._names[node_id], self._gpus[node_id] = name, gpus
        order = NodeOrder(node_id, pool.gpus_per_node, labels, gpus)
        self._starting.append((node_id, request_id, self.cluster.add(order)))
        return ""

    def news(self, alive: Mapping[str, RayNode]) -> list[Event]:
        events, self._failed = self._failed, []
        for entry in [entry for entry in self._starting if entry[2].done()]:
            self._starting.remove(entry)
            node_id, request_id, answer = entry
            pool = self._names[node_id]
            error = answer.exception()
            if error is not None:
                self.lost(node_id)
                events.append(RequestFailed(pool, request_id, str(error)))
                continue
            self._ray_ids[node_id] = answer.result()["ray_id"]
            found = next(p for p in self.pools if p.name == pool)
            most = sum(self._capacity.values())  # nodes that share this machine
            node = Node(
                node_id, pool, found.gpus_per_node,
                host_memory_bytes=machine_bytes() // max(1, most),
                shared_cores=machine_cores() if found.accelerator_type == "CPU" else 0,
            )  # fmt: skip
            events.append(NodeReady(node))
        return events

    def release(self, node_id: str, taken_in_s: float | None = None) -> None:
        self.cluster.kill(node_id)
        self.lost(node_id)

    def quarantine(self, node_id: str, out_s: float) -> None:
        """What is released ends."""

    def kill(self, node_id: str, pids: Sequence[int]) -> None:
        self.cluster.kill(node_id)

    def lost(self, node_id: str) -> None:
        self._names.pop(node_id, None)
        self._ray_ids.pop(node_id, None)
        self._gpus.pop(node_id, None)

    def change_capacity(self, pool: str, by: int) -> None:
        self._capacity[pool] = max(0, self._capacity.get(pool, 0) + by)

    def ray_id(self, node_id: str) -> str | None:
        return self._ray_ids.get(node_id)

    def close(self, end: bool) -> None:
        """They end with the cluster."""


@dataclass
class ClusterNodes:
    """Nodes of an existing Ray cluster: each suitable living one is ours, also one that joins
    later, up to `max_nodes`.

    A node belongs to the pool that its label elastic-pool, pool or ray.io/node-group names; else to
    the first pool of its market type and accelerator type (see pool_of). Released nodes stay in the
    cluster and come back when they are requested again, unless they are about to be taken;
    quarantined ones after their time, and after all others. `spared`: a drill takes the workers of
    a node and leaves the node itself alone.
    """

    pools: Sequence[Pool]
    spared: bool = False
    autoscaled: bool = field(init=False, default=False)
    _capacity: dict[str, int] = field(init=False)
    _ours: dict[str, tuple[str, str]] = field(default_factory=dict)  # node id -> pool, Ray id
    _released: dict[str, str] = field(default_factory=dict)  # Ray id -> pool
    # Ray id -> when a released one may be had again
    _not_before_s: dict[str, float] = field(default_factory=dict)
    # Ray id -> until when a quarantined one is kept out
    _out_until_s: dict[str, float] = field(default_factory=dict)
    # pool, how many are still missing, request id
    _asked: list[list[Any]] = field(default_factory=list)
    _requests: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)  # Ray ids of nodes of no pool

    def __post_init__(self) -> None:
        self._capacity = {pool.name: pool.max_nodes for pool in self.pools}

    def request(self, pool: str, count: int, request_id: str) -> None:
        if request_id not in self._requests:
            self._requests.add(request_id)
            self._asked.append([pool, count, request_id])

    def news(self, alive: Mapping[str, RayNode]) -> list[Event]:
        events: list[Event] = []
        ours = {ray_id for _, ray_id in self._ours.values()}
        now_s = time.monotonic()
        self._out_until_s = {
            ray_id: until_s
            for ray_id, until_s in self._out_until_s.items()
            if ray_id in alive or now_s < until_s
        }
        groups = groups_of(alive.values())
        for found in sorted(alive.values(), key=self._later):
            pool = None if found.ray_id in ours else pool_of(found, self.pools, groups)
            if pool is None or self._used(pool.name) >= self._capacity[pool.name]:
                continue
            if now_s < self._out_until_s.get(found.ray_id, now_s):
                continue
            asked = next((a for a in self._asked if a[0] == pool.name and a[1] > 0), None)
            # released since it is to be taken, or Ray starts nothing there any more
            not_before_s = self._not_before_s.get(found.ray_id, 0.0)
            leaving = found.draining or now_s < not_before_s
            if found.ray_id in self._released and (asked is None or leaving):
                continue
            if asked is not None:
                asked[1] -= 1
            events.append(self._welcome(found, pool))
        for name, missing, request_id in self._asked:
            if missing > 0:
                why = f"no capacity: all that the cluster has of it are in use ({self._used(name)})"
                why += self._kept_out(name, alive, now_s) + self._of_no_pool(alive.values())
                events.append(RequestFailed(name, request_id, why))
        self._asked.clear()
        return events

    def _later(self, found: RayNode) -> tuple[bool, bool]:
        """What nothing is known against is given first."""
        return found.ray_id in self._out_until_s, found.ray_id in self._released

    def _kept_out(self, pool: str, alive: Mapping[str, RayNode], now_s: float) -> str:
        """Living nodes of the pool that are quarantined still; '' = none are."""
        there = [(until_s, alive.get(ray_id)) for ray_id, until_s in self._out_until_s.items()]
        groups = groups_of(alive.values())
        rest = [
            until_s - now_s
            for until_s, found in there
            if found is not None
            and now_s < until_s
            and (of := pool_of(found, self.pools, groups)) is not None
            and of.name == pool
        ]
        first = f", the first one for another {duration(min(rest))}" if rest else ""
        return f"; {n_of(len(rest), 'node')} of it quarantined{first}" if rest else ""

    def _of_no_pool(self, alive: Collection[RayNode]) -> str:
        """Living nodes that cannot be used, which is said once of each; '' = there are none."""
        groups = groups_of(alive)
        new = [node for node in alive if not node.head and node.ray_id not in self._told]
        others = [node for node in new if pool_of(node, self.pools, groups) is None]
        self._told |= {node.ray_id for node in others}
        shown = [described(node) for node in others[:SHOWN_MOST]]
        more = [f"{len(others) - SHOWN_MOST} more"] if len(others) > SHOWN_MOST else []
        return f"; of no pool: {', '.join((*shown, *more))}" if others else ""

    def _welcome(self, found: RayNode, pool: Pool) -> Event:
        self._released.pop(found.ray_id, None)
        self._out_until_s.pop(found.ray_id, None)
        node_id = found.labels.get(NODE_LABEL) or f"{pool.name}-{found.ray_id[-8:]}"
        self._ours[node_id] = (pool.name, found.ray_id)
        return NodeReady(
            Node(node_id, pool.name, workers_of(found, pool), host_memory_bytes=found.memory_bytes)
        )

    def _used(self, pool: str) -> int:
        return sum(1 for name, _ in self._ours.values() if name == pool)

    def release(self, node_id: str, taken_in_s: float | None = None) -> None:
        pool, ray_id = self._ours.pop(node_id, ("", ""))
        if ray_id:
            self._released[ray_id] = pool
            self._not_before_s[ray_id] = time.monotonic() + (taken_in_s or 0.0)

    def quarantine(self, node_id: str, out_s: float) -> None:
        if (ray_id := self.ray_id(node_id)) is not None:
            self._out_until_s[ray_id] = time.monotonic() + out_s

    def kill(self, node_id: str, pids: Sequence[int]) -> None:
        ray_id = self.ray_id(node_id)
        if ray_id is not None:
            signal_there({ray_id: pids}, signal.SIGKILL, raylet=not self.spared)

    def lost(self, node_id: str) -> None:
        _, ray_id = self._ours.pop(node_id, ("", ""))
        self._released.pop(ray_id, None)

    def change_capacity(self, pool: str, by: int) -> None:
        self._capacity[pool] = max(0, self._capacity.get(pool, 0) + by)

    def ray_id(self, node_id: str) -> str | None:
        return self._ours.get(node_id, (None, None))[1]

    def close(self, end: bool) -> None:
        """They are the cluster's."""


def groups_of(nodes: Iterable[RayNode]) -> dict[str, str]:
    """Ray's node groups of living nodes, as `pool_of` takes them."""
    found = [node.labels.get(GROUP_LABEL, "") for node in nodes]
    return {group: group for group in found if group}


def pool_of(found: RayNode, pools: Collection[Pool], groups: Mapping[str, str] = {}) -> Pool | None:
    """The pool that a node counts to; None = not for us. Ray labels a node by its GPUs; with them
    it is one of CPUs where no pool is of GPUs like these. `groups`: by pool the node group of Ray
    that is its own, where that is known. A node of a group that is no pool's counts by its market
    and GPUs to those without one; a head of that kind to none."""
    fitting = [pool for pool in pools if workers_of(found, pool) > 0]
    if named := pool_name(found.labels):
        called = [pool for pool in pools if named in (pool.name, groups.get(pool.name))]
        called.sort(key=lambda pool: pool.name != named)
        by_group = found.labels.keys() & {*POOL_LABELS} == {GROUP_LABEL}
        if called or found.head or not by_group:
            return next((pool for pool in called if pool in fitting), None)
        fitting = [pool for pool in fitting if pool.name not in groups]
    market, kind = found.labels.get(MARKET_LABEL), found.labels.get(ACCELERATOR_LABEL)
    fitting = [
        pool
        for pool in fitting
        if market in (None, pool.market_type) and (kind is None or is_of_kind(pool, kind))
    ]
    on_gpu = [pool for pool in fitting if pool.accelerator_type != "CPU"]
    just = [pool for pool in on_gpu if kind is not None and pool.accelerator_type != "GPU"]
    return next(iter(just or on_gpu or fitting), None)


def pool_name(labels: Mapping[str, str]) -> str:
    """That labels give the pool of their node; '' = none does."""
    return next((labels[label] for label in POOL_LABELS if label in labels), "")


def is_of_kind(pool: Pool, label: str) -> bool:
    """Are its nodes such as Ray labels so? Of a pool of CPUs the label says nothing; one of "GPU"
    takes any."""
    kind = pool.accelerator_type
    return kind in ("CPU", "GPU") or catalog.same_gpu(kind, label)


def described(found: RayNode) -> str:
    """A node by what its pool follows from."""
    shown = (*POOL_LABELS, MARKET_LABEL, ACCELERATOR_LABEL)
    labels = [f"{label}={found.labels[label]}" for label in shown if label in found.labels]
    what = n_of(found.gpus, "GPU") if found.gpus else n_of(found.cpus, "CPU")
    return f"{found.address} ({', '.join((what, *labels))})"


def workers_of(found: RayNode, pool: Pool) -> int:
    """How many workers the node takes: GPUs, or processes where the pool is of CPUs."""
    if pool.accelerator_type != "CPU":
        return found.gpus
    return min(found.cpus, pool.gpus_per_node)


def living() -> list[RayNode]:
    """The nodes that Ray lists as alive."""
    return [_ray_node(entry) for entry in ray.nodes() if entry["Alive"]]


def _ray_node(entry: Mapping[str, Any]) -> RayNode:
    resources = entry["Resources"]
    # Ray gives tasks what is left of the host's memory beside its object store: the sum is the
    # host's, or a little less
    memory = resources.get("memory", 0.0)
    host_bytes = int(memory + resources.get("object_store_memory", 0.0)) if memory else 0
    return RayNode(
        entry["NodeID"], entry["NodeManagerAddress"], entry["NodeManagerPort"], entry["Labels"],
        int(resources.get("CPU", 0)), int(resources.get("GPU", 0)),
        HEAD in resources, host_bytes,
    )  # fmt: skip


def machine_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def signal_there(
    pids: Mapping[str, Sequence[int]], number: int, *, raylet: bool = False
) -> threading.Thread:
    """Sends a signal to processes of other nodes, by Ray id (and to their raylets), through a task
    on each, in the background: where the head does not answer, Ray waits for it."""
    sends = threading.Thread(
        target=_send_there, args=(pids, number, raylet), name="signal", daemon=True
    )
    sends.start()
    return sends


def _send_there(pids: Mapping[str, Sequence[int]], number: int, raylet: bool) -> None:
    for ray_id, there in pids.items():
        if not ray.is_initialized():
            return  # this driver has gone; Ray would start a cluster of its own
        where = NodeAffinitySchedulingStrategy(ray_id, soft=False)
        try:
            _signal_task().options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(
                list(there), int(number), raylet
            )
        except (RayError, OSError, RuntimeError, ValueError) as error:
            log.warning("no signal could be sent to node %s: %s", ray_id[:8], error)


@cache
def _signal_task() -> Any:
    """One for all calls: the head keeps each that is made until its job ends."""
    return ray.remote(_signal)


def _signal(pids: Sequence[int], number: int, raylet: bool) -> None:
    processes.send([*pids, *([processes.raylet()] if raylet else [])], number)
