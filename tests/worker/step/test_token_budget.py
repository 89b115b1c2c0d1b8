"""Samples of unequal length in micro-batches of a budget of tokens: what a plain process computes
that fills all of them up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import evaluate
from support.worker.chain import check, job_of, pass_through
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.config.job import job_of as spec_of
from elastic.data.budget import TokenBudget
from elastic.data.order import sample_ids
from elastic.program import Program, load_program
from elastic.types import Evaluated, Job, Layout, WorkerId
from elastic.worker.hosting.resume_checks import check_cp
from elastic.worker.step.batch_shares import BatchShares

SEQ, BUDGET = 16, 28
CHAIN = [
    Layout(dp_shard=2), Layout(dp_shard=3), Layout(cp=2, dp_shard=2), Layout(dp_replicate=2,
    dp_shard=2, zero_stage=1), Layout(tp=2, dp_shard=2), Layout(dp_shard=3, zero_stage=2),
]  # fmt: skip


class FilledUp:
    """Every sample with SEQ places."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.items[index]
        n = SEQ - len(item["input"])
        pad = torch.nn.functional.pad
        return {
            "input": pad(item["input"], (0, n)),
            "target": pad(item["target"], (0, n), value=-100),
        }


def filled_up(program: Program) -> Program:
    return replace(
        program,
        dataset=lambda: FilledUp(program.dataset()),
        validation=lambda: FilledUp(program.validation()),  # type: ignore[misc]
    )


def job(steps: int) -> dict[str, Any]:
    return job_of("tiny_unequal.py", steps) | {"microbatch_tokens": BUDGET, "eval_samples": 13}


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_unequal_samples_through_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    wanted = job(15)
    program = filled_up(load_program(wanted["program"]))
    steps = pass_through(pool, wanted, tmp_path, CHAIN, every=2)
    alone = check(wanted, tmp_path, steps, 1e-4, program)
    full: Any = program.validation()  # type: ignore[misc]
    spread = [full[i * len(full) // 13] for i in range(13)]
    want = evaluate(replace(program, validation=lambda: spread), alone.model, 13)
    assert pool.events(Evaluated)[-1].metrics["validation_loss"] == pytest.approx(want, abs=1e-4)
    shares = shares_of(CHAIN[0])
    for event in steps[:2]:
        assert event.pad_share == pytest.approx(shares.pad_share(event.step - 1), abs=1e-4)
    assert (
        sum(event.pad_share for event in steps) > 0 and sum(event.imbalance for event in steps) > 1
    )


def shares_of(layout: Layout, **more: Any) -> BatchShares:
    wanted = job(1) | {"n_samples": 512}
    workers = [WorkerId("a", i) for i in range(layout.world_size)]
    dataset: Any = load_program(wanted["program"]).dataset()
    return BatchShares(
        Job.from_plain(wanted),
        plan(1, layout, workers, 12, **more),
        TokenBudget(dataset.length, BUDGET),
    )


def test_all_ranks_have_equally_many_micro_batches_and_numbers_of_steps_differ() -> None:
    shares = shares_of(Layout(dp_shard=3))
    counts = set()
    for step in range(20):
        cut = shares.cut(step)
        assert len({len(rank) for rank in cut}) == 1
        counts.add(len(cut[0]))
        ids = [sample for dp in range(3) for sample in shares.ids_of(step, dp)]
        assert sorted(ids) == sorted(sample_ids(512, 12, 7, step=step)) == sorted(shares.ids(step))
        assert sum(shares.sizes(step)) == 12 and 0 <= shares.pad_share(step) < 0.5
    assert len(counts) > 1


def test_a_slow_rank_gets_fewer_tokens() -> None:
    shares = shares_of(Layout(dp_shard=3))
    shares.set(0, (6, 5, 1))
    length = shares.budget.length  # type: ignore[union-attr]
    loads = [
        sum(length(i) for step in range(20) for i in shares.ids_of(step, dp)) for dp in range(3)
    ]
    assert [load / sum(loads) for load in loads] == pytest.approx(
        [6 / 12, 5 / 12, 1 / 12], abs=0.05
    )


def test_what_context_parallelism_cuts_is_filled_up_first() -> None:
    """The first sample has 2 tokens; cp=2 cuts into 4 chunks."""
    file = Path(job(1)["program"])
    keys = {
        "steps": 1,
        "global_batch": 12,
        "microbatch_tokens": BUDGET,
        "layout": "cp=2,dp_shard=2",
    }
    check_cp(spec_of(keys, file), load_program(file))
