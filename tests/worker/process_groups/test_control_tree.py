"""Numbers between all ranks: a mesh while they are few, a tree above that."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worker.thread_ranks import Ranks, joined

from elastic.errors import PeerGarbled
from elastic.types import Layout
from elastic.types.grid import MESH_MOST, ROW, control_tree
from elastic.worker.process_groups.control_tree import ENTERING_TIMEOUT, Control
from elastic.worker.process_groups.groups import Groups

MAX = dist.ReduceOp.MAX
SENDERS = 4  # participants that only send, with 19 ranks: rows of 8, 8, 7 and 8, 8, 3


@pytest.mark.parametrize("n", [1, 2, 16, 17, 37, 64, 97, 128, 1024, 1031, 8192])
def test_the_tree_has_every_rank_once_and_few_connections(n: int) -> None:
    tree = control_tree(n)
    assert [rank for row in tree[0] for rank in row] == list(range(n))
    for below, level in zip(tree, tree[1:], strict=False):
        assert [rank for row in level for rank in row] == [row[0] for row in below]
    assert len(tree[-1]) == 1 and len(tree[-1][0]) <= MESH_MOST
    assert (len(tree) == 1) == (n <= MESH_MOST)
    connections = sum(len(level[0]) - 1 for level in tree)  # of rank 0, which has the most
    assert connections <= MESH_MOST - 1 + (ROW - 1) * max(
        0, math.ceil(math.log(max(2, n) / MESH_MOST, ROW))
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with joined(19 + SENDERS, Layout(dp_replicate=19)) as found:
        yield found


def test_a_sum_has_the_same_bits_on_all_ranks_and_whole_numbers_are_exact(ranks: Ranks) -> None:
    whole, n = (1 << 26) - 1, len(ranks.groups)

    def sums(of: Groups, me: int) -> list[float]:
        return of.control.all_reduce(
            torch.tensor([0.1 * (me + 1), whole, me == 21], dtype=torch.float64)
        ).tolist()

    found = ranks.all(sums)
    assert all(row == found[0] for row in found)
    assert found[0][1:] == [n * whole, 1.0] and found[0][0] == pytest.approx(
        0.1 * n * (n + 1) / 2, rel=1e-15
    )
    assert {of.control.n_begun for of in ranks.groups} == {ranks.groups[0].control.n_begun}


def test_only_the_plans_ranks_commit(ranks: Ranks) -> None:
    found = ranks.all(
        lambda of, me: float(of.commit.all_reduce(torch.tensor([2.0**me], dtype=torch.float64)))
    )
    assert found == [float(2**19 - 1)] * 19 + [2.0**me for me in range(19, 23)]
    assert [row[:2] for row in ranks.groups[18].arrived() if row[0] == "plan"] == [("plan", 16)]


def test_the_largest_and_the_rows_of_all(ranks: Ranks) -> None:
    n = len(ranks.groups)
    assert (
        ranks.all(lambda of, me: int(of.control.all_reduce(torch.tensor([me % 22]), MAX)))
        == [21] * n
    )

    def rows(of: Groups, me: int) -> list[list[float]]:
        row = [-0.0, math.inf] if me == 9 else [float(me), 1e-300]
        table: list[list[float]] = of.control.gather(
            torch.tensor(row, dtype=torch.float64)
        ).tolist()
        return table

    expected = [[-0.0, math.inf] if rank == 9 else [float(rank), 1e-300] for rank in range(n)]
    found = ranks.all(rows)
    assert found == [expected] * n and math.copysign(1, found[3][9][0]) == -1
    told = ranks.all(lambda of, me: of.control.broadcast(torch.tensor([me, 1 << 40]), 13).tolist())
    assert told == [[13, 1 << 40]] * n


def test_pairs_connect_when_they_need_it_and_no_others(ranks: Ranks) -> None:
    """In a ring, with one that nobody has anything for: each has irecv before isend, so gloo alone
    would wait forever."""
    fds = len(os.listdir("/proc/self/fd"))

    def exchange(of: Groups, me: int) -> float:
        if me == 18 or of.copies is None:
            return -1.0
        before, after = (me - 1) % 18, (me + 1) % 18
        of.connect(of.copies, {before, after})
        theirs, mine = torch.zeros(1), torch.tensor([float(me)])
        for work in (of.copies.recv([theirs], before, 5), of.copies.send([mine], after, 5)):
            work.wait()
        return float(theirs)

    assert ranks.all(exchange)[:18] == [17.0, *map(float, range(17))]
    assert len(os.listdir("/proc/self/fd")) - fds == 2 * 18


def test_a_pair_with_a_stranger_is_refused(ranks: Ranks) -> None:
    def meet(of: Groups, me: int) -> str:
        if me not in (2, 11):
            return ""
        of._secret = "another" if me == 11 else of._secret
        try:
            of.connect(of.world, {13 - me})
        except PeerGarbled as error:
            return str(error)
        return "believed"

    assert all("was not told of it" in ranks.all(meet)[me] for me in (2, 11))


@pytest.mark.slow
def test_what_32_ranks_ask_of_the_store_and_what_they_keep_open() -> None:
    """Of each rank: what its own small groups need, whatever the number of ranks."""
    before = len(os.listdir("/proc/self/fd"))
    with joined(32) as found:
        leads = [len(of.control.rows) - 1 for of in found.groups]
        assert sum(leads) == 4, "rows of eight"
        # of tp, of the row, of dp_shard, of the rows' first ranks
        meshes = [[8, 8, 4] + [4] * lead for lead in leads]
        # where a group's ranks listen: set, wait and get
        asked = [sum(1 + 2 * size for size in sizes) + 2 for sizes in meshes]
        assert sorted(found.store.requests.values()) == sorted(asked)
        n_groups = sum(len(sizes) + 2 for sizes in meshes)  # world and copies connect nobody yet
        n_connections = sum(size - 1 for sizes in meshes for size in sizes)
        n_open = len(os.listdir("/proc/self/fd")) - before
        assert n_connections + 4 * n_groups <= n_open <= n_connections + 4 * n_groups + 32, (
            "a few are the store's"
        )


@pytest.mark.parametrize("highest", [True, False])
@pytest.mark.parametrize("timeout", [None, ENTERING_TIMEOUT])
def test_a_sum_waits_as_long_as_it_is_told_in_each_row(
    highest: bool, timeout: timedelta | None
) -> None:
    waits: dict[str, timedelta] = {}

    class Row:
        def __getattr__(self, name: str) -> Any:
            def call(_: Any, options: Any) -> Any:
                waits[name] = options.timeout
                return SimpleNamespace(wait=lambda: None)

            return call

    control = Control(0, 24, [Row(), Row()], highest=highest).again()  # type: ignore[list-item]
    control.timeout = timeout
    control.barrier()
    assert set(waits) == {"reduce", "broadcast"} | ({"allreduce"} if highest else set())
    assert set(waits.values()) == {timeout or dist.AllreduceOptions().timeout}
