"""Plans without a policy: which layouts a number of ranks can take, and the generations that the
checks go through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from elastic.planner.hetero.unequal_shares import microbatches, shares, stage_layers
from elastic.policy.copies.replica_placement import replica_holders
from elastic.types import Holding, Layout, Plan, Resume, WorkerId

N_BLOCKS, TP_LIMIT, GLOBAL_BATCH = 8, 8, 48  # of programs/small.py


def factors(n: int) -> Iterator[tuple[int, int, int, int]]:
    """All ways to write n as a product of four numbers, in order."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    for a, b, c in product(divisors, repeat=3):
        if n % (a * b * c) == 0:
            yield a, b, c, n // (a * b * c)


def layouts(n: int) -> list[Layout]:
    """Every layout of dp_replicate, dp_shard, tp and pp for exactly `n` ranks that the small
    program can be cut into."""
    found = [Layout(pp=pp, dp_replicate=r, dp_shard=s, tp=tp) for pp, r, s, tp in factors(n)]
    return [
        one
        for one in found
        if one.pp <= N_BLOCKS and TP_LIMIT % one.tp == 0 and one.dp <= GLOBAL_BATCH
    ]


def all_layouts(most: int) -> list[Layout]:
    """Those of all numbers of ranks up to `most`, the largest first."""
    return [layout for n in range(most, 0, -1) for layout in layouts(n)]


def plan_of(
    number: int, layout: Layout, workers: Sequence[WorkerId], *, n_blocks: int, **more: Any
) -> Plan:
    """Generation `number` on the first workers; `more`: other fields of Plan. With peer replicas
    each rank has one keeper."""
    ranks = tuple(workers[: layout.world_size])
    n = microbatches(GLOBAL_BATCH, layout)
    samples = shares(GLOBAL_BATCH // n, [1.0] * layout.dp, n)
    if more.get("peer_every"):
        more["copies_to"] = replica_holders(layout, ranks, {}, n=1)
    return Plan(number, layout, ranks, samples, stage_layers(n_blocks, layout.pp), n, **more)


def live(old: Plan) -> Resume:
    """From the running generation, at the boundary where it stops."""
    holdings = tuple(
        Holding(worker, old.generation, rank, -1, "live") for rank, worker in enumerate(old.ranks)
    )
    return Resume("live", -1, old.generation, old.layout, old.layers, holdings)


def job_of(name: str, program: str, steps: int) -> dict[str, Any]:
    """What a session needs to know of a job."""
    return {
        "name": name, "program": program, "steps": steps, "global_batch": GLOBAL_BATCH, "seed": 7,
        "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
    }  # fmt: skip
