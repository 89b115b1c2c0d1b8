"""Nodes of a cluster that Ray's autoscaler (v2) runs: asked for by pool, released one by one, paid
for only in between.

The watcher on the head asks and releases; this is the driver's side of it. What the autoscaler
starts beyond what was asked for (it replaces a node that is reclaimed by itself) answers an open
request, or is released.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.nodes.autoscaler_agent import (
    NAME,
    NAMESPACE,
    AutoscalerAgent,
    AutoscalerReport,
)
from elastic.cluster.nodes.demand import TAKE_OVER_S, DemandReport
from elastic.cluster.nodes.providers import ClusterNodes, NodeProvider, RayNode, living
from elastic.cluster.ray import _ray_private
from elastic.errors import LostContact
from elastic.types import Event, InstancesSeen, RequestFailed
from elastic.worker.hosting.thread_boundary import ThreadBoundary

log = logging.getLogger(__name__)

SPEAK_S = 1.0  # between two words to the watcher
ANSWER_MOST_S = 60.0  # of the watcher: its process may have to start
END_MOST_S = 20.0
# a watcher that has not looked at the cluster for so long hangs: its process is replaced
LOOK_MOST_S = 30.0
LAUNCH_MOST_S = 180.0  # without an instance of the pool, a request has failed
JOIN_MOST_S = 840.0  # since the first of its instances; twice as long after one that did not join
LONGER_MOST = 4  # times as long at the most: the policy forgets a request after an hour


def provider_for(order: DemandReport, take_over: bool, spared: bool) -> NodeProvider:
    """Of the cluster that this process is connected to."""
    if _ray_private.autoscaler_v2():
        desk = AutoscalerClient(replace(order, fresh=not take_over))
        if desk.opened:
            takes_until_s = time.monotonic() + TAKE_OVER_S if take_over else 0.0
            return AutoscalerNodes(order.pools, spared, desk=desk, takes_until_s=takes_until_s)
    return ClusterNodes(order.pools, spared)


class AutoscalerClient:
    """Speaks to the watcher, in a thread of its own. `opened`: there is an autoscaler that starts
    nodes. Raises LostContact where the watcher does not answer."""

    _agent: Any

    def __init__(self, order: DemandReport) -> None:
        self._order, self._report = order, AutoscalerReport()
        self._number = self._answered = 0
        self._lock = threading.Lock()
        self._wake, self._done = threading.Event(), threading.Event()
        self.opened = False
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)
        until_s = time.monotonic() + ANSWER_MOST_S
        while not self._reached(last=time.monotonic() >= until_s):
            self._done.wait(SPEAK_S)
        if not self.opened:
            ray.kill(self._agent)
            return
        self._order = replace(order, fresh=False, adopted={})
        self._thread.start()

    def _reached(self, last: bool) -> bool:
        """False: its process has just ended, as where it is replaced; another one is asked.
        `last`: nothing is tried again."""
        try:
            self._agent = autoscaler_agent(self._order.lease_s)
            self.opened = bool(ray.get(self._agent.serves.remote(), timeout=ANSWER_MOST_S))
            if self.opened:
                self._speak()
        except (RayError, ValueError) as error:
            if last or isinstance(error, TimeoutError):
                said = str(error).strip().partition("\n")[0]
                raise LostContact(
                    f"the autoscaler's watcher on the head does not answer ({said}); run it again"
                ) from error
            return False
        return True

    def tell(
        self,
        waits: Mapping[str, int],
        held: frozenset[str],
        dropped: frozenset[str],
        *,
        out: frozenset[str],
    ) -> None:
        with self._lock:
            order = replace(self._order, waits=waits, held=held, dropped=dropped, out=out)
            if order != self._order:
                self._order, self._number = order, self._number + 1
                self._wake.set()

    def heard(self) -> tuple[AutoscalerReport, bool]:
        """The newest report; whether it answers what was told last."""
        with self._lock:
            return self._report, self._answered == self._number

    def close(self, end: bool) -> None:
        """`end`: the run is over, and the watcher is informed; where it cannot be, it finds out by
        itself after the lease."""
        self._done.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(END_MOST_S)
        if not end:
            return
        try:
            told = self._agent.end.remote(self._order.namespace, self._order.epoch)
            ray.get(told, timeout=END_MOST_S)
        except (RayError, OSError) as error:
            log.warning(
                "the autoscaler's watcher cannot be told that the run is over (%s); it gives the "
                "nodes back by itself",
                error,
            )

    def _run(self) -> None:
        boundary = ThreadBoundary(log, "speaking to the autoscaler's watcher")
        while not self._done.is_set():
            self._wake.wait(SPEAK_S)
            self._wake.clear()
            if self._done.is_set():
                return
            boundary.holds(self._speak_on)

    def _speak_on(self) -> None:
        try:
            self._speak()
        except (RayActorError, ValueError):  # its process is gone: another one is told all
            try:
                self._agent = autoscaler_agent(self._order.lease_s)
            except (RayError, ValueError, OSError) as error:
                log.warning("the autoscaler's watcher cannot be started again: %s", error)

    def _speak(self) -> None:
        with self._lock:
            order, number = self._order, self._number
        report = ray.get(self._agent.order.remote(order), timeout=ANSWER_MOST_S)
        with self._lock:
            self._report, self._answered = report, number
        if report.looked_s > LOOK_MOST_S:
            log.warning(
                "the autoscaler's watcher has not looked for %.0f s: its process is replaced",
                report.looked_s,
            )
            # Ray starts it anew under its name; every driver tells it all it wants
            ray.kill(self._agent, no_restart=False)


def autoscaler_agent(quiet_s: float) -> Any:
    """The cluster's one, made where there is none. Raises ValueError when no head is listed."""
    head = next((node.ray_id for node in living() if node.head), None)
    if head is None:
        raise ValueError("Ray lists no head node")
    made: Any = ray.remote(AutoscalerAgent)
    return made.options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", max_restarts=-1,
        max_concurrency=4, num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(head,
        soft=False),
    ).remote(quiet_s)  # fmt: skip


@dataclass
class _Open:
    """A request that is not answered yet. `coming_s`: when instances were last on their way for all
    of it, or for more of it than ever: one that does not come up is replaced by the autoscaler.
    `failed_before`: launches of the pool that had failed at the last look. `uncovered`: the fewest
    of its nodes for which nothing was on its way. `started_s`: when something first was. `told`: it
    has failed, and what is on its way for it is taken still."""

    pool: str
    request_id: str
    missing: int
    short: int  # that the pool's bound does not allow yet: nodes that leave may make room
    coming_s: float
    failed_before: int
    uncovered: int
    started_s: float | None = None
    told: bool = False


@dataclass
class AutoscalerNodes(ClusterNodes):
    """`launch_most_s`, `join_most_s`: how long a request may stay unanswered, without instances for
    all of it and with them."""

    desk: AutoscalerClient = field(kw_only=True)
    autoscaled: bool = field(init=False, default=True)
    launch_most_s: float = LAUNCH_MOST_S
    join_most_s: float = JOIN_MOST_S
    takes_until_s: float = 0.0  # what the driver before has asked for, too
    _open: list[_Open] = field(default_factory=list)
    # Ray id -> pool of nodes not wanted any more, until they are gone
    _dropped: dict[str, str] = field(default_factory=dict)
    # Ray ids that the run had when this driver came
    _inherited: set[str] = field(default_factory=set)
    _seen: dict[str, InstancesSeen] = field(default_factory=dict)  # as last told
    # by pool: that started for this run, have joined and are released at once
    _unwanted: Counter[str] = field(default_factory=Counter)
    # of a pool's requests in a row: instances that did not join
    _late: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._inherited = set(self.desk.heard()[0].given)

    def request(self, pool: str, count: int, request_id: str) -> None:
        """None of them = what is still open of that request is not wanted any more."""
        if count <= 0:
            self._open = [asked for asked in self._open if asked.request_id != request_id]
            self._tell()
            return
        if request_id in self._requests:
            return
        self._requests.add(request_id)
        allowed = max(0, min(count, self._room(pool)))
        failed = self.desk.heard()[0].failed.get(pool, 0)
        now_s = time.monotonic()
        self._open.append(_Open(pool, request_id, allowed, count - allowed, now_s, failed, count))
        self._tell()

    def _room(self, pool: str) -> int:
        waits = sum(asked.missing for asked in self._open if asked.pool == pool)
        return self._capacity.get(pool, 0) - self._used(pool) - waits

    def news(self, alive: Mapping[str, RayNode]) -> list[Event]:
        report, current = self.desk.heard()
        if current:  # the watcher knows of them; what is gone is not dealt again
            there = {*alive, *report.given}
            self._dropped = {
                ray_id: pool
                for ray_id, pool in self._dropped.items()
                if ray_id in there and ray_id not in report.stay
            }
        ours = {ray_id for _, ray_id in self._ours.values()}
        events = [
            event
            for ray_id, pool in report.given.items()
            if ray_id not in ours and (event := self._take(alive.get(ray_id), pool))
        ]
        coming = self._coming(report)
        events += self._answered(report, current, alive, coming=coming)
        self._tell()
        return [*events, *self._instances(report, coming, alive)]

    def _answered(
        self,
        report: AutoscalerReport,
        current: bool,
        alive: Mapping[str, RayNode],
        *,
        coming: Counter[str],
    ) -> list[Event]:
        """Requests that have failed, or have got all. What is on its way for one that has failed is
        waited for, and taken; less of it is told again."""
        events: list[Event] = []
        left, standing = Counter(coming), [one for one in self._open if not one.told]
        newest = {one.pool: one for one in standing}
        for asked in list(self._open):
            if asked.short and (room := self._room(asked.pool)) > 0:
                asked.missing += min(room, asked.short)
                asked.short -= min(room, asked.short)
            starting = min(asked.missing, left[asked.pool])
            left[asked.pool] -= starting
            late, why = self._is_late(asked, starting), ""
            if not asked.told:
                impossible = current and report.impossible and asked is standing[-1]
                failed = report.failed.get(asked.pool, 0) > asked.failed_before
                failed = failed and asked is newest[asked.pool]
                why = self._why_failed(asked, report, impossible, failed=failed, late=late)
            elif late or starting < asked.missing:
                gone = asked.missing - (0 if late else starting)
                why = f"{gone} of its nodes that were starting did not join"
            if why:
                why += self._kept_out(asked.pool, alive, time.monotonic())
                why += self._of_no_pool(alive.values())
                asked.missing, asked.short, asked.told = 0 if late else starting, 0, True
                events.append(RequestFailed(asked.pool, asked.request_id, why, asked.missing))
            if asked.missing + asked.short <= 0:
                self._open.remove(asked)
        for one in self._open:  # a failed launch is that of the pool's newest request
            one.failed_before = report.failed.get(one.pool, 0)
        return events

    def _coming(self, report: AutoscalerReport) -> Counter[str]:
        """Instances by pool that are on their way, those included that have joined and are not
        known to this process yet."""
        ours = {ray_id for _, ray_id in self._ours.values()}
        arriving = Counter(
            pool
            for ray_id, pool in report.given.items()
            if ray_id not in ours and ray_id not in self._dropped
        )
        return arriving + Counter(report.coming)

    def _instances(
        self, report: AutoscalerReport, coming: Counter[str], alive: Mapping[str, RayNode]
    ) -> list[Event]:
        """What is paid for beside the run's nodes, where that has changed. Of the pool's instances
        on their way at most as many are this run's as it waits for; those of a request that it gave
        up stay its own until they have come. On Kubernetes nobody knows which pods have a machine:
        none is reported."""
        leaving = Counter(pool for ray_id, pool in self._dropped.items() if ray_id in alive)
        events: list[Event] = []
        for pool in self.pools:
            before = self._seen.get(pool.name, InstancesSeen(pool.name))
            waits = sum(asked.missing for asked in self._open if asked.pool == pool.name)
            known = coming[pool.name] if report.machines else 0
            still = before.starting - self._unwanted.pop(pool.name, 0)
            starting = min(known, max(waits, still))
            now = InstancesSeen(pool.name, starting, leaving[pool.name])
            self._seen[pool.name] = now
            events += [now] if now != before else []
        return events

    def _take(self, found: RayNode | None, name: str) -> Event | None:
        """One that the run has not yet."""
        if found is None or found.ray_id in self._dropped or found.ray_id in self._out():
            return None
        asked = next((o for o in self._open if o.pool == name and o.missing > 0), None)
        pool = next((p for p in self.pools if p.name == name), None)
        due = found.ray_id in self._inherited or time.monotonic() < self.takes_until_s
        if pool is None or (asked is None and not due):
            self._dropped[found.ray_id] = name
            self._unwanted[name] += 1
            return None
        self._late.pop(name, None)
        if asked is not None:
            asked.missing -= 1
            seen = self._seen.get(name, InstancesSeen(name))
            # as NodeReady says
            self._seen[name] = replace(seen, starting=max(0, seen.starting - 1))
        return self._welcome(found, pool)

    def _is_late(self, asked: _Open, starting: int) -> bool:
        """Have its instances had their time to join?"""
        now_s, uncovered = time.monotonic(), asked.missing + asked.short - starting
        if starting and asked.started_s is None:
            asked.started_s = now_s
        if uncovered <= 0 or uncovered < asked.uncovered:
            asked.coming_s = now_s
        asked.uncovered = min(asked.uncovered, uncovered)
        return asked.started_s is not None and now_s - asked.started_s > self._most_s(asked.pool)

    def _most_s(self, pool: str) -> float:
        return self.join_most_s * min(LONGER_MOST, 1 << self._late[pool])

    def _why_failed(
        self, asked: _Open, report: AutoscalerReport, impossible: bool, *, failed: bool, late: bool
    ) -> str:
        """'' = it has not."""
        pool = asked.pool
        over = time.monotonic() - asked.coming_s > self.launch_most_s
        if asked.missing <= 0:
            used, most = self._used(pool), self._capacity[pool]
            return f"no capacity: {used} of {most} in use" if asked.short and over else ""
        if pool in report.refused:
            return report.refused[pool]
        if failed:
            return (
                report.why.get(pool)
                or "its launch failed; the autoscaler's log on the head (monitor.log) says why"
            )
        if impossible:
            return (
                "the cluster cannot have so many nodes: max_workers of the node type or of the "
                "cluster file is reached"
            )
        if late:
            most_s = self._most_s(pool)
            self._late[pool] += 1
            return f"{asked.missing} of its nodes did not join within {most_s:.0f} s"
        if over:
            return f"no capacity: no answer within {self.launch_most_s:.0f} s"
        return ""

    def _tell(self) -> None:
        waits: Counter[str] = Counter()
        for asked in self._open:
            waits[asked.pool] += asked.missing
        held = frozenset(ray_id for _, ray_id in self._ours.values())
        self.desk.tell(
            {pool: n for pool, n in waits.items() if n > 0}, held, frozenset(self._dropped),
            out=self._out(),
        )  # fmt: skip

    def _out(self) -> frozenset[str]:
        """Quarantined ones, which a cluster that has to have so many nodes keeps."""
        now_s = time.monotonic()
        self._out_until_s = {n: end_s for n, end_s in self._out_until_s.items() if now_s < end_s}
        return frozenset(self._out_until_s)

    def release(self, node_id: str, taken_in_s: float | None = None) -> None:
        """It ends as soon as nothing runs there."""
        self._drop(node_id)

    def lost(self, node_id: str) -> None:
        self._drop(node_id)

    def _drop(self, node_id: str) -> None:
        pool, ray_id = self._ours.pop(node_id, ("", ""))
        if ray_id:
            self._dropped[ray_id] = pool
            self._tell()

    def close(self, end: bool) -> None:
        self.desk.close(end)
