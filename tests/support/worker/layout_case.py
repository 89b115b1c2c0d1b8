"""A program under one layout, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from support.reference import Reference, train
from support.worker.chain import job_of
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.types import StepDone, parse_layout

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


def check(case: Case, steps: list[StepDone]) -> None:
    """Loss (forward), gradient norm (backward) and the losses of later steps (update) are those of
    one process."""
    want = alone(case.program, case.batch, case.steps)
    assert [e.step for e in steps] == list(range(1, case.steps + 1))
    assert [e.train_loss for e in steps] == pytest.approx(want.losses, abs=TOLERANCE)
    assert [e.grad_norm for e in steps] == pytest.approx(want.grad_norms, rel=1e-3)
    assert [e.tokens for e in steps] == want.tokens
