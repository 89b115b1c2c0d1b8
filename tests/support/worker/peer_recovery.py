"""A loss that peer replicas bridge: begun, brought about, and judged at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.reference import train_alone
from support.worker.plans import from_copies, plan
from support.worker.recovery import digests_agree
from support.worker.worker_pool import Pool

from elastic.policy.copies.recovery import covered
from elastic.program import load_program
from elastic.types import (
    Abort,
    CopyStored,
    DigestPart,
    Holding,
    Layout,
    Plan,
    Quiesced,
    ShardStored,
    StepDone,
    WorkerId,
)


def begin(
    pool: Pool, job: dict[str, Any], run: Path, layout: Layout, per_node: int = 1, **more: Any
) -> Plan:
    workers = pool.open(job, run, per_node)
    first = plan(1, layout, workers, job["global_batch"], peer_every=2, **more)
    pool.enter(first)
    pool.wait(lambda: any(e.copy.step >= 2 for e in pool.events(CopyStored)), "a peer replica")
    return first


def recover(pool: Pool, old: Plan, layout: Layout, lost: list[WorkerId]) -> Plan:
    """Kills `lost` and the store of the driver's side; enters generation 2 from the newest step
    that the others hold."""
    for worker in lost:
        pool.kill(worker)
    pool.stores[1] = None
    survivors = [worker for worker in old.ranks if worker not in lost]
    for worker in survivors:
        pool.order(worker, Abort(1))
    pool.wait(lambda: {e.worker for e in pool.events(Quiesced, 1)} >= set(survivors), "survivors")
    newest: dict[WorkerId, Quiesced] = {
        e.worker: e for e in pool.events(Quiesced) if e.worker in survivors
    }
    held: list[Holding] = [h for q in newest.values() for h in q.holdings if h.generation == 1]
    step = max(
        (s for s in {h.step for h in held} if covered(old, [h for h in held if h.step == s])),
        default=-1,
    )
    assert step >= 0, f"no whole copy among {held}"
    acknowledged = max(e.copy.step for e in pool.events(CopyStored) if e.copy.kind == "peer")
    assert step >= acknowledged, "what was acknowledged is there whatever was lost"
    resume = from_copies(old, step, tuple(h for h in held if h.step == step))
    new = plan(2, layout, survivors, 12, resume=resume, peer_every=2)
    pool.enter(new)
    pool.entered(2)
    return new


def goes_on(pool: Pool, job: dict[str, Any], new: Plan) -> None:
    """To the last step, on the loss curve, with the content that was held, without a byte from
    storage."""
    pool.wait(lambda: len(pool.events(DigestPart, 2)) >= len(new.ranks), "digests")
    assert digests_agree(pool, 2)
    left = pool.quiesced(2, len(new.ranks))
    alone = train_alone(load_program(job["program"]), job, job["steps"])
    last = {e.step: e.train_loss for e in sorted(pool.events(StepDone), key=lambda e: e.generation)}
    untold = set(range(1, job["steps"] + 1)) - set(last)
    assert untold <= {new.resume.step}, (
        "rank 0 may be gone before it has told of the step that all others hold"
    )
    assert max(abs(loss - alone[step - 1]) for step, loss in last.items()) < 1e-4
    assert new.resume.source == "peer"
    assert not [e for e in pool.events(ShardStored) if e.step < job["steps"]]
    if any(e.copy.generation == 2 for e in pool.events(CopyStored)):
        assert {h.generation for q in left for h in q.holdings} == {2}, (
            "what the generation before held is let go"
        )
