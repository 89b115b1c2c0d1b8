"""Which nodes of its pools a run has while they give all that they have: what its policy asks of
them when it begins."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from elastic.api.planning.plan_nodes import MachineGroup, known_of
from elastic.policy.pools import pool_allocation
from elastic.policy.state.fold import State, fold
from elastic.types import DriverStarted, Job, ModelProfile, Pool
from elastic.types.gates import newest_gates


@dataclass(frozen=True)
class RunNodes:
    """Of each pool, by name. `standby`: of these, those on demand that it takes only while too few
    others are there to run at all, or the deadline needs them; `notes`: why they are not all."""

    nodes: Mapping[str, int]
    standby: Mapping[str, int]
    notes: tuple[str, ...]


def run_nodes(job: Job, model: ModelProfile, pools: Sequence[Pool]) -> RunNodes:
    state = _begun(job, model, pools)
    fixed = pool_allocation.on_demand(state)
    others = [pool for pool in pool_allocation.by_price(state) if pool not in fixed]
    floor: float = inf
    if pool_allocation.cheapest(state) and others:
        floor = pool_allocation.floor_nodes(state, fixed)[0]
    left: float = inf if job.max_nodes is None else job.max_nodes
    nodes, standby = {pool.name: 0 for pool in pools}, {pool.name: 0 for pool in pools}
    for pool in [*others, *fixed] if floor == inf else [*fixed, *others]:
        most = min(pool.max_nodes, left, floor if pool in fixed else inf)
        nodes[pool.name] = n = int(max(0, most))
        left, floor = left - n, floor - n * (pool in fixed)
    least = pool_allocation.least_workers(state)
    if job.deadline_h:
        least = max(least, pool_allocation.steady_workers(state, fixed))
    missing = least - sum(nodes[pool.name] * pool.gpus_per_node for pool in pools)
    for pool in fixed:
        room = min(pool.max_nodes - nodes[pool.name], left, ceil(missing / pool.gpus_per_node))
        standby[pool.name] = n = int(max(0, room))
        left, missing = left - n, missing - n * pool.gpus_per_node
    every = {pool.name: nodes[pool.name] + standby[pool.name] for pool in pools}
    notes = [too_many(job, sum(pool.max_nodes for pool in pools))]
    if pool_allocation.cheapest(state):
        notes += [_few(pool, every[pool.name]) for pool in fixed]
    return RunNodes(every, standby, tuple(filter(None, notes)))


def least_workers(job: Job, model: ModelProfile, pools: Sequence[Pool]) -> int:
    """With fewer a run of it takes nodes on demand that stand by."""
    return pool_allocation.least_workers(_begun(job, model, pools))


def _begun(job: Job, model: ModelProfile, pools: Sequence[Pool]) -> State:
    plain, gates = job.plain() | {"drill": []}, newest_gates(forms_ahead=False)
    known = known_of(pools)
    started = DriverStarted(job.name, 1, plain, tuple(pools), model, known, **gates)
    return fold(State(), started, time.time())  # reservations end by the clock


def within_max_nodes(job: Job, machines: Sequence[MachineGroup]) -> Sequence[MachineGroup]:
    """The first of them, where the job bounds their number."""
    left = job.max_nodes or sum(each.group.n_nodes for each in machines)
    found = []
    for each in machines:
        n = min(each.group.n_nodes, left)
        found += [each.with_nodes(n)] if n else []
        left -= n
    return found


def too_many(job: Job, n_nodes: int) -> str:
    """That max_nodes is less; '' = it is not."""
    if not job.max_nodes or job.max_nodes >= n_nodes:
        return ""
    return f"max_nodes={job.max_nodes}: elastic run pays for no more of these {n_nodes} nodes"


def _few(pool: Pool, n: int) -> str:
    if n >= pool.max_nodes:
        return ""
    return (
        f"{n} of {pool.max_nodes} nodes of pool {pool.name} (on demand): elastic run takes more "
        "only while too few others are there, or the deadline needs them"
    )
