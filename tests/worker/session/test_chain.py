"""One set of processes passes through a chain of layouts; the loss is that of one process, and so
is the state at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.worker.chain import check, job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.types import Layout

CHAIN = [
    Layout(dp_shard=4), Layout(pp=2, tp=2), Layout(dp_shard=3), Layout(pp=2, dp_shard=2),
    Layout(tp=2), Layout(dp_shard=1), Layout(dp_shard=2, tp=2),
]  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("n", [2, pytest.param(len(CHAIN), marks=pytest.mark.whole)])
def test_a_chain_of_layouts_that_begins_again(pool: Pool, tmp_path: Path, n: int) -> None:
    job = job_of("tiny.py", steps=2 * n + 4)
    pids = list(pool.pids)
    chain = CHAIN[:n] + CHAIN[:1]
    steps = pass_through(pool, job, tmp_path, chain, every=2)
    check(job, tmp_path, steps, 1e-4)
    assert pool.pids == pids
    assert all(process.is_alive() for process in pool.processes)
    for generation in range(2, len(chain) + 1):
        parts = pool.digests(generation)
        assert (
            sum(p.before for p in parts if p.before is not None) % 2**64
            == sum(p.after for p in parts if p.after) % 2**64
        )
