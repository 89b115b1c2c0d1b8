"""Transfers: each element of each new box exactly once, from somebody who has it, from near before
far."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from support.reshard.reshard_cases import (
    Cut,
    all_elements,
    elements,
    lost_tensor,
    random_model,
    random_move,
)

from elastic.errors import StateLost
from elastic.reshard.rank_boxes import boxes, owned_boxes, state_specs
from elastic.reshard.transfer_plan import holders_of, plan_transfers
from elastic.types import (
    Box,
    Holding,
    Layout,
    ModelProfile,
    OptimizerSpec,
    Resume,
    TensorSpec,
    Transfer,
    WorkerId,
)
from elastic.types.grid import expert_groups


def flat(rows: int = 64, n: int = 1, block: int = 0) -> ModelProfile:
    return ModelProfile(
        1, 0, tuple(TensorSpec(f"w{i}", (rows, 4), "float32", block=block) for i in range(n))
    )


def check(
    model: ModelProfile, old: Cut, new: Cut, holders: dict[int, tuple[int, ...]], nodes: list[str]
) -> tuple[Transfer, ...]:
    """Everything that must hold of a plan; returns it."""
    transfers = plan_transfers(model, old, new, holders, nodes)
    held = {rank: elements(boxes(model, *old, rank)) for rank in range(old[0].world_size)}
    mine: dict[int, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    near: dict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    for rank, participants in holders.items():
        for participant in participants:
            mine[participant] |= set(held[rank])
            near[nodes[participant]] |= set(held[rank])
    for rank in range(new[0].world_size):
        got = [t for t in transfers if t.destination == rank]
        # a Counter: no gap, no overlap
        assert elements(got) == elements(boxes(model, *new, rank)), rank
        for t in got:
            part = elements([t])
            assert t.source in holders[t.holding]
            assert not part - held[t.holding]
            if t.source != rank:
                assert mine[rank].isdisjoint(part)
                if nodes[t.source] != nodes[rank]:
                    assert near[nodes[rank]].isdisjoint(part)
    return transfers


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 30))]
)
@pytest.mark.parametrize("common", ["none", "some", "all"])
@pytest.mark.sampled(16)
def test_random_pairs_are_covered_exactly_once(seed: int, common: str) -> None:
    """Old ranks are new ranks, partly new ranks, or none of them; some boxes have a second holder;
    nodes have 1-4 workers."""
    random = Random(seed)
    model, old, new = random_move(random, owners=seed % 2 > 0)
    n_old, n_new = old[0].world_size, new[0].world_size
    n_kept = {"none": 0, "some": random.randint(0, min(n_old, n_new)), "all": min(n_old, n_new)}[
        common
    ]
    kept = dict(zip(random.sample(range(n_old), n_kept), random.sample(range(n_new), n_kept)))
    senders = iter(range(n_new, n_new + n_old))
    place = {rank: kept[rank] if rank in kept else next(senders) for rank in range(n_old)}
    n_participants = n_new + n_old - n_kept
    holders = {
        r: (p, *random.sample(range(n_participants), random.randint(0, 1)))
        for r, p in place.items()
    }
    nodes = [f"node-{i // random.randint(1, 4)}" for i in range(n_participants)]
    transfers = check(model, old, new, holders, nodes)
    assert transfers == plan_transfers(model, old, new, dict(reversed(holders.items())), nodes)
    for me in {0, n_new - 1, n_participants - 1}:
        mine = tuple(t for t in transfers if me in (t.source, t.destination))
        assert plan_transfers(model, old, new, holders, nodes, me) == mine, (
            "each sees its part of one and the same plan"
        )


def test_the_same_layout_moves_nothing_over_the_wire() -> None:
    cut = (Layout(dp_replicate=2, dp_shard=3, tp=2), ())
    transfers = check(
        random_model(Random(1)), cut, cut, {r: (r,) for r in range(12)}, ["a"] * 6 + ["b"] * 6
    )
    assert all(t.source == t.destination for t in transfers)


def test_own_copy_of_another_rank_is_used_before_the_wire() -> None:
    """Rank 1 is lost; its partner, rank 0, has its boxes: the one survivor needs nobody."""
    transfers = check(flat(), (Layout(dp_shard=2), ()), (Layout(), ()), {0: (0,), 1: (0,)}, ["a"])
    assert {(t.source, t.destination) for t in transfers} == {(0, 0)}
    assert {t.holding for t in transfers} == {0, 1}


def test_the_same_node_is_asked_before_others() -> None:
    old, new = (Layout(dp_replicate=4), ()), (Layout(dp_replicate=6), ())
    nodes = ["a", "a", "b", "b", "b", "c"]  # ranks 4 and 5 are new; 4 shares its node with 2 and 3
    transfers = check(flat(n=6), old, new, {r: (r,) for r in range(4)}, nodes)
    assert {t.source for t in transfers if t.destination == 4} == {2, 3}
    assert {t.source for t in transfers if t.destination == 5} == {0, 1}  # 2 and 3 were busy


def test_senders_are_balanced() -> None:
    """Eight new ranks on their own nodes fetch from eight replicas: no sender has more than a
    tensor above the mean."""
    old, new = (Layout(dp_replicate=8), ()), (Layout(dp_replicate=16), ())
    nodes = [f"n{i}" for i in range(16)]
    transfers = plan_transfers(flat(n=40), old, new, {r: (r,) for r in range(8)}, nodes)
    sent: Counter[int] = Counter()
    for t in transfers:
        if t.source != t.destination:
            sent[t.source] += t.n_bytes
    largest = max(t.n_bytes for t in transfers)
    assert set(sent) == set(range(8)) and max(sent.values()) - min(sent.values()) <= largest


def test_a_part_without_holder_is_named() -> None:
    model = flat()
    cut = (Layout(dp_shard=4), ())
    holders = {0: (0,), 1: (1,), 3: (2,)}
    with pytest.raises(StateLost, match=r"model\.w0.*rank 2"):
        plan_transfers(model, cut, (Layout(dp_shard=3), ()), holders, ["a", "b", "c"])
    assert lost_tensor(model, cut, (0, 1, 3)) == "model.w0"
    assert lost_tensor(model, cut, range(4)) is None


def test_a_missing_rank_is_no_loss_where_a_replica_or_no_piece_is_left() -> None:
    model = flat(rows=2)
    two = (Layout(dp_replicate=2, dp_shard=2), ())
    check(model, two, (Layout(), ()), {0: (0,), 3: (1,)}, ["a", "b"])
    # rank 2 has no row
    check(model, (Layout(dp_shard=3), ()), (Layout(), ()), {0: (0,), 1: (1,)}, ["a", "b"])
    assert lost_tensor(model, two, (0, 3)) is None and lost_tensor(model, two, (0, 2)) == "model.w0"


def test_who_holds_a_replica_of_a_rank_stands_in_for_it() -> None:
    """Ranks 0 and 2 have equal boxes, and so have 1 and 3; 1 and 2 are gone, and b holds a copy of
    rank 0 too."""
    a, b = WorkerId("a", 0), WorkerId("b", 0)
    held = (Holding(a, 1, 0, 4, "live"), Holding(b, 1, 3, 4, "live"), Holding(b, 1, 0, 4, "peer"))
    resume = Resume("peer", 4, 1, Layout(dp_replicate=2, dp_shard=2), (), held)
    assert holders_of(resume, (a, b)) == {0: (0, 1), 1: (1,), 2: (0, 1), 3: (1,)}
    assert holders_of(replace(resume, holdings=held[:1]), (a, b)) == {
        0: (0,),
        1: (),
        2: (0,),
        3: (),
    }


def test_tied_embeddings_have_holders_on_both_stages() -> None:
    tied = TensorSpec("head", (8, 2), "float32", tp_dim=0, block=2, tied_to="embed")
    model = ModelProfile(
        2,
        0,
        (TensorSpec("embed", (8, 2), "float32", tp_dim=0, block=-1), tied),
        (OptimizerSpec(("m",)),),
    )
    old, new = (Layout(pp=2), (1, 1)), (Layout(), ())
    for survivor in (0, 1):
        check(model, old, new, {survivor: (0,)}, ["a"])


def test_32_ranks_and_1000_tensors_are_planned_quickly() -> None:
    specs = tuple(
        TensorSpec(f"layers.{i}.w", (4096 + i, 1024), "float32", i % 2, i // 10) for i in range(250)
    )
    model = ModelProfile(
        25, 0, specs, (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),), tp_limit=8
    )
    old, new = (Layout(dp_shard=32), ()), (Layout(dp_shard=31), ())
    start = time.process_time()
    transfers = plan_transfers(
        model, old, new, {r: (r,) for r in range(32)}, [f"n{r // 8}" for r in range(31)] + ["n9"]
    )
    assert time.process_time() - start < 5.0  # 0.6 s on an idle core
    assert len(transfers) > 30_000


EXPERTS = ModelProfile(
    2,
    0,
    (
        TensorSpec("up", (12, 3), "float32", block=0, by_expert=True),
        TensorSpec("bias", (12,), "float32", block=1, by_expert=True),
        TensorSpec("dense", (7, 2), "float32", block=1),
    ),
    (OptimizerSpec(("m",), ("step",)),),
    n_experts=12,
)
SHARED_OUT: list[Cut] = [
    (Layout(dp_shard=2, ep=2), ()),
    (Layout(dp_shard=4, ep=4), ()),
    (Layout(dp_shard=4, ep=2), ()),
    (Layout(dp_shard=3), ()),
    (Layout(dp_shard=3, cp=2, ep=6), ()),
    (Layout(pp=2, dp_replicate=2, dp_shard=2, ep=2), (1, 1)),
    (Layout(dp_shard=5), ()),
    (Layout(dp_shard=8, ep=4), ()),
]


@pytest.mark.parametrize("i", range(len(SHARED_OUT)))
def test_experts_move_between_their_shares(i: int) -> None:
    """To and from every other way to share them out, with each rank's own kept where it is."""
    old = SHARED_OUT[i]
    for new in SHARED_OUT:
        n = max(old[0].world_size, new[0].world_size)
        holders = {rank: (rank,) for rank in range(old[0].world_size)}
        check(EXPERTS, old, new, holders, [f"n{k // 2}" for k in range(n)])
        own = elements(box for rank in range(old[0].world_size) for box in owned(old, rank))
        assert own == all_elements(state_specs(EXPERTS))


def owned(cut: Cut, rank: int) -> tuple[Box, ...]:
    return owned_boxes(EXPERTS, *cut, rank)


def test_neighbors_have_other_experts() -> None:
    """Of 12 on 4 ranks by ep=2: halves of the first six at ranks 0 and 2, of the others at 1 and
    3; as torch.chunk has it."""
    found = {
        rank: box.offsets[0]
        for rank in range(4)
        for box in boxes(EXPERTS, Layout(dp_shard=4, ep=2), (), rank)
        if box.fqn == "model.up"
    }
    assert found == {0: 0, 2: 3, 1: 6, 3: 9}
    assert expert_groups(Layout(dp_replicate=2, dp_shard=4, ep=2), 6) == ([6, 7], [[0, 2], [4, 6]])
