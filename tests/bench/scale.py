"""How what the driver does grows with the cluster: CPU seconds of one process, at sizes up to 8,192 GPUs; nothing is trained.

`moves`: the forecast of a transition, and the transfers of one rank, of an 8B model when a node of eight GPUs goes.
`decisions`: the real driver loop, policy and state over simulated nodes of eight GPUs, with two losses and two notices;
`decision_ms` of all looks, `change_ms` of those that order a new plan.
`gather`: the parts of one durable copy on their way to a commit. `orders`: what a worker is sent to enter a generation.

`exponent`: of the growth between the first and the last size (1 = as the cluster).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from math import log
from statistics import median
from time import process_time
from typing import Any

import report
from trial import Clock

from elastic.driver import drive
from elastic.ledger.journal import Memory
from elastic.planner import known_decoders
from elastic.policy.decide import decide
from elastic.policy.state import State
from elastic.reshard.forecast import Pace, Room, forecast
from elastic.reshard.transfers import plan_transfers
from elastic.sim.backend import SimBackend
from elastic.sim.faults import Delays, Fault
from elastic.types import Decision, DriverStarted, EnterPlan, Layout, ModelProfile, Plan, Pool, ShardStored, WorkerId
from elastic.worker.gather import Gather
from elastic.worker.workplace import EnterOrder

PER_NODE = 8
PARTS = ("moves", "decisions", "gather", "orders")
SIZES = {"moves": (64, 512, 4096, 8192), "decisions": (64, 256, 1024), "gather": (64, 512, 8192), "orders": (64, 512, 8192)}
SMOKE_SIZES = (16, 64)
UNITS_S = {"s": 1.0, "ms": 1e-3}
MOST_S = 900.0
STEPS = 40


def model() -> ModelProfile:
    return known_decoders.find("llama3-8b,seq=4096").decoder.profile()


def workers(n: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"spot-{rank // PER_NODE}", rank % PER_NODE) for rank in range(n))


def seconds(work: Callable[[], object]) -> float:
    began_s = process_time()
    work()
    return process_time() - began_s


def exponent(first: tuple[int, float], last: tuple[int, float]) -> float:
    """p of seconds ~ size ** p; times below a tenth of a millisecond count as that."""
    return round(log(max(last[1], 1e-4) / max(first[1], 1e-4)) / log(last[0] / first[0]), 2)


def moves(n: int, profile: ModelProfile) -> dict[str, float]:
    """The slowest of three kinds of layouts."""
    left = n // PER_NODE - 1
    cuts = [
        (Layout(dp_shard=n), Layout(dp_shard=PER_NODE * left)),
        (Layout(dp_shard=n // PER_NODE, tp=PER_NODE), Layout(dp_shard=left, tp=PER_NODE)),
        (Layout(dp_shard=n // PER_NODE, tp=PER_NODE), Layout(pp=4, dp_shard=n // 16, tp=4)),
    ]
    nodes, holders = [worker.node_id for worker in workers(n)], {rank: (rank,) for rank in range(n)}
    found = []
    for old, new in cuts:
        blocks = profile.n_blocks // 4
        sides = (old, ()), (new, (blocks,) * 4 if new.pp > 1 else ())
        told_s = seconds(lambda s=sides: forecast(profile, *s, holders, nodes, (Room(), Pace())))  # type: ignore[misc]
        found.append((told_s, seconds(lambda s=sides: plan_transfers(profile, *s, holders, nodes, me=0))))  # type: ignore[misc]
    return {"forecast_s": round(max(told for told, _ in found), 3), "transfers_s": round(max(own for _, own in found), 3)}


def decisions(n: int, profile: ModelProfile) -> dict[str, float]:
    n_nodes, took, changes = n // PER_NODE, [], []
    pools = (Pool("spot", "H100", PER_NODE, "spot", 0.0, 0, n_nodes),)
    job = {
        "name": "scale", "steps": STEPS, "global_batch": 2 * n, "microbatch_size": 1, "seed": 0, "layout": "auto",
        "min_workers": PER_NODE, "peer_every": 5, "durable_every": 20,
    }  # fmt: skip
    faults = [Fault(100.0 + 60 * i, "notice" if i % 2 else "loss", 3 * i, 30.0) for i in range(4)]

    def timed(state: State, now_s: float) -> Decision:
        began_s = process_time()
        found = decide(state, now_s)
        took.append(process_time() - began_s)
        if any(isinstance(action, EnterPlan) for action in found.actions):
            changes.append(took[-1])
        return found

    backend = SimBackend(pools, job, faults, Delays(work_s=10.0 * n))
    state = drive(backend, Memory(), DriverStarted("scale", 1, job, pools, profile), decide=timed)
    if state.phase != "succeeded" or len(changes) < 3:
        raise AssertionError(f"{n} GPUs: {state.phase} after {len(changes)} changes: {state.outcome_reason}")
    numbers = {"decision": median(took), "change": median(changes)}
    return {f"{name}_ms": round(1000 * value, 2) for name, value in numbers.items()}


def plan_of(n: int) -> Plan:
    return Plan(1, Layout(dp_shard=n), workers(n), (1,) * n, (32,))


def gather(n: int, profile: ModelProfile) -> dict[str, float]:
    plan, complete = plan_of(n), []
    found = Gather(complete.append, lambda node_id: PER_NODE)
    found.expect(plan)
    told = [(worker, ShardStored(1, 5, rank, 8, 0.1, 0.0, rank)) for rank, worker in enumerate(plan.ranks)]

    def add() -> None:
        for worker, event in told:
            found.add(worker, event)

    took_s = seconds(add)
    if len(complete) != 1:
        raise AssertionError(f"{n} parts did not become one copy")
    return {"gather_s": round(took_s, 4)}


def orders(n: int, profile: ModelProfile) -> dict[str, float]:
    plan = plan_of(n)
    order = EnterOrder(plan, plan.ranks, 0, ("127.0.0.1", 29500), 60.0, "secret")
    return {"order_kb": round(len(pickle.dumps(order)) / 1e3, 1)}


MEASURES = {"moves": moves, "decisions": decisions, "gather": gather, "orders": orders}


def measure(clock: Clock, parts: list[str], smoke: bool) -> dict[str, Any]:
    profile, found = model(), {}
    for part in parts:
        sizes = SMOKE_SIZES if smoke else SIZES[part]
        by_size = {}
        for n in sizes:
            clock.look(f"{part} {n}")
            by_size[n] = MEASURES[part](n, profile)
        found[part] = {str(n): numbers for n, numbers in by_size.items()}
        for name in by_size[sizes[0]]:
            quantity, _, unit = name.rpartition("_")
            if unit in UNITS_S:
                ends = [(n, by_size[n][name] * UNITS_S[unit]) for n in (sizes[0], sizes[-1])]
                found[f"{quantity}_exponent"] = exponent(*ends)
    return found


def main() -> int:
    given = report.options(__doc__, MOST_S, repeats=1, parts=PARTS)
    return report.finish("scale", given, lambda clock: measure(clock, given.parts, given.smoke))


if __name__ == "__main__":
    sys.exit(main())
