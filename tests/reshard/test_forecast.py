"""What a move will cost, from integers alone."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from support.reshard.reshard_cases import random_cut, random_model

from elastic.reshard import pieces
from elastic.reshard.chunks import CHUNK_BYTES, STAGING_BYTES
from elastic.reshard.forecast import LEAST_S, Pace, Room, forecast
from elastic.reshard.pieces import Cut, shard_bytes
from elastic.reshard.transfers import plan_transfers
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec

MIB = 1 << 20
MODEL = ModelProfile(
    4, 0, tuple(TensorSpec(f"w{i}", (1024, 1024), "float32", 0, i) for i in range(4)), (OptimizerSpec(("m", "v")),), tp_limit=2
)
FOUR: Cut = (Layout(dp_shard=4), ())
NODES = ["a", "a", "b", "b"]
SHARD = 12 * MIB + 16  # four tensors with two moments, a quarter each; the RNG on every rank


def live(n: int) -> dict[int, tuple[int, ...]]:
    return {rank: (rank,) for rank in range(n)}


@pytest.mark.parametrize("seed", range(25))
def test_bytes_are_those_of_the_transfers(seed: int) -> None:
    random = Random(seed)
    model = random_model(random)
    old, new = random_cut(random, model.n_blocks), random_cut(random, model.n_blocks)
    n = max(old[0].world_size, new[0].world_size)
    nodes = [f"n{i // 2}" for i in range(n)]
    move = forecast(model, old, new, live(old[0].world_size), nodes, (Room(), Pace()))
    links: Counter[tuple[str, str]] = Counter()
    own = 0
    for t in plan_transfers(model, old, new, live(old[0].world_size), nodes):
        own += t.n_bytes if t.source == t.destination else 0
        links[nodes[t.source], nodes[t.destination]] += t.n_bytes if t.source != t.destination else 0
    assert {(a, b): n_bytes for a, b, n_bytes in move.links} == {k: v for k, v in links.items() if v}
    assert (move.n_bytes, move.own_bytes) == (sum(links.values()), own)
    total = sum(shard_bytes(model, new))
    assert move.n_bytes + move.own_bytes == total, "each byte of each new box is either moved or copied in place"


def test_the_same_layout_on_the_same_ranks_takes_only_the_copy_in_place() -> None:
    move = forecast(MODEL, FOUR, FOUR, live(4), NODES, (Room(), Pace(1e9)))
    assert (move.n_bytes, move.links, move.own_bytes) == (0, (), 4 * SHARD)
    assert move.seconds == pytest.approx(LEAST_S + SHARD / 1e9)


def test_seconds_are_those_of_the_busiest_link_and_follow_the_pace() -> None:
    """Node b leaves: its half of the state crosses the link to a."""
    crossing = 2 * SHARD - 32  # the RNG is there already
    for rate, times in ((1e9, 1.0), (2e9, 1.0), (1e9, 3.0)):
        move = forecast(MODEL, FOUR, (Layout(dp_shard=2), ()), live(4), NODES, (Room(), Pace(rate, times)))
        assert {(a, b): n for a, b, n in move.links}["b", "a"] == crossing
        assert move.seconds == pytest.approx(LEAST_S + times * crossing / rate)


def test_peak_is_one_shard_and_the_staging_or_the_larger_shard() -> None:
    """device: old + staging; host, where both do not fit: nothing but what the old shard was larger by, and a chunk."""
    two: Cut = (Layout(dp_shard=2), ())
    device = forecast(MODEL, FOUR, two, live(4), NODES, (Room(), Pace()))
    assert (device.via, device.peak_bytes) == ("device", SHARD + STAGING_BYTES)
    fits = Room(memory_bytes=3 * SHARD + STAGING_BYTES + 64)
    assert forecast(MODEL, FOUR, two, live(4), NODES, (fits, Pace())).via == "device"
    tight = Room(memory_bytes=3 * SHARD)
    host = forecast(MODEL, FOUR, two, live(4), NODES, (tight, Pace()))
    assert host.via == "host" and host.peak_bytes <= STAGING_BYTES < device.peak_bytes
    back = forecast(MODEL, two, FOUR, live(2), NODES, (tight, Pace()))
    assert back.via == "host" and back.peak_bytes == max(SHARD - 16 + CHUNK_BYTES, STAGING_BYTES)


def test_peak_on_gpus_counts_their_staging() -> None:
    """1 GiB of buffers on each GPU, or one message of 128 MiB beside the larger shard."""
    two: Cut = (Layout(dp_shard=2), ())
    device = forecast(MODEL, FOUR, two, live(4), NODES, (Room(device_type="cuda"), Pace()))
    assert (device.via, device.peak_bytes) == ("device", SHARD + (1 << 30))
    tight = Room(3 * SHARD + (1 << 30) - MIB, device_type="cuda")
    assert forecast(MODEL, FOUR, two, live(4), NODES, (tight, Pace())).via == "host"


def test_what_the_steps_need_counts_too() -> None:
    """The old state stays until its content was compared behind the first steps: activations need their place beside it."""
    room = Room(memory_bytes=100 * MIB, running_bytes=80 * MIB)
    assert forecast(MODEL, FOUR, FOUR, live(4), NODES, (room, Pace())).via == "host"
    assert forecast(MODEL, FOUR, FOUR, live(4), NODES, (Room(100 * MIB, 40 * MIB), Pace())).via == "device"


def test_a_side_is_cut_once_for_all_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often a tensor is looked at does not depend on the number of ranks that it is cut for, nor does the state's list."""
    asked: Counter[str] = Counter()
    for name in ("region", "placements"):
        inner = getattr(pieces, name)
        monkeypatch.setattr(pieces, name, lambda *given, name=name, inner=inner: asked.update([name]) or inner(*given))
    for n in (8, 64):
        asked.clear()
        forecast(MODEL, (Layout(dp_shard=n), ()), (Layout(dp_shard=n - 1), ()), live(n), ["a"] * n, (Room(), Pace()))
        assert asked == {"region": 4, "placements": 2}, "of each side: all that is cut alike, and the buffers"
