"""Unequal batch shares, stages and numbers of microbatches, given at the start or while a
generation runs: the loss is that of one process, step for step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker.chain import check, job_of
from support.worker.plans import N_BLOCKS, live, plan
from support.worker.worker_pool import Pool

from elastic.storage import open_storage
from elastic.types import (
    Job,
    Layout,
    Plan,
    RanksTimed,
    Resume,
    SetShares,
    ShardStored,
    SharesSet,
    StepDone,
    WorkerId,
)
from elastic.types.grid import each_microbatches
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.step.batch_shares import BatchShares

LAYOUTS = [
    Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2, microbatch_size=3), Layout(pp=2,
    dp_shard=2), Layout(tp=2, dp_shard=2), Layout(pp=4), Layout(dp_replicate=3, microbatch_size=2),
    Layout(pp=3), Layout(pp=2, tp=2), Layout(dp_shard=3), Layout(pp=2, dp_replicate=2,
    microbatch_size=1),
]  # fmt: skip
EVERY = 6  # steps of each generation


def parts(chance: random.Random, total: int, n: int) -> tuple[int, ...]:
    """`total` in `n` random parts of at least one."""
    cuts = sorted(chance.sample(range(1, total), n - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def random_plan(
    chance: random.Random, number: int, layout: Layout, workers: list[WorkerId], resume: Resume
) -> Plan:
    """Unequal in all that may be unequal: samples, blocks per stage, and with them microbatches of
    the replicas."""
    made = plan(
        number,
        layout,
        workers,
        24,
        resume=resume,
        n_microbatches=4 if layout.pp > 1 else chance.choice([1, 2]),
    )
    return replace(
        made, samples=in_units(made, chance), layers=parts(chance, N_BLOCKS, layout.n_stages)
    )


def in_units(made: Plan, chance: random.Random) -> tuple[int, ...]:
    return tuple(
        made.n_microbatches * k for k in parts(chance, 24 // made.n_microbatches, made.layout.dp)
    )


def test_replicas_with_more_samples_have_more_microbatches() -> None:
    two = Layout(dp_replicate=2, dp_shard=2, microbatch_size=2)
    assert each_microbatches(two, (4, 4, 4, 4), 2) == (2, 2, 2, 2)
    assert each_microbatches(two, (6, 6, 2, 2), 2) == (3, 3, 1, 1)
    assert each_microbatches(two, (7, 6, 2, 1), 2) == (4, 4, 1, 1)
    assert each_microbatches(Layout(dp_replicate=2), (6, 2), 2) == (2, 2), "no size is asked for"
    assert each_microbatches(Layout(dp_shard=4, microbatch_size=2), (6, 6, 2, 2), 2) == (
        2,
        2,
        2,
        2,
    ), "shards: equally many"
    piped = Layout(pp=2, dp_replicate=2, microbatch_size=1)
    assert each_microbatches(piped, (12, 4), 4) == (12, 4), "all of one size"
    assert each_microbatches(replace(piped, microbatch_size=2), (12, 4), 4) == (12, 4)
    assert each_microbatches(replace(piped, microbatch_size=2), (16, 4), 4) == (8, 4)


def test_other_shares_hold_from_their_step_on() -> None:
    first = plan(1, Layout(dp_shard=2), [WorkerId("a", 0), WorkerId("b", 0)], 8)
    shares = BatchShares(Job(n_samples=64, global_batch=8, seed=0), first)
    shares.set(5, (2, 6))
    shares.set(7, (3, 5))
    assert [shares.samples(step) for step in (0, 4, 5, 6, 7, 70)] == [
        (4, 4),
        (4, 4),
        (2, 6),
        (2, 6),
        (3, 5),
        (3, 5),
    ]
    assert shares.newest == (3, 5)
    ids = shares.ids(5)
    assert (shares.ids_of(5, 0), shares.ids_of(5, 1)) == (ids[:2], ids[2:])


@pytest.mark.e2e
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [4, 2, 5])
def test_random_shares_stages_and_moves(pool: Pool, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    layouts = chance.sample(LAYOUTS, 5)
    job = job_of("tiny.py", steps=EVERY * len(layouts), global_batch=24) | {
        "eval_every": 4,
        "eval_samples": 10,
    }
    workers = pool.open(job, tmp_path)
    plans: list[Plan] = []
    n_set = 0
    for i, layout in enumerate(layouts):
        plans.append(
            random_plan(chance, i + 1, layout, workers, live(plans[-1]) if plans else Resume())
        )
        pool.enter(plans[-1])
        pool.entered(i + 1)
        pool.wait(lambda: any(e.step >= EVERY * i + 1 for e in pool.events(StepDone)), "a step")  # noqa: B023
        if layout.dp > 1:
            wanted = in_units(plans[-1], chance)
            for worker in workers:
                pool.order(worker, SetShares(i + 1, wanted, 0))
            if wanted != plans[-1].samples:
                n_set += 1
                pool.wait(lambda: pool.events(SharesSet, i + 1), f"shares of generation {i + 1}")  # noqa: B023
                assert [e.samples for e in pool.events(SharesSet, i + 1)] == [wanted]
        pool.wait(
            lambda: any(e.step >= EVERY * (i + 1) - 1 for e in pool.events(StepDone)),  # noqa: B023
            "steps",
        )
    assert n_set
    pool.quiesced(len(layouts), len(plans[-1].ranks))
    pool.wait(lambda: len(pool.events(ShardStored)) == len(plans[-1].ranks), "the last checkpoint")
    checkpoint_writer.commit(
        open_storage(str(tmp_path)),
        job["steps"],
        len(layouts),
        world_size=len(plans[-1].ranks),
        epoch=1,
        meta={},
    )
    check(job, tmp_path, pool.events(StepDone), 1e-4)


@pytest.mark.e2e
def test_shares_change_without_a_new_generation(pool: Pool, tmp_path: Path) -> None:
    """All ranks change at the same step, the loss continues as that of one process, and each rank's
    time per unit is told."""
    job = job_of("tiny.py", steps=14)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=4), workers, 12)
    pool.enter(first)
    pool.wait(lambda: pool.events(StepDone), "a step")
    order = SetShares(1, (1, 2, 3, 6), 1)
    for worker in workers:
        pool.order(worker, order)
    pool.quiesced(1, 4)
    pool.wait(lambda: len(pool.events(ShardStored)) == 4, "the last checkpoint")
    checkpoint_writer.commit(
        open_storage(str(tmp_path)), job["steps"], 1, world_size=4, epoch=1, meta={}
    )
    check(job, tmp_path, pool.events(StepDone), 1e-4)
    (told,) = pool.events(SharesSet)
    assert told.samples == (1, 2, 3, 6) and 1 < told.from_step < 14
    timed = pool.events(RanksTimed)
    assert timed and all(len(e.unit_s) == 4 and min(e.unit_s) > 0 for e in timed)
