"""Where not all ranks are connected with each other: an abort frees everybody, and a loss is
bridged as in a mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.waiting import until
from support.worker import small_trees
from support.worker.chain import job_of
from support.worker.nccl_like import NcclLikeTransport
from support.worker.peer_recovery import begin, goes_on, recover
from support.worker.ranks import meeting, on_ranks
from support.worker.worker_pool import Pool

from elastic.types import Layout
from elastic.worker.process_groups.control_tree import Control
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import Transport, is_collective_error
from elastic.worker.session.stall_site import stall_site

pytestmark = pytest.mark.e2e
TIMEOUT_S = 300.0
FREED_S = TIMEOUT_S / 2  # by the abort, not by the group's own timeout


def waits(
    rank: int, n: int, store: tuple[str, int], absent: int, where: str, like: str
) -> tuple[float, str]:
    """`absent` does not come: seconds from the abort until this rank was free, and how."""
    small_trees.use()
    transport = NcclLikeTransport() if like == "nccl" else Transport()
    of = Groups(1, Layout(dp_replicate=n), torch.device("cpu"), transport=transport)
    of.join(meeting(n, store[1], TIMEOUT_S, "secret"), rank)
    assert isinstance(of.control, Control) and len(of.control.rows) == {0: 3, 2: 2, 4: 1}.get(
        rank, 1
    )
    work: Callable[[], object] = of.commit.barrier
    if where == "pairs":
        work = lambda: of.connect(of.world, {absent} if rank != absent else set())  # noqa: E731
    if rank == absent:
        return 0.0, "absent"
    at: list[float] = []
    this, ended = threading.current_thread(), threading.Event()  # by another rank's abort, maybe

    def abort() -> None:
        until(lambda: ended.is_set() or stall_site([this])[0] == "others", "its wait")
        ended.wait(0.2)  # it waits in the kernel by then
        at.append(time.monotonic())
        of.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        work()
        how = "came through"
    except (RuntimeError, ConnectionError) as error:
        how = f"freed {is_collective_error(error)}"
    free_s = time.monotonic()
    ended.set()
    thread.join()
    of.close()
    return free_s - at[0], how


@pytest.mark.parametrize(
    ("absent", "where", "like"),
    [(3, "commit", "gloo"), (0, "commit", "gloo"), (4, "pairs", "gloo"), (2, "commit", "nccl")],
)
def test_an_abort_frees_whoever_waits(absent: int, where: str, like: str) -> None:
    """In each row of the tree, and for one that comes to no pair: some wait to be connected to,
    others for an answer."""
    found = on_ranks(waits, 5, absent, where, like)
    assert {how for _, how in found} == {"absent", "freed True"}
    assert max(seconds for seconds, _ in found) < FREED_S


@pytest.mark.slow
def test_a_loss_is_bridged_by_copies_that_went_over_pairs(pool: Pool, tmp_path: Path) -> None:
    """Commits, copies, moves and digests of four ranks in a tree, of which one is killed."""
    job = job_of("tiny.py", steps=16)
    for worker in pool.open(job, tmp_path):
        pool.patch(worker, small_trees.use)
    try:
        first = begin(pool, job, tmp_path, Layout(dp_shard=4))
        new = recover(pool, first, Layout(dp_shard=3), [first.ranks[2]])
        goes_on(pool, job, new)
    finally:
        pool.revive()
        for worker in pool.workers:
            pool.patch(worker, small_trees.leave)
