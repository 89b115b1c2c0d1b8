"""Who becomes which rank: never worse than the order given, the best where nothing binds, and nodes
stay whole."""

from __future__ import annotations

import time
from itertools import permutations
from random import Random

import numpy as np
import pytest
from support.reshard.reshard_cases import random_cut, random_model

from elastic.reshard.rank_reuse import _assigned, kept_bytes, place
from elastic.reshard.transfer_forecast import Room, TransferRates, forecast
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec, WorkerId

MODEL = ModelProfile(
    4,
    0,
    tuple(TensorSpec(f"w{i}", (64, 64), "float32", i % 2, i) for i in range(4)),
    (OptimizerSpec(("m", "v")),),
    tp_limit=8,
)


@pytest.mark.parametrize("seed", range(40))
def test_the_assignment_is_the_best_of_all(seed: int) -> None:
    random = Random(seed)
    n = random.randint(1, 6)
    cost = [
        [random.randint(-9, 9) * 10 ** random.randint(0, 12) for _ in range(n)] for _ in range(n)
    ]
    found = _assigned(np.array(cost)).tolist()
    assert sorted(found) == list(range(n))
    best = min(sum(cost[i][j] for i, j in enumerate(p)) for p in permutations(range(n)))
    assert sum(cost[i][j] for i, j in enumerate(found)) == best


@pytest.mark.parametrize("seed", range(30))
def test_no_order_keeps_more(seed: int) -> None:
    """One worker per node, all alike: the best of all orders, by the transfers that they lead
    to."""
    random = Random(seed)
    model = random_model(random)
    while True:
        old, new = random_cut(random, model.n_blocks), random_cut(random, model.n_blocks)
        if old[0].world_size <= 5 and new[0].world_size <= 5:
            break
    workers = [WorkerId(f"n{i}", 0) for i in range(new[0].world_size)]
    old_of = dict(
        zip(workers, random.sample(range(old[0].world_size), min(old[0].world_size, len(workers))))
    )
    held = {worker: [rank] for worker, rank in old_of.items()}
    kept = kept_bytes(model, (old, new), [held.get(w, []) for w in workers])
    best = max(
        sum(kept[rank][k] for rank, k in enumerate(order))
        for order in permutations(range(len(workers)))
    )
    found = place(model, (old, new), held, ranks=workers, kinds={})
    assert sorted(found) == sorted(workers)
    assert sum(kept[rank][workers.index(worker)] for rank, worker in enumerate(found)) == best


def test_kept_is_what_the_forecast_calls_its_own() -> None:
    old, new = (Layout(dp_replicate=2, dp_shard=2), ()), (Layout(dp_shard=4), ())
    workers = [WorkerId(f"n{i}", 0) for i in range(4)]
    found = place(
        MODEL, (old, new), {w: [i] for i, w in enumerate(workers)}, ranks=workers, kinds={}
    )
    holders = {
        rank: tuple(i for i, w in enumerate(found) if workers.index(w) in (rank, (rank + 2) % 4))
        for rank in range(4)
    }
    move = forecast(
        MODEL,
        old,
        new,
        holders=holders,
        nodes=[w.node_id for w in found],
        room=Room(),
        pace=TransferRates(),
    ).move
    assert move.n_bytes == 0, "a quarter of what each replica has is what each needs"


def test_nodes_stay_whole_and_change_places_with_their_kind_only() -> None:
    old, new = (Layout(dp_shard=4, tp=2), ()), (Layout(dp_shard=4, tp=2), ())
    workers = [WorkerId(f"n{i}", k) for i in range(4) for k in range(2)]
    held = {worker: [7 - i] for i, worker in enumerate(workers)}  # the other way round
    free = place(MODEL, (old, new), held, ranks=workers, kinds={})
    assert list(free) == workers[::-1]
    bound = place(
        MODEL,
        (old, new),
        held,
        ranks=workers,
        kinds={"n0": "spot", "n1": "spot", "n2": "owned", "n3": "owned"},
    )
    assert {w.node_id for w in bound[:4]} == {"n0", "n1"}
    for found in (free, bound):
        assert all(found[i].node_id == found[i + 1].node_id for i in range(0, 8, 2)), (
            "a tp group was torn apart"
        )


def test_who_gains_nothing_stays() -> None:
    workers = [WorkerId(f"n{i}", 0) for i in range(6)]
    cuts = (Layout(dp_shard=6), ()), (Layout(dp_shard=6), ())
    assert place(
        MODEL, cuts, {w: [i] for i, w in enumerate(workers)}, ranks=workers, kinds={}
    ) == tuple(workers)
    assert place(MODEL, cuts, {}, ranks=workers, kinds={}) == tuple(workers)


@pytest.mark.slow
def test_128_workers_in_seconds() -> None:
    workers = [WorkerId(f"n{i}", 0) for i in range(128)]
    random = Random(1)
    ranks = random.sample(range(128), 128)
    started = time.process_time()
    place(
        MODEL,
        ((Layout(dp_replicate=2, dp_shard=64), ()), (Layout(dp_shard=128), ())),
        {w: [r] for w, r in zip(workers, ranks)},
        ranks=workers,
        kinds={},
    )
    assert time.process_time() - started < 10.0  # 0.7 s on an idle core
