"""What a move will cost, from integers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.reshard.reshard_cases import random_move

from elastic.reshard import flows, pieces, transfer_forecast
from elastic.reshard.chunks import CHUNK_BYTES, LEAST_S, STAGING_BYTES
from elastic.reshard.communicators import (
    messages_bytes,
    n_communicators,
    running_bytes,
    set_up_bytes,
)
from elastic.reshard.pieces import Cut, Side, bytes_of
from elastic.reshard.rank_boxes import placements
from elastic.reshard.transfer_forecast import Room, TransferRates
from elastic.reshard.transfer_plan import plan_transfers
from elastic.types import Layout, ModelProfile, Move, OptimizerSpec, TensorSpec

MIB = 1 << 20
MODEL = ModelProfile(
    4,
    0,
    tuple(TensorSpec(f"w{i}", (1024, 1024), "float32", 0, i) for i in range(4)),
    (OptimizerSpec(("m", "v")),),
    tp_limit=2,
)
FOUR: Cut = (Layout(dp_shard=4), ())
NODES = ["a", "a", "b", "b"]
SHARD = 12 * MIB + 16  # four tensors with two moments, a quarter each; the RNG on every rank


def forecast(*cut: Any, **more: Any) -> Move:
    return transfer_forecast.forecast(*cut, **more).move


def live(n: int) -> dict[int, tuple[int, ...]]:
    return {rank: (rank,) for rank in range(n)}


@pytest.mark.parametrize("seed", range(25))
def test_bytes_are_those_of_the_transfers(seed: int) -> None:
    random = Random(seed)
    model, old, new = random_move(random)
    n = max(old[0].world_size, new[0].world_size)
    nodes = [f"n{i // 2}" for i in range(n)]
    move = forecast(
        model,
        old,
        new,
        holders=live(old[0].world_size),
        nodes=nodes,
        room=Room(),
        pace=TransferRates(),
    )
    links: Counter[tuple[str, str]] = Counter()
    own = 0
    for t in plan_transfers(model, old, new, live(old[0].world_size), nodes):
        own += t.n_bytes if t.source == t.destination else 0
        links[nodes[t.source], nodes[t.destination]] += (
            t.n_bytes if t.source != t.destination else 0
        )
    assert {(a, b): n_bytes for a, b, n_bytes in move.links} == {
        k: v for k, v in links.items() if v
    }
    assert (move.n_bytes, move.own_bytes) == (sum(links.values()), own)
    total = sum(bytes_of(Side(model, new)))
    assert move.n_bytes + move.own_bytes == total, (
        "each byte of each new box is either moved or copied in place"
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_is_summed_at_once_is_what_the_transfers_add_up_to(seed: int) -> None:
    """Links, seconds, and the way, at the memory at which it changes, from the list of transfers;
    with other holders, several of each, and owners of whole tensors."""
    random = Random(seed)
    model, old, new = random_move(random, owners=seed % 4 == 0)
    n_old, n = old[0].world_size, max(old[0].world_size, new[0].world_size) + seed % 3
    others = [random.sample(range(n), random.randint(0, 2)) for _ in range(n_old)]
    holders = {
        rank: tuple(dict.fromkeys((rank, *(others[rank] if seed % 2 else ()))))
        for rank in range(n_old)
    }
    nodes = [f"n{i // 3}" for i in range(n)]
    given = {"holders": holders, "nodes": nodes, "pace": TransferRates(1.0)}
    of_node, of_rank = Counter[tuple[str, str]](), Counter[tuple[str, int]]()
    links: Counter[tuple[str, str]] = Counter()
    near: list[set[int]] = [set() for _ in range(n)]
    far = [False] * n
    for t in plan_transfers(model, old, new, holders, nodes):
        a, b = nodes[t.source], nodes[t.destination]
        if a != b:
            of_node["out", a] += t.n_bytes
            of_node["in", b] += t.n_bytes
            far[t.source] = far[t.destination] = True
        else:
            of_rank["out", t.source] += t.n_bytes
        if t.source != t.destination:
            links[a, b] += t.n_bytes
            if a == b:
                of_rank["in", t.destination] += t.n_bytes
                near[t.source].add(t.destination)
                near[t.destination].add(t.source)
    move = forecast(model, old, new, room=Room(device_type="cuda"), **given)
    assert move.links == tuple((a, b, links[a, b]) for a, b in sorted(links))
    assert move.seconds == LEAST_S + max(*of_node.values(), *of_rank.values(), 0)
    held = bytes_of(Side(model, old), padded=True).tolist()
    had = [max((held[r] for r, who in holders.items() if p in who), default=0) for p in range(n)]
    got = [*bytes_of(Side(model, new)).tolist(), *[0] * n]
    beside = [
        transfer_forecast.CONTEXT_BYTES
        + set_up_bytes(new[0] if p < new[0].world_size else Layout(), n)
        + messages_bytes(len(near[p]), far[p])
        for p in range(n)
    ]
    needed = max(had[p] + got[p] + beside[p] for p in range(n)) + (1 << 30 if n > 1 else 0)
    for memory, via in ((needed, "device"), (needed - 1, "host")):
        assert forecast(model, old, new, room=Room(memory, 0, "cuda"), **given).via == via


def test_the_same_layout_on_the_same_ranks_takes_only_the_copy_in_place() -> None:
    move = forecast(
        MODEL, FOUR, FOUR, holders=live(4), nodes=NODES, room=Room(), pace=TransferRates(1e9)
    )
    assert (move.n_bytes, move.links, move.own_bytes) == (0, (), 4 * SHARD)
    assert move.seconds == pytest.approx(LEAST_S + SHARD / 1e9)


def test_seconds_are_those_of_the_busiest_link_and_follow_the_pace() -> None:
    """Node b leaves: its half of the state crosses the link to a."""
    crossing = 2 * SHARD - 32  # the RNG is there already
    for rate, times in ((1e9, 1.0), (2e9, 1.0), (1e9, 3.0)):
        move = forecast(
            MODEL,
            FOUR,
            (Layout(dp_shard=2), ()),
            holders=live(4),
            nodes=NODES,
            room=Room(),
            pace=TransferRates(rate, times),
        )
        assert {(a, b): n for a, b, n in move.links}["b", "a"] == crossing
        assert move.seconds == pytest.approx(LEAST_S + times * crossing / rate)


def test_peak_is_one_shard_and_the_staging_or_the_larger_shard() -> None:
    """device: old + staging; host, where both do not fit: nothing but what the old shard was larger
    by, and a chunk."""
    two: Cut = (Layout(dp_shard=2), ())
    device = forecast(
        MODEL, FOUR, two, holders=live(4), nodes=NODES, room=Room(), pace=TransferRates()
    )
    assert (device.via, device.peak_bytes) == ("device", SHARD + STAGING_BYTES)
    fits = Room(memory_bytes=3 * SHARD + STAGING_BYTES + 64)
    assert (
        forecast(
            MODEL, FOUR, two, holders=live(4), nodes=NODES, room=fits, pace=TransferRates()
        ).via
        == "device"
    )
    tight = Room(memory_bytes=3 * SHARD)
    host = forecast(
        MODEL, FOUR, two, holders=live(4), nodes=NODES, room=tight, pace=TransferRates()
    )
    assert host.via == "host" and host.peak_bytes <= STAGING_BYTES < device.peak_bytes
    back = forecast(
        MODEL, two, FOUR, holders=live(2), nodes=NODES, room=tight, pace=TransferRates()
    )
    assert back.via == "host" and back.peak_bytes == max(SHARD - 16 + CHUNK_BYTES, STAGING_BYTES)


def test_peak_on_gpus_counts_their_staging() -> None:
    """1 GiB of buffers on each GPU, or one message of 128 MiB beside the larger shard."""
    two: Cut = (Layout(dp_shard=2), ())
    device = forecast(
        MODEL,
        FOUR,
        two,
        holders=live(4),
        nodes=NODES,
        room=Room(device_type="cuda"),
        pace=TransferRates(),
    )
    assert (device.via, device.peak_bytes) == ("device", SHARD + (1 << 30))
    # and nothing is left for communicators
    tight = Room(3 * SHARD + (1 << 30) - MIB, device_type="cuda")
    assert (
        forecast(
            MODEL, FOUR, two, holders=live(4), nodes=NODES, room=tight, pace=TransferRates()
        ).via
        == "host"
    )


def test_what_the_steps_need_counts_too() -> None:
    """The old state stays until its content was compared behind the first steps: activations need
    their place beside it."""
    room = Room(memory_bytes=100 * MIB, running_bytes=80 * MIB)
    assert (
        forecast(
            MODEL, FOUR, FOUR, holders=live(4), nodes=NODES, room=room, pace=TransferRates()
        ).via
        == "host"
    )
    assert (
        forecast(
            MODEL,
            FOUR,
            FOUR,
            holders=live(4),
            nodes=NODES,
            room=Room(100 * MIB, 40 * MIB),
            pace=TransferRates(),
        ).via
        == "device"
    )


def test_a_side_is_cut_once_for_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often a tensor is looked at does not depend on the number of ranks that it is cut
    for."""
    asked: Counter[str] = Counter()
    region = pieces.region
    monkeypatch.setattr(
        pieces, "region", lambda *given, **more: asked.update(["region"]) or region(*given, **more)
    )
    for n in (8, 64):
        asked.clear()
        forecast(
            MODEL,
            (Layout(dp_shard=n), ()),
            (Layout(dp_shard=n - 1), ()),
            holders=live(n),
            nodes=["a"] * n,
            room=Room(),
            pace=TransferRates(),
        )
        assert asked == {"region": 4}, "of each side: all that is cut alike, and the buffers"
    assert placements(MODEL) is placements(MODEL), "the state's list is made once"


# ---------------------------------------------------------------------------- beside torch's memory

GIB = 1 << 30


def test_a_communicator_is_counted_once_for_axes_with_the_same_ranks() -> None:
    counts = {
        Layout(): 0, Layout(dp_shard=8): 1, Layout(cp=2): 1, Layout(dp_shard=2, cp=2): 2,
        Layout(pp=2): 1, Layout(pp=4): 2, Layout(pp=4, dp_replicate=2, dp_shard=2, cp=2, tp=2): 6,
    }  # fmt: skip
    assert {layout: n_communicators(layout) for layout in counts} == counts


def test_bytes_of_communicators() -> None:
    """384 MiB each, the world's too; 448 for each peer of a node that messages go to, 512 for all
    others together."""
    assert set_up_bytes(Layout(dp_shard=8), 8) == 2 * 384 * MIB
    assert set_up_bytes(Layout(), 1) == 0 and set_up_bytes(Layout(), 2) == 384 * MIB
    assert (
        messages_bytes(7, across=False) == 3136 * MIB
        and messages_bytes(0, across=True) == 512 * MIB
    )
    assert running_bytes(Layout(pp=4), 4) == (3 * 384 + 2 * 448) * MIB


def test_a_move_leaves_room_for_the_communicators_that_it_uses() -> None:
    """Four ranks in two nodes become two: rank 0 keeps its bytes and gets those of others, in its
    node and across."""
    two: Cut = (Layout(dp_shard=2), ())
    staging, context = GIB, 512 * MIB
    rank_0 = SHARD + (2 * SHARD - 16) + staging + context + 2 * 384 * MIB + 448 * MIB
    assert (
        forecast(
            MODEL,
            FOUR,
            two,
            holders=live(4),
            nodes=NODES,
            room=Room(rank_0 + 512 * MIB, device_type="cuda"),
            pace=TransferRates(),
        ).via
        == "device"
    )
    assert (
        forecast(
            MODEL,
            FOUR,
            two,
            holders=live(4),
            nodes=NODES,
            room=Room(rank_0 - MIB, device_type="cuda"),
            pace=TransferRates(),
        ).via
        == "host"
    )
    assert (
        forecast(
            MODEL,
            FOUR,
            two,
            holders=live(4),
            nodes=NODES,
            room=Room(3 * SHARD + STAGING_BYTES),
            pace=TransferRates(),
        ).via
        == "device"
    ), "not on gloo"


def test_the_way_by_host_memory_takes_its_time() -> None:
    """What leaves the device and what comes back, of the busiest one, at the rate between the two;
    more where not pinned."""
    two: Cut = (Layout(dp_shard=2), ())
    quick, slow = (
        forecast(
            MODEL,
            FOUR,
            two,
            holders=live(4),
            nodes=NODES,
            room=Room(1, device_type="cuda", host_bytes_per_s=rate),
            pace=TransferRates(times=2.0),
        )
        for rate in (1e9, 1e8)
    )
    unknown = forecast(
        MODEL,
        FOUR,
        two,
        holders=live(4),
        nodes=NODES,
        room=Room(1, device_type="cuda"),
        pace=TransferRates(times=2.0),
    )
    assert (quick.via, unknown.via) == ("host", "host")
    assert quick.seconds - unknown.seconds == pytest.approx(2 * (2 * SHARD) / 1e9)
    assert slow.seconds - unknown.seconds == pytest.approx(10 * (quick.seconds - unknown.seconds))


@pytest.mark.parametrize("seed", range(10))
def test_what_nodes_are_called_changes_their_names_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links are in the order of these; few links of many nodes are put in order otherwise."""
    random = Random(seed)
    model, old, new = random_move(random)
    n = max(old[0].world_size, new[0].world_size)
    more = {"room": Room(), "pace": TransferRates(), "holders": live(old[0].world_size)}
    names = [f"n{i}" for i in range(n)]
    other = dict(zip(names, random.sample([f"spot-{i}" for i in range(n)], n), strict=True))
    move = forecast(model, old, new, nodes=names, **more)
    renamed = forecast(model, old, new, nodes=list(other.values()), **more)
    links = sorted((other[a], other[b], n_bytes) for a, b, n_bytes in move.links)
    assert list(renamed.links) == links and list(move.links) == sorted(move.links)
    assert replace(renamed, links=move.links) == move
    for times in (0, 1 << 40):
        monkeypatch.setattr(flows, "DENSE", times)
        again = forecast(replace(model), old, new, nodes=names, **more)
        assert again == move
