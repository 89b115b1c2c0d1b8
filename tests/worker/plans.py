"""Plans for tests of the worker, made without a policy."""

from __future__ import annotations

from elastic.types import Cause, Holding, Layout, Plan, Resume, WorkerId


def shares(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    units = total // unit
    assert units * unit == total
    return tuple(unit * (units // parts + (i < units % parts)) for i in range(parts))


def plan(
    generation: int,
    layout: Layout,
    workers: list[WorkerId],
    global_batch: int,
    n_blocks: int = 4,
    resume: Resume | None = None,
    peer_every: int = 0,
    durable_every: int = 0,
    cause: Cause = "start",
) -> Plan:
    m = 1 if layout.pp == 1 else 2 * layout.pp if global_batch % (2 * layout.pp) == 0 else layout.pp
    return Plan(
        generation,
        layout,
        tuple(workers[: layout.world_size]),
        shares(global_batch, layout.dp, m),
        shares(n_blocks, layout.pp),
        m,
        resume or Resume(),
        cause,
        peer_every,
        durable_every,
    )


def live(old: Plan) -> Resume:
    holdings = tuple(Holding(worker, old.generation, rank, -1, "live") for rank, worker in enumerate(old.ranks))
    return Resume("live", -1, old.generation, old.layout, old.layers, holdings)


def from_copies(old: Plan, step: int, holdings: tuple[Holding, ...]) -> Resume:
    return Resume("peer", step, old.generation, old.layout, old.layers, holdings)
