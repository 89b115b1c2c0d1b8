"""The simulated cluster with markets: pools give and take nodes as their traces say."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic.sim.markets.traces import Trace
from elastic.sim.scripted_faults import Delays, Moment
from elastic.sim.sim_backend import SimBackend
from elastic.sim.sim_breaks import SimGeneration
from elastic.sim.sim_nodes import NodePrices, SimMachine
from elastic.types import (
    EnterPlan,
    Holding,
    InstancesSeen,
    Job,
    Plan,
    Pool,
    PriceSeen,
    RequestFailed,
    RequestNodes,
    Stop,
    StopAsked,
    WorkerId,
)

ANSWER_S = 1.0  # of a pool that has nothing
KEPT_GONE, KEPT_GROUPS = 256, 16  # nodes and generations that are over, the newest


@dataclass(frozen=True)
class PoolMarket:
    """What a pool has: its trace, from `start_at_s` of it on. `unannounced`: the share of nodes
    that are taken without the pool's notice."""

    trace: Trace
    start_at_s: float = 0.0
    unannounced: float = 0.0

    def nodes_at(self, at_s: float) -> int:
        return self.trace.nodes_at(self.start_at_s + at_s)


class MarketBackend(SimBackend):
    """`markets`: pool -> what it has; a pool without one has all that it may. `step_s`: what a step
    of a plan takes. `until_s`: the traces are followed so far. `batch_s`: so much undisturbed
    training is one event; whatever happens in it happens at the step that it falls into.
    Deterministic for a `seed`."""

    def __init__(
        self,
        pools: tuple[Pool, ...],
        job: Job,
        markets: Mapping[str, PoolMarket],
        *,
        delays: Delays,
        until_s: float,
        step_s: Callable[[Plan], float] | None = None,
        batch_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(pools, job, delays=delays)
        self._batch_s = batch_s
        self._markets, self._chance = dict(markets), random.Random(seed)
        self._took_s = step_s
        self.n_taken = 0
        # generation -> the newest step and copy that its workers have, not written down yet: of
        # undisturbed training only the newest are ever asked for
        self._late_steps: dict[int, tuple[SimGeneration, int]] = {}
        self._late_copies: dict[int, tuple[SimGeneration, int]] = {}
        self._gone: deque[str] = deque()
        self._gone_gpu_s = self._gone_usd = 0.0
        # of machines that start: pool, request, moment; a cloud bills them from their launch on
        self._launched: list[tuple[str, str, float]] = []
        for pool in pools:
            market = self._markets.get(pool.name)
            if market is not None:
                self._follow(pool, market, until_s)

    def _follow(self, pool: Pool, market: PoolMarket, until_s: float) -> None:
        """One change of the trace after the other: the next one is looked up when one has
        happened."""
        changes = iter(market.trace.changes(market.start_at_s, market.start_at_s + until_s))
        usd = market.trace.usd_at(market.start_at_s)
        if usd is not None and usd != pool.usd_per_node_h:
            self._prices[pool.name] = NodePrices(usd)
            self._tell(PriceSeen(pool.name, usd))

        def follow() -> None:
            at_s = next(changes, None)
            if at_s is None:
                return
            ahead_s = max(self._now_s, at_s - pool.notice_s)
            self._at(ahead_s, lambda: self._announce(pool, market, at_s))
            self._at(at_s, lambda: self._change(pool, market, at_s))
            self._at(at_s, follow)

        follow()

    def give_up_at(self, at_s: float) -> None:
        """A run that no deadline ends is asked to stop then."""
        text = f"given up after {at_s / 3600:.1f} h"
        self._at(at_s, lambda: self._tell(StopAsked(text)))

    def _announce(self, pool: Pool, market: PoolMarket, at_s: float) -> None:
        """Nodes that will be too many get the pool's notice, but for those that get none."""
        there = self._living[pool.name]
        free = [name for name in there if self._machines[name].deadline_s is None]
        n = len(free) - market.nodes_at(at_s)
        for name in self._chance.sample(free, max(0, min(n, len(free)))):
            if self._chance.random() >= market.unannounced and at_s > self._now_s:
                self._notice(name, at_s - self._now_s)
                self.n_taken += 1

    def _change(self, pool: Pool, market: PoolMarket, at_s: float) -> None:
        usd = market.trace.usd_at(market.start_at_s + at_s)
        if usd is not None and usd != self._prices[pool.name].now_usd_per_h:
            self._prices[pool.name].change(self._now_s, usd)
            self._tell(PriceSeen(pool.name, usd))
        living = self._living[pool.name]
        there = [name for name in living if self._machines[name].deadline_s is None]
        n = len(there) - market.nodes_at(at_s)
        for name in self._chance.sample(there, max(0, min(n, len(there)))):
            self._lose(name, "taken", self.delays.confirm_s)
            self.n_taken += 1

    def _room(self, pool: Pool) -> int:
        """And no more than its market has."""
        there, coming = self._living[pool.name], self._coming.get(pool.name, 0)
        market, room = self._markets.get(pool.name), super()._room(pool)
        if market is not None:
            room = min(room, market.nodes_at(self._now_s) - len(there) - coming)
        return max(0, room)

    def _request(self, action: RequestNodes) -> None:
        """As many as there are; for the rest the pool says no."""
        pool = next(p for p in self.pools if p.name == action.pool)
        before, n = len(self._launched), min(action.count, self._room(pool))
        if n < action.count:
            self._tell(RequestFailed(pool.name, action.request_id, "no capacity"), ANSWER_S)
        if n or not action.count:
            super()._request(RequestNodes(pool.name, n, action.request_id))
        if not action.count:  # withdrawn: what starts for it ends
            for row in [row for row in self._launched if row[1] == action.request_id]:
                self._never_comes(*row)
        self._launched += [(pool.name, action.request_id, self._now_s)] * n
        if len(self._launched) != before:
            self._tell_starting(pool.name)

    def _tell_starting(self, pool: str) -> None:
        self._tell(InstancesSeen(pool, sum(row[0] == pool for row in self._launched)))

    def _never_comes(self, pool: str, request_id: str, launched_s: float) -> None:
        """What was paid for it stays on the bill."""
        self._launched.remove((pool, request_id, launched_s))
        gpus = next(p.gpus_per_node for p in self.pools if p.name == pool)
        self._gone_gpu_s += (self._now_s - launched_s) * gpus
        self._gone_usd += self._cost(pool, launched_s, self._now_s)

    def _stop(self, action: Stop) -> None:
        for row in list(self._launched):
            self._never_comes(*row)
        super()._stop(action)

    def _come(self, pool: Pool, request_id: str) -> None:
        """What has been taken while it started never comes."""
        row = next((row for row in self._launched if row[1] == request_id), None)
        market = self._markets.get(pool.name)
        if row and market and len(self._living[pool.name]) >= market.nodes_at(self._now_s):
            self._coming[pool.name] = max(0, self._coming.get(pool.name, 0) - 1)
            self._never_comes(*row)
            self._tell(RequestFailed(pool.name, request_id, "taken while it started"))
            self._tell_starting(pool.name)
            return
        super()._come(pool, request_id)
        if row:
            self._launched.remove(row)
            next(reversed(self._machines.values())).born_s = row[2]

    def _plan_step_s(self, plan: Plan) -> float:
        return self._took_s(plan) if self._took_s is not None else super()._plan_step_s(plan)

    # ----------------------------------------------------------------------- what is over is summed

    def gpu_seconds(self) -> float:
        return self._gone_gpu_s + super().gpu_seconds()

    def usd(self) -> float:
        return self._gone_usd + super().usd()

    def _confirmed(self, machine: SimMachine) -> None:
        """Of nodes that are gone for long only the bill is kept: a run may have a million."""
        self._gone.append(machine.node.node_id)
        while len(self._gone) > KEPT_GONE:
            old = self._machines.pop(self._gone.popleft())
            self._told_lost.discard(old.node.node_id)
            lived_s = (old.gone_s or 0.0) - old.born_s
            self._gone_gpu_s += lived_s * old.node.gpus
            self._gone_usd += self._cost(old.node.pool, old.born_s, old.born_s + lived_s)

    def _enter(self, action: EnterPlan) -> None:
        super()._enter(action)
        if len(self._groups) > 2 * KEPT_GROUPS:
            held = {one.generation for holdings in self._held.values() for one in holdings}
            newest = action.plan.generation - KEPT_GROUPS
            self._groups = {
                number: group
                for number, group in self._groups.items()
                if number > newest or number in held or not group.ended
            }

    @property
    def _held(self) -> dict[WorkerId, tuple[Holding, ...]]:
        """What workers hold: brought up to date when somebody asks for it."""
        copies, self._late_copies = self._late_copies, {}
        steps, self._late_steps = self._late_steps, {}
        for group, step in copies.values():
            super()._hold_copies(group, step)
        for group, step in steps.values():
            super()._hold_step(group, step)
        return self._holdings

    @_held.setter
    def _held(self, holdings: dict[WorkerId, tuple[Holding, ...]]) -> None:
        self._holdings = holdings

    def _hold_step(self, group: SimGeneration, step: int) -> None:
        self._late_steps[group.plan.generation] = group, step

    def _hold_copies(self, group: SimGeneration, step: int) -> None:
        self._late_copies[group.plan.generation] = group, step

    # ----------------------------------------------------------------------------- steps in batches

    def _batch(self, group: SimGeneration) -> int:
        """Up to a checkpoint, the last one that falls into it, and to the end of its phase."""
        n = int(self._batch_s / group.step_s) if group.step_s else 1
        every = group.plan.durable_every
        if every:
            to_next = every - group.step % every
            n = to_next + max(0, n - to_next) // every * every if n >= to_next else n
        return max(1, min(n, self._job_of(group.plan).until_step - group.step))

    def _lose(
        self, node_id: str, cause: str, confirm_s: float, *, moment: Moment = "inside"
    ) -> None:
        """What was copied to peers since the batch began is there."""
        for group in self._running():
            if node_id in group.plan.workers_per_node:
                self._catch_up(group)
        super()._lose(node_id, cause, confirm_s, moment=moment)

    def _catch_up(self, group: SimGeneration) -> None:
        plan = group.plan
        if not plan.copies_to or not plan.peer_every or group.batch <= 1:
            return
        worked_s = self._now_s - group.began_s - self.delays.copy_s
        step = group.step + max(0, int(worked_s / group.step_s))
        step = min(step, self._job_of(plan).until_step)  # behind it nothing is computed
        step -= step % plan.peer_every
        if step <= group.step:
            return
        group.batch = step - group.step
        self._step(group)
        self._acknowledged(group, step)
