"""Random worlds for the simulator of markets: a job, its pools, their traces, and how long things
take there."""

from __future__ import annotations

import random
from dataclasses import dataclass

from support.sim.scenario import MODEL

from elastic.sim.markets.generators import usual
from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import RunSubject
from elastic.sim.markets.traces import Trace, merged
from elastic.sim.scripted_faults import Delays
from elastic.types import Job, Plan, Pool

HOUR = 3600.0


@dataclass(frozen=True)
class WorldStep:
    """Seconds of a step: `fixed_s`, and `work_s` shared by all workers."""

    fixed_s: float
    work_s: float

    def __call__(self, plan: Plan) -> float:
        return self.of(len(plan.ranks))

    def of(self, workers: int) -> float:
        return self.fixed_s + self.work_s / workers


@dataclass(frozen=True)
class World:
    subject: RunSubject
    markets: dict[str, PoolMarket]
    seed: int


def world(seed: int) -> World:
    """Everything is drawn from the seed."""
    chance = random.Random(seed)
    spot = tuple(_spot(chance, k) for k in range(chance.choice([1, 1, 1, 2, 3])))
    pools = (*spot, *_others(chance))
    most = sum(pool.gpus_per_node * pool.max_nodes for pool in pools)
    step_s = chance.choice([2.0, 10.0, 20.0])
    steps = chance.randint(20, 120)
    fixed_s = chance.choice([0.0, 0.0, 0.1, 0.5]) * step_s
    step = WorldStep(fixed_s, (step_s - fixed_s) * most)
    ideal_s = steps * step_s
    times = chance.choice([None, None, 1.1, 1.5, 2.0, 4.0])
    usd_per_h = sum(pool.usd_per_node_h * pool.max_nodes for pool in pools)
    share = chance.choice([None, None, None, None, 0.2, 0.5, 1.0, 3.0])
    job = {
        "name": f"world-{seed}", "steps": steps, "global_batch": 48, "seed": 0, "layout": "auto",
        "min_workers": chance.choice([1, 1, 2, 4]),
        "max_workers": chance.choice([None, None, chance.randint(2, max(2, most))]),
        "max_nodes": chance.choice([None, None, chance.randint(1, 6)]),
        "peer_every": chance.choice(["auto", 1, 5]), "peer_copies": chance.choice([0, 1, 1, 1]),
        "durable_every": chance.choice(["auto", 5, 30, 0]),
        "deadline_h": times and times * ideal_s / HOUR + 0.3,
        "budget_usd": share and share * usd_per_h * (ideal_s / HOUR + 0.3),
        "purpose": chance.choice(["auto", "fastest", "cheapest"]) if not times else "deadline",
        "on_demand_floor": chance.choice(["auto", "auto", 0, 1, "copy"]),
    }  # fmt: skip
    # else config/job.py would refuse it
    job["min_workers"] = min(job["min_workers"], job["max_workers"] or job["min_workers"])
    delays = Delays(
        boot_s=chance.uniform(5, 400), prepare_s=chance.uniform(2, 300),
        enter_s=chance.uniform(0.3, 30), restore_s=chance.uniform(1, 60),
        store_s=chance.uniform(0.5, 30), copy_s=chance.uniform(0.01, 2.0),
        confirm_s=chance.choice([0.5, 10.0, 40.0]), groups_s=chance.choice([0.0, 0.0, 0.3]),
    )  # fmt: skip
    batch_s = chance.choice([0.0, 60.0])
    subject = RunSubject(
        job["name"], Job.from_plain(job), pools, MODEL, step, ideal_s, delays, batch_s=batch_s
    )
    return World(subject, {pool.name: _market(chance, pool, ideal_s) for pool in spot}, seed)


def _spot(chance: random.Random, k: int) -> Pool:
    notice_s = chance.choice([0.0, 30.0, 120.0, 120.0])
    price = chance.uniform(0.2, 3.0)
    gpus = chance.choice([1, 1, 2, 4])
    return Pool(f"spot-{k}", "CPU", gpus, "spot", price, 0, chance.randint(1, 6), notice_s=notice_s)


def _others(chance: random.Random) -> list[Pool]:
    """On demand, reserved for some time, one's own: each of them now and then."""
    found = []
    if chance.random() < 0.6:
        price, n = chance.uniform(1.0, 9.0), chance.randint(1, 6)
        found.append(Pool("on-demand", "CPU", chance.choice([1, 2, 4]), "on-demand", price, 0, n))
    if chance.random() < 0.15:
        ends_s = chance.choice([None, chance.uniform(600, 4 * HOUR)])
        found.append(Pool("reserved", "CPU", 1, "reserved", 1.5, 0, 2, ends_at_s=ends_s))
    if chance.random() < 0.1:
        found.append(Pool("own", "CPU", 1, "owned", 0.0, 0, 1))
    return found


def _market(chance: random.Random, pool: Pool, ideal_s: float) -> PoolMarket:
    """Steps by chance, a pool whose nodes are taken one by one, or one that is always there."""
    length_s = chance.uniform(0.5, 6) * max(HOUR, ideal_s)
    kind = chance.random()
    if kind < 0.5:
        trace = _steps(chance, pool, length_s)
    elif kind < 0.9:
        rate, dry_h = chance.choice([0.05, 0.5, 3.0]), chance.choice([0.05, 0.25, 2.0])
        trace = usual(
            pool.name, nodes=pool.max_nodes, length_s=length_s, taken_per_node_h=rate,
            dry_h=dry_h, seed=chance.randrange(10**6),
        )  # fmt: skip
    else:
        trace = Trace(pool.name, (0.0,), (pool.max_nodes,), length_s)
    unannounced = chance.choice([0.0, 0.0, 0.1, 0.5, 1.0])
    return PoolMarket(trace, chance.uniform(0, 2 * length_s), unannounced)


def _steps(chance: random.Random, pool: Pool, length_s: float) -> Trace:
    stay_s, scarce = chance.choice([120.0, 600.0, HOUR]), chance.random() < 0.3
    at_s, nodes, prices, now_s = [], [], list[float](), 0.0
    changes = chance.random() < 0.3
    while now_s < length_s and len(at_s) < 400:
        at_s.append(now_s)
        level = chance.randint(0, pool.max_nodes)
        nodes.append(min(level, chance.randint(0, pool.max_nodes)) if scarce else level)
        prices += [pool.usd_per_node_h * chance.choice([0.5, 1.0, 3.0])] if changes else []
        now_s += chance.expovariate(1 / stay_s) + 1.0
    return merged(pool.name, at_s, nodes, ends_s=now_s, prices=prices)
