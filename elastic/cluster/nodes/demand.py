"""Which run waits for how many nodes of an autoscaled cluster, which it has, and which are to go.
No Ray, no clock.

Ray knows one request for the whole cluster, which the last caller sets: the sum over all runs
stands here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastic.types import Node, Pool
from elastic.types.typed_job import LEAVE_MOST_S

UNASKED_S = 10.0  # a node that nobody of us asked for may be somebody else's, who uses it by then
# what the driver before has asked for and paid comes to the next one, until it knows what it wants
TAKE_OVER_S = 45.0


def left_paid(nodes: Iterable[Node], pools: Iterable[Pool], lease_s: float) -> str:
    """What the nodes of a run without a driver cost at most until they end by themselves; '' =
    nothing."""
    kinds, names = {pool.name: pool for pool in pools}, sorted(nodes, key=lambda node: node.node_id)
    paid = [node for node in names if node.pool in kinds and kinds[node.pool].paid]
    if not paid:
        return ""
    usd_per_h = sum(kinds[node.pool].usd_per_node_h for node in paid)
    most_s = lease_s + LEAVE_MOST_S
    listed = ", ".join(node.node_id for node in paid)
    return (
        f"{len(paid)} paid node(s) stay for the run's next driver ({listed}; ${usd_per_h:.2f}/h): "
        "without one they leave after "
        f"{most_s / 60:.0f} min at the most, ${usd_per_h * most_s / 3600:.2f} more"
    )


@dataclass(frozen=True)
class DemandReport:
    """What a driver says every second. `namespace`: Ray's, which stands for the run. `waits`: nodes
    of each pool that are still to come. `held`: Ray ids of those it has, `dropped`: of those it
    wants no more, `out`: of those that it is not given, should the cluster keep them. `fresh`: the
    first of a driver that takes nothing over; of one that does `adopted` says by Ray id where it
    found workers, and of which pool: who gave them these nodes may have forgotten it."""

    namespace: str
    epoch: int
    pools: tuple[Pool, ...]
    lease_s: float
    waits: Mapping[str, int] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    fresh: bool = False
    out: frozenset[str] = frozenset()
    adopted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SeenNode:
    """A living worker node: the pool that it counts to, and whether the cluster has been told to
    give it up."""

    pool: str
    draining: bool = False


@dataclass
class _Run:
    order: DemandReport
    heard_s: float
    given: dict[str, str] = field(default_factory=dict)  # Ray id -> pool
    silent: bool = False
    # what the driver before waited for, less what has come since
    inherited: dict[str, int] = field(default_factory=dict)
    inherits_until_s: float = 0.0

    def waits(self, now_s: float) -> Mapping[str, int]:
        own, earlier = self.order.waits, self.inherited if now_s < self.inherits_until_s else {}
        return {pool: max(own.get(pool, 0), earlier.get(pool, 0)) for pool in {*own, *earlier}}


@dataclass
class Demand:
    """`leaving`: nodes that nobody wants any more, since when. `stay`: those that the cluster keeps
    all the same, for whoever asks next. `_new`: nodes that came meanwhile, since when.
    `ends_unasked`: what nobody asked for is ended from here; else the cluster does it where it is
    idle and more than it keeps anyway, of which nothing is known here (Kubernetes)."""

    ends_unasked: bool = True
    runs: dict[str, _Run] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)
    stay: set[str] = field(default_factory=set)
    _known: set[str] | None = None
    _new: dict[str, float] = field(default_factory=dict)

    def hear(self, order: DemandReport, now_s: float) -> bool:
        """False: a newer driver of the run was here."""
        run = self.runs.get(order.namespace)
        if run is not None and order.epoch < run.order.epoch:
            return False
        if run is None:
            run = self.runs[order.namespace] = _Run(order, now_s)
        if order.epoch > run.order.epoch and not order.fresh:
            run.inherited, run.inherits_until_s = {**run.order.waits}, now_s + TAKE_OVER_S
        gone = set(run.given) if order.fresh else set(order.dropped)
        if run.silent:  # it is back: what has not gone yet is its own again
            self.leaving = {
                node: since for node, since in self.leaving.items() if node not in run.given
            }
        run.order, run.heard_s, run.silent = order, now_s, False
        others = {node for other in self.runs.values() if other is not run for node in other.given}
        mine = {node for node in gone if node in run.given or node in order.dropped}
        self._leave(mine - others, now_s)
        taken = gone | others | set(self.leaving)
        adopted = {node: pool for node, pool in order.adopted.items() if node not in taken}
        run.given = {node: pool for node, pool in run.given.items() if node not in gone} | adopted
        return True

    def end(self, name: str, epoch: int, now_s: float) -> None:
        """The run is over: all that it has goes."""
        run = self.runs.get(name)
        if run is not None and epoch >= run.order.epoch:
            del self.runs[name]
            self._leave((node for node in (*run.given, *run.order.held, *run.order.dropped)), now_s)

    def look(self, nodes: Mapping[str, SeenNode], now_s: float) -> None:
        """Deals living nodes out to those that wait, and finds drivers that are silent and nodes
        that nobody asked for."""
        if self._known is not None:
            self._new |= dict.fromkeys(set(nodes) - self._known, now_s)
        self._known = (self._known or set()) | set(nodes)
        self.leaving = {node: since for node, since in self.leaving.items() if node in nodes}
        self.stay &= set(nodes)
        for run in self.runs.values():
            run.given |= {
                node: nodes[node].pool
                for node in run.order.held
                if node in nodes and node not in self.leaving
            }
            run.given = {node: pool for node, pool in run.given.items() if node in nodes}
            if now_s - run.heard_s > run.order.lease_s and not run.silent:
                run.silent = True
                self._leave(run.given, now_s)
        taken = {node for run in self.runs.values() for node in run.given} | set(self.leaving)
        free = [node for node, seen in nodes.items() if node not in taken and not seen.draining]
        for run in self.runs.values():
            for pool, n in ({} if run.silent else run.waits(now_s)).items():
                coming = [node for node in run.given if run.given[node] == pool]
                n_missing = max(0, n - len({*coming} - run.order.held))
                usable = [n for n in free if nodes[n].pool == pool and n not in run.order.out]
                for node in usable[:n_missing]:
                    run.given[node] = pool
                    free.remove(node)
                    self.stay.discard(node)
                    run.inherited[pool] = run.inherited.get(pool, 0) - 1
        if self.ends_unasked:
            self._leave(
                (node for node in free if now_s - self._new.get(node, now_s) >= UNASKED_S), now_s
            )

    def _leave(self, nodes: Iterable[str], now_s: float) -> None:
        for node in nodes:
            self.leaving.setdefault(node, now_s)

    def wanted(
        self, nodes: Mapping[str, SeenNode], now_s: float, most: Mapping[str, int] | None = None
    ) -> Counter[str]:
        """How many nodes of each pool the cluster is to have for us; those that it gives up do not
        count. One that a run which waits is not given counts too: to the cluster it would be the
        node that is waited for; but no more than `most` nodes of a pool, where that is known: a
        cluster that cannot have all that is asked of it starts nothing."""
        total: Counter[str] = Counter()
        taken = {node for run in self.runs.values() for node in run.given} | set(self.leaving)
        beside: set[str] = set()
        for run in self.runs.values():
            if not run.silent:
                total.update({pool: n for pool, n in run.waits(now_s).items() if n > 0})
                total.update(
                    nodes[n].pool
                    for n in run.order.held
                    if n in nodes and not nodes[n].draining and n in run.given
                )
                beside |= {
                    n
                    for n in run.order.out - taken
                    if n in nodes
                    and not nodes[n].draining
                    and run.waits(now_s).get(nodes[n].pool, 0) > 0
                }
        for pool, n in Counter(nodes[name].pool for name in beside).items():
            room = (most or {}).get(pool, 0)
            total[pool] += max(0, min(n, room - total[pool])) if room else n
        return total

    def coming(
        self, name: str, instances: Mapping[str, int], types: Mapping[str, str], *, now_s: float
    ) -> dict[str, int]:
        """By pool: how many of the `instances` (by node type) that are on their way are this run's.
        Each run has those that it still waits for, in the order in which nodes are given; what
        nobody waits for is of whoever gave it up. `types`: pool -> node type."""
        left, own = Counter(instances), Counter[str]()
        for namespace, run in self.runs.items():
            given = Counter(run.given[node] for node in run.given.keys() - run.order.held)
            for pool, n in ({} if run.silent else run.waits(now_s)).items():
                kind = types.get(pool, pool)
                found = max(0, min(n - given[pool], left[kind]))
                left[kind] -= found
                own[pool] += found if namespace == name else 0
        return {pool: own[pool] + left[kind] for pool, kind in types.items()}

    def overdue(self, now_s: float) -> list[_Run]:
        """Runs without a driver whose workers should have left by now."""
        return [
            run
            for run in self.runs.values()
            if run.silent and now_s - run.heard_s > run.order.lease_s + LEAVE_MOST_S
        ]

    def forget_gone(self) -> None:
        """Silent runs of which no node is left."""
        self.runs = {
            name: run
            for name, run in self.runs.items()
            if not run.silent or any(n in self.leaving for n in run.given)
        }

    def given(self, name: str) -> dict[str, str]:
        """Ray id -> pool."""
        run = self.runs.get(name)
        return {} if run is None else dict(run.given)

    def to_drain(self, nodes: Mapping[str, SeenNode], least: Mapping[str, int]) -> list[str]:
        """Nodes that are to go now. One that the autoscaler would replace at once (`least` nodes of
        a pool) stays, for whoever asks next."""
        stay = Counter(
            seen.pool
            for node, seen in nodes.items()
            if not seen.draining and node not in self.leaving
        )
        for node in sorted(self.leaving.keys() & nodes.keys()):
            pool = nodes[node].pool
            if stay[pool] < least.get(pool, 0) and not nodes[node].draining:
                stay[pool] += 1
                self._new.pop(node, None)
                del self.leaving[node]
                self.stay.add(node)
        return sorted(self.leaving.keys() & nodes.keys())
