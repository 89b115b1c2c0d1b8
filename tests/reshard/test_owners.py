"""Owners of tensors that are stepped whole: balanced, stable, one for each; and what goes to them
and back."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from support.reshard.reshard_cases import OWNED, elements, random_cut, random_model

from elastic.reshard.owner_exchange import SteppedWhole, in_buckets, stepped_whole
from elastic.reshard.owners import jump, shared_out
from elastic.reshard.rank_boxes import boxes, owners
from elastic.types import Box, Layout, ModelProfile, OptimizerSpec, TensorSpec
from elastic.types.grid import coordinates, stage_ranks

SIZES = (4, 4, 4, 4, 16, 16, 16)  # of a block of a decoder


def costs(n_blocks: int) -> dict[str, int]:
    return {f"layers.{i}.{k}": 1000 * n for i in range(n_blocks) for k, n in enumerate(SIZES)}


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 64])
def test_owners_are_balanced(n: int) -> None:
    given = costs(32)
    load: Counter[int] = Counter()
    for name, rank in shared_out(given, n).items():
        load[rank] += given[name]
    assert set(load) <= set(range(n))
    assert max(load.values()) <= sum(given.values()) / n + max(given.values())
    if n <= 8:
        assert max(load.values()) <= 1.05 * sum(given.values()) / n


def test_owners_hardly_change_with_the_model_and_the_ranks() -> None:
    given = costs(32)
    one = shared_out(given, 8)
    assert one == shared_out(dict(reversed(given.items())), 8)
    more = shared_out(given | {"head.weight": 20_000}, 8)
    grown = shared_out(given, 9)
    kept = sum(more[name] == rank for name, rank in one.items())
    stayed = sum(grown[name] == rank for name, rank in one.items())
    assert kept > 0.75 * len(given) and stayed > 0.55 * len(given)
    assert [jump(k, 9) for k in range(500)] != [jump(k, 8) for k in range(500)]
    assert all(jump(k, 9) in (jump(k, 8), 8) for k in range(500))


def test_a_slow_step_weighs_more_than_its_bytes() -> None:
    """Ten factors that are decomposed, and a hundred momenta: FLOPs decide."""
    heavy = OptimizerSpec(owned=OWNED, form="{}", flop=1e9)
    light = OptimizerSpec(owned=OWNED, form="{}", flop=1.0)
    specs = [TensorSpec(f"a{i}", (8, 8), "float32", optimizer=0) for i in range(10)]
    specs += [TensorSpec(f"b{i}", (8, 8), "float32", optimizer=1) for i in range(100)]
    model = ModelProfile(1, 0, tuple(specs), (heavy, light))
    found = owners(model, Layout(dp_shard=5), ())
    assert set(Counter(r for fqn, (r,) in found.items() if fqn[0] == "a").values()) == {2}


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_alike_for_each_owner_and_no_larger_than_they_may_be(seed: int) -> None:
    random = Random(seed)
    stepped = [
        SteppedWhole(TensorSpec(f"w{i}", (random.randint(1, 40), 8), "float32"), owner, None, False)
        for i in range(random.randint(1, 60))
        for owner in [random.randrange(5)]
    ]
    most = random.choice([64, 1000, 10_000, 1 << 30])
    buckets = in_buckets(stepped, most)
    assert Counter(one.spec.fqn for bucket in buckets for one in bucket) == Counter(
        one.spec.fqn for one in stepped
    ), "each once"
    largest = max(one.whole_bytes for one in stepped)
    totals = Counter[int]()
    for one in stepped:
        totals[one.owner] += one.whole_bytes
    assert len(buckets) <= -(-max(totals.values()) // most)
    for bucket in buckets:
        for owner, total in totals.items():
            here = sum(one.whole_bytes for one in bucket if one.owner == owner)
            assert here < most + largest
            assert here < total / -(-max(totals.values()) // most) + largest
    assert in_buckets([], most) == []


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_each_tensor_has_one_owner_in_each_stage_and_all_pieces_reach_it(seed: int) -> None:
    random = Random(seed)
    model = random_model(random, owners=True)
    layout, layers = random_cut(random, model.n_blocks)
    n = layout.world_size // layout.pp
    for pp in range(layout.pp):
        ranks = stage_ranks(layout, pp)
        seen = {rank: stepped_whole(model, layout, layers, rank=rank) for rank in ranks}
        orders = {tuple(one.spec.fqn for one in found) for found in seen.values()}
        assert len(orders) == 1
        for i, one in enumerate(seen[ranks[0]]):
            each = {rank % n: seen[rank][i] for rank in ranks}
            assert {other.owner for other in each.values()} == {one.owner}
            top, fqn = each[one.owner], f"model.{one.spec.fqn}"
            held = {rank % n: boxes(model, layout, layers, rank) for rank in ranks}
            mine = {k: next((b for b in held[k] if b.fqn == fqn), None) for k in held}
            for k, other in each.items():
                box = mine[k]
                assert other.mine == (box and (box.offsets, box.sizes))
                assert other.gives == (k in dict(top.sources))
                assert k == one.owner or not (other.sources or other.targets)
                names = {b.fqn for b in held[k] if b.fqn.endswith(f".{one.spec.fqn}")}
                assert (f"optim.factor.{one.spec.fqn}" in names) == (k == one.owner)
            assert dict(top.targets) == {k: each[k].mine for k in each if each[k].mine}
            gathered = elements(Box(fqn, *part, "float32") for _, part in top.sources)
            whole = elements([Box(fqn, (0,) * len(one.spec.shape), one.spec.shape, "float32")])
            assert gathered == whole, "each element once"
            replicas = {coordinates(layout, ranks[k]).dp_replicate for k, _ in top.sources}
            assert replicas <= {coordinates(layout, ranks[one.owner]).dp_replicate}
