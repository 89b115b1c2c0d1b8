"""The groups of the next generation are made while this one trains, and nothing is left of those
that are not needed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import until
from support.worker import slow_groups
from support.worker.chain import job_of
from support.worker.nccl_like import NcclLikeTransport
from support.worker.plans import live, plan
from support.worker.ranks import meeting, on_ranks
from support.worker.worker_pool import Pool
from torch.distributed.distributed_c10d import _world

from elastic.types import GroupsMade, Layout, Plan, StepDone, WorkerFailed, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import Transport
from elastic.worker.session.groups_ahead import GroupsAhead
from elastic.worker.session.workplace import EnterOrder

pytestmark = pytest.mark.e2e
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def slow_pool() -> Iterator[Pool]:
    pool = Pool(3)
    yield pool
    pool.close()


def pause_s(pool: Pool, generation: int) -> float:
    """From the last step before to the first one of the generation."""
    at = {(e.generation, e.step): s for s, _, e in pool.log if isinstance(e, StepDone)}
    first = min(step for number, step in at if number == generation)
    return at[generation, first] - at[generation - 1, first - 1]


def step(pool: Pool, generation: int, n: int) -> None:
    pool.wait(
        lambda: len(pool.events(StepDone, generation)) >= n, f"{n} steps of generation {generation}"
    )


def made(pool: Pool, rendezvous: Rendezvous) -> None:
    of = lambda: [e for e in pool.events(GroupsMade) if e.port == rendezvous.store[1]]  # noqa: E731
    pool.wait(lambda: len(of()) == len(rendezvous.participants), "groups")
    assert not any(e.error for e in of())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 3, id="growth"),
        # that both are made ahead: tests/sim/test_made_ahead.py
        pytest.param(3, 2, id="notice", marks=pytest.mark.whole),
    ],
)
def test_the_pause_does_not_hold_the_set_up_of_groups(
    slow_pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    pool, job = slow_pool, job_of("tiny.py", steps=100_000)
    workers = pool.open(job, tmp_path)
    noted = tmp_path / "set-ups"
    for worker in workers:
        pool.patch(worker, slow_groups.use)
        pool.call(worker, "note_set_ups", str(noted))
    n_set_up = lambda: len(noted.read_text().splitlines())  # noqa: E731
    first = plan(1, Layout(dp_shard=before), workers, job["global_batch"])
    pool.enter(first)
    step(pool, 1, 5)
    second = plan(2, Layout(dp_shard=after), workers, job["global_batch"], resume=live(first))
    at_first, formed = n_set_up(), pool.form(second)
    made(pool, formed)
    assert min(e.seconds for e in pool.events(GroupsMade)) > slow_groups.SETUP_S
    step(pool, 1, len(pool.events(StepDone, 1)) + 5)  # it trained on
    ahead = n_set_up()
    assert ahead > at_first
    pool.enter(second, formed=formed)
    step(pool, 2, 3)
    assert n_set_up() == ahead, "groups are made in the pause"
    third = plan(3, Layout(dp_shard=before), workers, job["global_batch"], resume=live(second))
    pool.enter(third)
    step(pool, 3, 3)
    assert n_set_up() > ahead, "without, they are: else this test shows nothing"
    assert not pool.events(WorkerFailed)
    for worker in workers:
        pool.call(worker, "note_set_ups", os.devnull)


@pytest.mark.whole
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)], ids=["growth", "notice"])
def test_ten_seconds_of_set_up_for_each_group_are_in_no_pause(
    slow_pool: Pool, tmp_path: Path, before: int, after: int
) -> None:
    pool, job = slow_pool, job_of("tiny.py", steps=100_000)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=before), workers, job["global_batch"])
    pool.enter(first)
    step(pool, 1, 5)
    for worker in workers:
        pool.patch(worker, slow_groups.use_slowest)
    second = plan(2, Layout(dp_shard=after), workers, job["global_batch"], resume=live(first))
    formed = pool.form(second)
    made(pool, formed)
    assert (
        min(e.seconds for e in pool.events(GroupsMade))
        > 2 * slow_groups.SlowestGroups.setup_delay_s
    )
    step(pool, 1, len(pool.events(StepDone, 1)) + 5)
    pool.enter(second, formed=formed)
    step(pool, 2, 3)
    phases_s, paused_s = pool.entered(2).phases_s, pause_s(pool, 2)
    assert phases_s["groups"] < 0.5, "groups are made in the pause"
    # on a machine of its own: 0.5 s; three workers on two cores that others use take longer for
    # model, state and first step, but not as long as one group
    assert paused_s < slow_groups.SlowestGroups.setup_delay_s, phases_s
    assert not pool.events(WorkerFailed)


def test_groups_for_another_meeting_are_not_used(slow_pool: Pool, tmp_path: Path) -> None:
    """The driver has given them up while they were made: all meet anew."""
    pool, job = slow_pool, job_of("tiny.py", steps=100_000)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=2), workers, job["global_batch"])
    pool.enter(first)
    step(pool, 1, 5)
    second = plan(2, Layout(dp_shard=3), workers, job["global_batch"], resume=live(first))
    pool.form(second, leave_out=[workers[2]])
    step(pool, 1, len(pool.events(StepDone, 1)) + 3)
    pool.enter(second)
    step(pool, 2, 3)
    assert not pool.events(WorkerFailed)
    # of whoever saw the store go before the order came
    assert all(e.error for e in pool.events(GroupsMade))


# ------------------------------------------------------------------------------------- what is left


def left_here() -> tuple[int, int, int, int]:
    """File descriptors, threads of Python and of the process, groups that torch knows."""
    gc.collect()
    n_groups = len(_world.pg_map) + len(_world.pg_names) + len(_world.pg_group_ranks)
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        n_groups,
    )


def ahead_of(
    rank: int, n: int, store: tuple[str, int], transport: Transport, secret: str
) -> tuple[GroupsAhead, list[Any]]:
    workers = tuple(WorkerId("node", i) for i in range(n))
    to_come = Plan(2, Layout(dp_shard=n), workers, (1,) * n, (1,))
    told: list[Any] = []
    groups = Groups(2, to_come.layout, torch.device("cpu"), transport=transport)
    return GroupsAhead(
        EnterOrder(to_come, rank, Rendezvous(workers, store, TIMEOUT_S, secret)),
        groups,
        told.append,
    ), told


def dropped(rank: int, n: int, store: tuple[str, int], like: str, when: str) -> tuple[Any, ...]:
    """Groups are made ahead and dropped, twice: counts before and after, and a sum of the
    generation that runs on."""
    transport = NcclLikeTransport if like == "nccl" else Transport
    of = Groups(1, Layout(dp_shard=n), torch.device("cpu"), transport=transport())
    of.join(meeting(n, store[1], TIMEOUT_S, "first"), rank)
    x = torch.ones(2)
    of.commit.all_reduce(x)
    before = left_here()
    for i in range(2):
        if when == "there":
            ahead, told = ahead_of(rank, n, store, transport(), f"secret {i}")
            until(lambda: bool(told), "groups")  # noqa: B023
            assert told[0].error == "" and left_here()[0] > before[0]
            of.commit.all_reduce(x)  # nobody drops before all have theirs
            ahead.drop()
        elif rank:  # rank 0 does not come
            ahead, told = ahead_of(rank, n, store, transport(), f"secret {i}")
            until(ahead.groups._joining.is_set, "its way to the meeting")
            began_s = time.monotonic()
            ahead.drop()
            assert not told and time.monotonic() - began_s < TIMEOUT_S / 4
        of.commit.all_reduce(x)
    until(
        lambda: all(now <= was for now, was in zip(left_here(), before, strict=True)),
        lambda: f"{before}: {left_here()}",
        60,
    )
    of.commit.all_reduce(x)
    of.close()
    return left_here()[3], x.isfinite().all().item()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("like", ["gloo", "nccl"])
@pytest.mark.parametrize("when", ["there", "waiting"])
def test_nothing_is_left_of_groups_that_are_dropped(like: str, when: str) -> None:
    assert on_ranks(dropped, 3, like, when) == [(0, True)] * 3
