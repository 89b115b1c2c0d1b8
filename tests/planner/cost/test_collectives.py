"""Bytes and hops of collectives, counted by hand."""

from __future__ import annotations

import pytest
from support.planner.pools import gpu

from elastic.planner.cost.collectives import (
    Links,
    RankGroup,
    commit_hops,
    commit_s,
    exchange_s,
    gather_s,
    reduce_s,
    send_s,
    under,
)
from elastic.planner.cost.kernels import Kernels

LINKS = Links(inside=1e9, between=1e8, per_node=4, inside_hop_s=1e-3, between_hop_s=1e-2)
DRY = Links(1e9, 1e8, 4, 0.0, 0.0)


def test_where_a_group_lies() -> None:
    groups = [RankGroup(*sizes) for sizes in ((4,), (8,), (2, 2), (4, 2), (4, 4), (4, 8))]
    assert [(g.in_node(4), g.nodes(4)) for g in groups] == [
        (4, 1), (4, 2), (2, 1), (2, 2), (1, 4), (1, 4),
    ]  # fmt: skip


def test_a_ring_in_a_node_sends_all_but_its_own_part() -> None:
    assert gather_s(LINKS, 8e9, RankGroup(4)) == pytest.approx(8 * 3 / 4 + 3e-3)
    assert gather_s(LINKS, 8e9, RankGroup(1)) == 0.0


def test_between_nodes_each_gpu_sends_on_its_own_card_while_the_node_shares() -> None:
    # 10 s > 6 s inside
    assert gather_s(LINKS, 8e9, RankGroup(8)) == pytest.approx(8 * 1 / 2 / 0.4 + 1e-2)
    fast = Links(1e9, 1e9, 4, 0.0, 0.0)
    assert gather_s(fast, 8e9, RankGroup(8)) == pytest.approx(8 * 3 / 4)  # inside is the slower one
    # one card of each of four nodes
    assert gather_s(DRY, 8e9, RankGroup(4, 4)) == pytest.approx(8 * 3 / 4 / 0.1)


def test_an_all_reduce_is_a_scatter_and_a_gather_with_the_hops_of_a_tree() -> None:
    assert reduce_s(DRY, 8e9, RankGroup(4)) == pytest.approx(2 * 8 * 3 / 4)
    ring = 2 * (8 * 7 / 8 / 0.4)
    # log2 of 8 nodes, not 7
    assert reduce_s(LINKS, 8e9, RankGroup(32)) == pytest.approx(ring + 2 * 3 * 1e-2)


def test_hops_of_a_commit_grow_as_the_logarithm_of_the_ranks() -> None:
    """Counted by hand: rows of 8, then what is left; 17 ranks are rows of 8, 8 and 1 and a row of
    three."""
    sizes = (1, 8, 16, 17, 64, 1024, 8192)
    assert [commit_hops(n, 8) for n in sizes] == [
        (0, 0),
        (14, 0),
        (0, 30),
        (11, 4),
        (11, 14),
        (11, 41),
        (11, 52),
    ]
    assert commit_hops(64, 4) == (0, 25)
    assert commit_s(LINKS, 1) == 0.0 and commit_s(LINKS, 4) == pytest.approx(4 * 6e-3)
    assert commit_s(Links(1e9, 1e8, 8), 1024) == pytest.approx(4 * (11 * 4e-6 + 41 * 1.2e-5))
    measured = Links(
        1e9, 1e9, 8, measured=(("all_reduce", 2, 1e-3, 0.0), ("all_reduce", 4, 2e-3, 0.0))
    )
    assert commit_s(measured, 4) == 2e-3


def test_an_exchange_sends_what_is_for_others() -> None:
    assert exchange_s(DRY, 8e9, RankGroup(4)) == pytest.approx(8 * 3 / 4)
    assert exchange_s(DRY, 8e9, RankGroup(8)) == pytest.approx(8 * 4 / 8 / 0.1)
    assert exchange_s(LINKS, 8e9, RankGroup(8)) - exchange_s(
        DRY, 8e9, RankGroup(8)
    ) == pytest.approx(3e-2)
    assert exchange_s(LINKS, 8e9, RankGroup(1)) == 0.0


def test_a_send_leaves_the_node_where_the_stride_does() -> None:
    assert send_s(LINKS, 1e9, 3) == pytest.approx(1 + 1e-3)
    assert send_s(LINKS, 1e9, 4) == pytest.approx(10 + 1e-2)


def test_two_things_at_once_take_the_longer_and_slow_each_other() -> None:
    assert under(5.0, 2.0, 0.25) == 5.5 == under(2.0, 5.0, 0.25)
    assert under(5.0, 0.0, 0.25) == 5.0


def test_links_are_shares_of_the_peaks() -> None:
    links = Links.of(gpu(gbps=100.0), Kernels(node=0.5, link=0.8), 8)
    assert (links.inside, links.between, links.per_node) == (0.5 * 4.5e11, 0.8 * 1.25e10, 8)
