"""Plans for tests of the worker, made without a policy."""

from __future__ import annotations

from typing import Any

from elastic.planner.hetero.unequal_shares import microbatches
from elastic.policy.copies.replica_placement import replica_holders
from elastic.types import Holding, Layout, Plan, Resume, WorkerId

N_BLOCKS = 4  # of the tiny programs


def shares(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    units = total // unit
    assert units * unit == total
    return tuple(unit * (units // parts + (i < units % parts)) for i in range(parts))


def plan(
    generation: int, layout: Layout, workers: list[WorkerId], global_batch: int, **more: Any
) -> Plan:
    """A plan on the first workers; `more`: other fields of Plan, and `n_blocks` and `together` of
    the model."""
    unit = more.pop("together", 1)
    layers = shares(more.pop("n_blocks", N_BLOCKS), layout.n_stages)
    full = 1
    if layout.pp > 1:
        # under tensor parallelism a pass costs tenfold, and schedules are the same
        once = layout.tp > 1 or global_batch % (2 * layout.pp * unit) > 0
        full = layout.pp if once else 2 * layout.pp
    fewest = microbatches(global_batch, layout, unit) if layout.microbatch_size else full
    m = more.pop("n_microbatches", fewest)
    ranks = tuple(workers[: layout.world_size])
    if more.get("peer_every") and "copies_to" not in more:
        n, alone = more.pop("n_copies", 1), more.pop("alone", False)
        more["copies_to"] = replica_holders(layout, ranks, {}, n=n, alone=alone)
    samples = more.pop("samples", None) or shares(global_batch, layout.dp, m * max(1, unit))
    return Plan(generation, layout, ranks, samples, layers, m, **more)


def live(old: Plan) -> Resume:
    holdings = tuple(
        Holding(worker, old.generation, rank, -1, "live") for rank, worker in enumerate(old.ranks)
    )
    return Resume("live", -1, old.generation, old.layout, old.layers, holdings)


def from_copies(old: Plan, step: int, holdings: tuple[Holding, ...]) -> Resume:
    return Resume("peer", step, old.generation, old.layout, old.layers, holdings)
