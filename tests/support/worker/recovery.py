"""What the driver does after a loss, by hand: abort, ask what is held, enter the next generation;
and how its end is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.reference import train_alone
from support.worker.plans import from_copies, plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.types import (
    Abort,
    CopyStored,
    DigestChecked,
    Holding,
    Layout,
    Plan,
    Quiesced,
    StepDone,
    WorkerId,
)
from elastic.worker.hosting.aggregate import Gather


def newest_whole(old: Plan, quiesced: list[Quiesced]) -> tuple[int, tuple[Holding, ...]]:
    """Newest step of which every rank of the old generation has a holder."""
    holdings = [h for q in quiesced for h in q.holdings if h.generation == old.generation]
    for step in sorted({h.step for h in holdings}, reverse=True):
        at = [h for h in holdings if h.step == step]
        if {h.rank for h in at} == set(range(old.layout.world_size)):
            return step, tuple(at)
    raise AssertionError(f"no whole copy among {holdings}")


def loss_curve_agrees(
    pool: Pool, job: dict[str, Any], tolerance: float = 1e-4, resumed: int = 0
) -> None:
    """The last report of each step is that of one process, and every step was done. `resumed`: the
    step that a loss continued from, of which a rank 0 that is gone may not have told; the others
    hold it."""
    alone = train_alone(load_program(job["program"]), job, job["steps"])
    last = {e.step: e.train_loss for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    assert set(range(1, job["steps"] + 1)) - set(last) <= {resumed} and max(last) == job["steps"], (
        sorted(last)
    )
    worst = max(abs(loss - alone[step - 1]) for step, loss in last.items())
    assert worst < tolerance, f"train loss is off by {worst}"


def start(
    pool: Pool, job: dict[str, Any], run: Path, layout: Layout, per_node: int = 1
) -> tuple[list[WorkerId], Plan]:
    """Generation 1 with peer replicas, after its third step and its first acknowledged copy."""
    workers = pool.open(job, run, per_node)
    first = plan(1, layout, workers, job["global_batch"], peer_every=2)
    pool.enter(first)
    pool.wait(lambda: any(e.copy.step >= 2 for e in pool.events(CopyStored)), "a peer replica")
    return workers, first


def recover(
    pool: Pool,
    old: Plan,
    layout: Layout,
    workers: list[WorkerId],
    survivors: list[WorkerId],
    peer_every: int = 2,
    **more: Any,
) -> Plan:
    """What the driver does after a loss: abort, ask what is held, enter the next generation from
    it. `more`: of `plan`."""
    generation = max(pool.stores) + 1
    for worker in survivors:
        pool.order(worker, Abort(generation - 1))
    pool.stores[generation - 1] = None
    pool.wait(
        lambda: {e.worker for e in pool.events(Quiesced, generation - 1)} >= set(survivors),
        "survivors",
    )
    step, holdings = newest_whole(old, [e for e in pool.events(Quiesced) if e.worker in survivors])
    new = plan(
        generation,
        layout,
        workers,
        12,
        resume=from_copies(old, step, holdings),
        peer_every=peer_every,
        **more,
    )
    pool.enter(new)
    pool.entered(generation)
    return new


def digests_agree(pool: Pool, generation: int) -> bool:
    gather = Gather(lambda parts: None, lambda node: 1)
    events = [e for part in pool.digests(generation) for e in gather.add(WorkerId("", 0), part)]
    assert len(events) == 1
    assert isinstance(events[0], DigestChecked)
    return events[0].ok
