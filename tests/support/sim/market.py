"""Markets for simulated runs: pools, and what happens to them, drawn by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.policy.state.fold import State
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted, Job, ModelProfile, OptimizerSpec, Pool, TensorSpec

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
    tp_limit=2,
)
SPOT, FIXED = (
    Pool("spot", "CPU", 1, "spot", 1.2, 0, 4),
    Pool("fixed", "CPU", 1, "on-demand", 3.4, 0, 4),
)
# a step takes a minute on four workers
SLOW = Delays(boot_s=90.0, prepare_s=60.0, work_s=240.0, store_s=5.0)
JOB: dict[str, Any] = {
    "name": "market", "steps": 120, "global_batch": 12, "seed": 0, "layout": "auto",
    "min_workers": 2, "max_workers": 4, "peer_every": "auto", "durable_every": 10,
    "budget_usd": None, "max_nodes": None, "purpose": "cheapest",
}  # fmt: skip


@dataclass
class Run:
    state: State
    backend: SimBackend
    journal: MemoryJournal

    @property
    def hours(self) -> float:
        return self.backend.now_s() / 3600

    @property
    def done(self) -> bool:
        return self.state.phase == "succeeded"


def play(
    faults: Sequence[Fault] = (),
    pools: tuple[Pool, ...] = (SPOT, FIXED),
    delays: Delays = SLOW,
    **changes: Any,
) -> Run:
    job = JOB | changes
    names = [pool.name for pool in pools]
    known = [fault for fault in faults if not fault.pool or fault.pool in names]
    backend, journal = SimBackend(pools, Job.from_plain(job), known, delays=delays), MemoryJournal()
    start = DriverStarted("market", 1, job, pools, MODEL, spends_slack=True)
    return Run(drive(backend, journal, start), backend, journal)


def reasons(run: Run, word: str) -> list[str]:
    """Of the decisions that gave orders, those with the word."""
    found = [line.decision for line in run.journal.lines if line.decision and line.decision.actions]
    return [decision.reason for decision in found if word in decision.reason]


def weather(seed: int, hours: float) -> list[Fault]:
    """A spot market: droughts that begin with the reclaim of most nodes, single reclaims, prices
    that change."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = chance.uniform(0, 3600)
    mean_s = chance.choice([1200, 3600, 7200])
    while at_s < hours * 3600:
        lasts_s = chance.expovariate(1 / mean_s)
        faults.append(Fault(at_s, "drought", pool="spot", lasts_s=lasts_s))
        n = chance.randint(0, 4)
        faults += [
            Fault(at_s + k, chance.choice(["notice", "notice", "loss"]), 0, 120.0, only="spot")
            for k in range(n)
        ]
        at_s += lasts_s + chance.expovariate(1 / 3600)
    for _ in range(chance.randint(0, 6)):
        faults.append(
            Fault(
                chance.uniform(0, hours * 3600),
                chance.choice(["notice", "loss"]),
                0,
                120.0,
                only="spot",
            )
        )
    for _ in range(chance.randint(0, 3)):
        faults.append(
            Fault(
                chance.uniform(0, hours * 3600),
                "price",
                pool="spot",
                amount=chance.uniform(0.5, 4.0),
            )
        )
    return faults
