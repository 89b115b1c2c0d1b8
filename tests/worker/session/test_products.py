"""One generation against one process: products of the axes, tied embeddings, unequal batch shares,
replicas, validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.reference import evaluate, train
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.program import load_program
from elastic.types import Evaluated, Layout, Quiesced, StepDone, WorkerFailed

pytestmark = pytest.mark.slow
STEPS = 6
CASES = [
    ("tiny.py", Layout(dp_shard=4), 13),  # shares 4, 3, 3, 3
    ("tiny.py", Layout(pp=4), 12),
    ("tiny_tied.py", Layout(pp=2, dp_shard=2), 12),
    ("tiny_tied.py", Layout(pp=2, tp=2), 12),
]
# also: dp_replicate in test_chain.py and test_keyed_draws.py, this program's tp in test_axes.py
MORE = [
    ("tiny.py", Layout(dp_replicate=2, dp_shard=2), 12),
    ("tiny.py", Layout(dp_replicate=2, tp=2), 12),
    ("tiny_vocab.py", Layout(dp_shard=2, tp=2), 12),
]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("program", "layout", "batch"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.whole) for case in MORE)],
    ids=str,
)
def test_losses_and_validation_are_those_of_one_process(
    pool: Pool, tmp_path: Path, program: str, layout: Layout, batch: int
) -> None:
    job = job_of(program, STEPS, batch) | {"eval_samples": 13}
    workers = pool.open(job, tmp_path)
    pool.enter(plan(1, layout, workers, batch))
    pool.quiesced(1, layout.world_size)
    alone = train(load_program(job["program"]), job, STEPS)
    got = [(e.train_loss, e.grad_norm, e.tokens) for e in pool.events(StepDone)]
    assert [loss for loss, _, _ in got] == pytest.approx(alone.losses, abs=5e-5)
    assert [norm for _, norm, _ in got] == pytest.approx(alone.grad_norms, rel=1e-3)
    assert [tokens for _, _, tokens in got] == alone.tokens
    loaded = load_program(job["program"])
    assert loaded.validation is not None
    full = loaded.validation()
    spread = [full[i * len(full) // 13] for i in range(13)]
    want = evaluate(replace(loaded, validation=lambda: spread), alone.model, 13)
    assert pool.events(Evaluated)[-1].metrics["validation_loss"] == pytest.approx(want, abs=5e-5)


@pytest.mark.whole
def test_three_axes_at_once(tmp_path: Path) -> None:
    """pp x dp_shard x tp on eight processes, and live back to a layout of two axes."""
    pool = Pool(8)
    try:
        job = job_of("tiny.py", 8)
        workers = pool.open(job, tmp_path, per_node=2)
        first = plan(1, Layout(pp=2, dp_shard=2, tp=2), workers, 12)
        pool.enter(first)
        pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
        pool.enter(plan(2, Layout(dp_shard=3, tp=2), workers, 12, resume=live(first)))
        pool.quiesced(2, 6)
        alone = train(load_program(job["program"]), job, 8)
        assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(
            alone.losses, abs=1e-4
        )
    finally:
        pool.close()


def test_out_of_memory_is_told_with_its_bytes(pool: Pool, tmp_path: Path) -> None:
    """The program's allocator gives out where a rank has more than four samples at once."""
    job = job_of("tiny_small_memory.py", STEPS)
    workers = pool.open(job, tmp_path)
    pool.enter(plan(1, Layout(dp_shard=2), workers, 12))
    pool.quiesced(1, 2)
    failed = [e for e in pool.events(WorkerFailed, 1) if e.kind == "out_of_memory"]
    assert failed
    assert failed[0].measured_bytes > 1 << 20
    pool.enter(plan(2, Layout(dp_shard=4), workers, 12))
    pool.quiesced(2, 4)
    assert [e.step for e in pool.events(StepDone)] == list(range(1, STEPS + 1))


def test_error_of_the_program_names_its_place(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_broken_loss.py", STEPS)
    workers = pool.open(job, tmp_path, n=2)
    pool.enter(plan(1, Layout(dp_shard=2), workers, 12))
    pool.wait(lambda: pool.events(WorkerFailed, 1), "failure")
    pool.wait(lambda: len({e.worker for e in pool.events(Quiesced, 1)}) == 2, "failure")
    failed = [e for e in pool.events(WorkerFailed, 1) if e.kind == "program"]
    assert failed
    assert "sample went bad" in failed[0].error
    assert "tiny_broken_loss.py" in failed[0].error
