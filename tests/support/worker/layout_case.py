"""A program under one layout, or through some, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from support.reference import Reference, train
from support.worker.chain import job_of, pass_through
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.types import Layout, StepDone, parse_layout

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """`program` for `steps` under `layout`; a global batch of 13 gives the data-parallel ranks
    unequal batch shares."""

    program: str
    layout: str
    batch: int = 12
    steps: int = 3
    microbatches: int = 0  # 0 = as the tests' plans have it

    def __str__(self) -> str:
        more = f", m={self.microbatches}" if self.microbatches else ""
        return f"{self.program.removesuffix('.py')} {self.layout} batch {self.batch}{more}"


@lru_cache(maxsize=32)
def alone(program: str, batch: int, steps: int) -> Reference:
    job = job_of(program, steps, batch)
    return train(load_program(job["program"]), job, steps)


def run(pool: Pool, case: Case, folder: Path) -> list[StepDone]:
    """One generation from the first step to the last."""
    layout = parse_layout(case.layout)
    if case.batch % (case.microbatches or 1):
        raise ValueError(f"{case}: microbatches must divide the batch")
    job = job_of(case.program, case.steps, case.batch) | {"layout": case.layout}
    workers = pool.open(job, folder, n=layout.world_size)
    more = {"n_microbatches": case.microbatches} if case.microbatches else {}
    pool.enter(plan(1, layout, workers, case.batch, **more))
    pool.quiesced(1, layout.world_size)
    return pool.events(StepDone)


def check(case: Case, steps: list[StepDone], tolerance: float = TOLERANCE) -> None:
    """Loss (forward), gradient norm (backward) and the losses of later steps (update) are those of
    one process."""
    want = alone(case.program, case.batch, case.steps)
    assert [e.step for e in steps] == list(range(1, case.steps + 1))
    assert [e.train_loss for e in steps] == pytest.approx(want.losses, abs=tolerance)
    assert [e.grad_norm for e in steps] == pytest.approx(want.grad_norms, rel=1e-3)
    assert [e.tokens for e in steps] == want.tokens


def follow(pool: Pool, folder: Path, name: str, layouts: list[Layout], **more: int) -> None:
    """Losses, and the gradients that they come from, are those of one process."""
    job = (
        job_of(name, steps=4 * len(layouts))
        | {"layout": {str(i): str(x) for i, x in enumerate(layouts)}}
        | more
    )
    steps = pass_through(pool, job, folder, layouts, every=3)
    alone = train(load_program(job["program"]), job, job["steps"])
    assert [event.step for event in steps] == list(range(1, job["steps"] + 1))
    worst = max(
        abs(event.train_loss - loss) for event, loss in zip(steps, alone.losses, strict=True)
    )
    assert worst < TOLERANCE, f"train loss is off by {worst}"
    assert [event.grad_norm for event in steps] == pytest.approx(alone.grad_norms, rel=1e-3)
    assert [event.tokens for event in steps] == alone.tokens
    assert alone.losses[-1] < alone.losses[0] - 0.2
