"""Transfers for random models, layouts and nodes: exactly once, living holders only, balanced,
alike on every rank, undone."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counting import calls
from support.reshard.optimum import least_busiest
from support.reshard.reshard_cases import Cut, lost_tensor, random_cut, random_model, random_move

from elastic.errors import InternalError, StateLost
from elastic.reshard import routes
from elastic.reshard.pieces import Side, bytes_of
from elastic.reshard.rank_boxes import Region, boxes, meet, state_specs
from elastic.reshard.routes import alike, choices, least_loaded, one_by_one
from elastic.reshard.transfer_plan import check_cover, plan_transfers
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec, Transfer

State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """Old ranks that are gone have no place; the others are ranks of the new layout or only
    send."""

    model: ModelProfile
    old: Cut
    new: Cut
    holders: dict[int, tuple[int, ...]]
    nodes: list[str]

    @property
    def plain(self) -> tuple[ModelProfile, Cut, Cut, dict[int, tuple[int, ...]], list[str]]:
        return self.model, self.old, self.new, self.holders, self.nodes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = Random(draw(st.integers(0, 1 << 32)))
    model, old, new = random_move(random)
    n_old, n_new = old[0].world_size, new[0].world_size
    n_kept = draw(st.sampled_from([0, random.randint(0, min(n_old, n_new)), min(n_old, n_new)]))
    kept = dict(zip(random.sample(range(n_old), n_kept), random.sample(range(n_new), n_kept)))
    senders = iter(range(n_new, n_new + n_old))
    place = {rank: kept[rank] if rank in kept else next(senders) for rank in range(n_old)}
    n = n_new + n_old - n_kept
    copies = draw(st.integers(0, 2))
    holders = {
        r: tuple(dict.fromkeys((p, *random.sample(range(n), min(n, copies)))))
        for r, p in place.items()
    }
    dead = set(random.sample(range(n), draw(st.integers(0, min(2, n)))))
    holders = {r: tuple(p for p in who if p not in dead) for r, who in holders.items()}
    per_node = draw(st.integers(1, 4))
    return Case(model, old, new, holders, [f"node-{i // per_node}" for i in range(n)])


def whole(model: ModelProfile) -> State:
    """Every element of the logical state has a number of its own."""
    out, at = {}, 1
    for spec in state_specs(model):
        n = int(np.prod(spec.shape, dtype=np.int64))
        out[spec.fqn] = np.arange(at, at + n, dtype=np.int64).reshape(spec.shape)
        at += n
    return out


def cut_up(model: ModelProfile, cut: Cut, source: State) -> list[State]:
    """What each rank holds."""
    ranks = []
    for rank in range(cut[0].world_size):
        held = {}
        for box in boxes(model, *cut, rank):
            held[box.fqn] = source[box.fqn][
                tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
            ].copy()
        ranks.append(held)
    return ranks


def apply(
    model: ModelProfile, old: Cut, new: Cut, held: list[State], transfers: tuple[Transfer, ...]
) -> list[State]:
    """Carries the transfers out on arrays; what is not written stays -1, what is written twice
    raises."""

    def offsets(cut: Cut) -> list[dict[str, tuple[int, ...]]]:
        return [
            {b.fqn: b.offsets for b in boxes(model, *cut, rank)}
            for rank in range(cut[0].world_size)
        ]

    olds, news = offsets(old), offsets(new)
    out = [
        {b.fqn: np.full(b.sizes, -1, dtype=np.int64) for b in boxes(model, *new, rank)}
        for rank in range(new[0].world_size)
    ]
    for t in transfers:
        here = tuple(
            slice(o - b, o - b + s) for o, b, s in zip(t.offsets, olds[t.holding][t.fqn], t.sizes)
        )
        there = tuple(
            slice(o - b, o - b + s)
            for o, b, s in zip(t.offsets, news[t.destination][t.fqn], t.sizes)
        )
        target = out[t.destination][t.fqn]
        assert (target[there] == -1).all(), "written twice"
        target[there] = held[t.holding][t.fqn][here]
    return out


def same(some: list[State], others: list[State]) -> bool:
    return all(
        one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
        for one, other in zip(some, others, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(cases())
def test_random_transitions(case: Case) -> None:
    model, old, new, holders, nodes = case.plain
    living = {rank for rank, who in holders.items() if who}
    if lost_tensor(model, old, living) is not None:
        with pytest.raises(StateLost):
            plan_transfers(*case.plain)
        return
    transfers = plan_transfers(*case.plain)
    assert all(t.source in holders[t.holding] for t in transfers), (
        "a sender that does not hold the box"
    )
    logical = whole(model)
    got = apply(model, old, new, cut_up(model, old, logical), transfers)
    assert same(got, cut_up(model, new, logical)), "an element is missing or wrong"
    for rank in range(new[0].world_size):
        check_cover(transfers, boxes(model, *new, rank), rank)
    n = len(nodes)
    for me in {0, n // 3, n // 2, n - 1}:  # each sees its part of one and the same plan
        shuffled = dict(sorted(holders.items(), key=lambda item: (item[0] * 7919) % 31))
        mine = tuple(t for t in transfers if me in (t.source, t.destination))
        assert plan_transfers(model, old, new, shuffled, nodes, me) == mine


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(cases())
def test_there_and_back_is_the_identity(case: Case) -> None:
    model, a, b, _, _ = case.plain
    n_a, n_b = a[0].world_size, b[0].world_size
    everyone = [f"n{i}" for i in range(max(n_a, n_b))]
    there = plan_transfers(model, a, b, {r: (r,) for r in range(n_a)}, everyone)
    back = plan_transfers(model, b, a, {r: (r,) for r in range(n_b)}, everyone)
    start = cut_up(model, a, whole(model))
    assert same(apply(model, b, a, apply(model, a, b, start, there), back), start)


def busiest(case: Case) -> tuple[int, float, int]:
    """Bytes of the busiest sender, the least possible, and the largest part that several could
    send."""
    model, old, new, holders, nodes = case.plain
    sent: dict[int, int] = defaultdict(int)
    jobs: dict[frozenset[int], int] = defaultdict(int)
    largest = 0
    # and who has them
    pieces: dict[str, dict[Region, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in range(old[0].world_size):
        for box in boxes(model, *old, rank):
            pieces[box.fqn][box.offsets, box.sizes].update(holders[rank])
    for t in plan_transfers(*case.plain):
        part = (t.offsets, t.sizes)
        able = next(who for piece, who in pieces[t.fqn].items() if meet(piece, part) is not None)
        if t.destination in able:
            assert t.source == t.destination
            continue
        able = {p for p in able if nodes[p] == nodes[t.destination]} or able
        assert t.source in able, t.fqn
        jobs[frozenset(able)] += t.n_bytes
        largest = max(largest, t.n_bytes if len(able) > 1 else 0)
        sent[t.source] += t.n_bytes
    return max(sent.values(), default=0), least_busiest(jobs), largest


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(cases())
def test_the_busiest_sender_has_at_most_the_optimum_twice_and_one_part(case: Case) -> None:
    living = {rank for rank, who in case.holders.items() if who}
    if lost_tensor(case.model, case.old, living) is None:
        most, least, largest = busiest(case)
        assert most <= 2 * least + largest


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(1, 60))
def test_with_nested_holders_it_has_the_optimum_and_one_part(
    replicas: int, shards: int, joining: int, n_tensors: int
) -> None:
    """New replicas on nodes of their own: the sets of possible senders are disjoint, one for each
    shard."""
    specs = tuple(
        TensorSpec(f"w{i}", (shards * (1 + i % 7), 3), "float32", block=0) for i in range(n_tensors)
    )
    model = ModelProfile(1, 0, specs, (OptimizerSpec(("m", "v")),))
    old, new = (
        Layout(dp_replicate=replicas, dp_shard=shards),
        Layout(dp_replicate=replicas + joining, dp_shard=shards),
    )
    holders = {r: (r,) for r in range(old.world_size)}
    most, least, largest = busiest(
        Case(model, (old, ()), (new, ()), holders, [f"n{i}" for i in range(new.world_size)])
    )
    assert most <= least + largest


def test_plans_are_those_of_the_first_arithmetic() -> None:
    """Recorded when each part was an object, and each overlap was looked for by itself."""
    found = hashlib.sha256()
    for seed in range(6):
        random = Random(seed)
        model, old, new = random_move(random)
        n = max(old[0].world_size, new[0].world_size)
        holders = {
            r: tuple({random.randrange(n), random.randrange(n)}) for r in range(old[0].world_size)
        }
        found.update(
            repr(
                plan_transfers(model, old, new, holders, [f"n{i // 3}" for i in range(n)])
            ).encode()
        )
    large = ModelProfile(1, 0, (TensorSpec("w", (1 << 18, 1 << 10), "float32", block=0),))
    holders = {r: (r, (r + 5) % 12) for r in range(12)}
    sides = (Layout(dp_replicate=3, dp_shard=4), ()), (Layout(dp_shard=9), ())
    found.update(
        repr(plan_transfers(large, *sides, holders, [f"n{i // 4}" for i in range(12)])).encode()
    )
    assert found.hexdigest()[:16] == "ee22a80d996c8095"


def test_one_large_tensor_is_sent_by_all_that_have_it() -> None:
    model = ModelProfile(1, 0, (TensorSpec("w", (1 << 18, 1 << 10), "float32", block=0),))  # 1 GiB
    transfers = plan_transfers(
        model,
        (Layout(dp_replicate=4), ()),
        (Layout(dp_replicate=5), ()),
        {r: (r,) for r in range(4)},
        list("abcde"),
    )
    sent: dict[int, int] = defaultdict(int)
    for t in transfers:
        if t.destination == 4 and t.fqn == "model.w":
            sent[t.source] += t.n_bytes
    assert [sent[r] for r in range(4)] == [1 << 28] * 4


def test_shard_bytes_are_those_of_the_boxes() -> None:
    random = Random(5)
    for _ in range(20):
        model = random_model(random)
        cut = random_cut(random, model.n_blocks)
        ranks = range(cut[0].world_size)
        assert bytes_of(Side(model, cut)).tolist() == [
            sum(b.n_bytes for b in boxes(model, *cut, r)) for r in ranks
        ]


def test_a_cover_with_a_gap_an_overlap_or_a_stranger_is_refused() -> None:
    model = ModelProfile(1, 0, (TensorSpec("w", (8, 4), "float32", block=0),))
    cut: Cut = (Layout(), ())
    mine = boxes(model, *cut, 0)
    good = plan_transfers(model, (Layout(dp_shard=2), ()), cut, {0: (0,), 1: (1,)}, ["a", "b"])
    check_cover(good, mine, 0)
    twice = Transfer("model.w", (0, 0), (4, 4), "float32", 0, 0)
    for bad in (
        good[1:],
        (*good, good[0]),
        (twice, twice, *good[2:]),
        (*good, Transfer("x", (0,), (1,), "float32", 0, 0)),
    ):
        with pytest.raises(InternalError):
            check_cover(bad, mine, 0)


def test_64_ranks_and_4500_tensors_in_few_calls() -> None:
    """A state with the shapes of a 405B model: 126 blocks of nine tensors, two moments and a scalar
    each."""
    h, f, kv, n_blocks = 16384, 53248, 1024, 126
    shapes = {
        "wq": (h, h, 0),
        "wk": (kv, h, 0),
        "wv": (kv, h, 0),
        "wo": (h, h, 1),
        "w1": (f, h, 0),
        "w3": (f, h, 0),
        "w2": (h, f, 1),
    }
    specs = [TensorSpec("embed", (128256, h), "float32", 0, -1)]
    for i in range(n_blocks):
        specs += [
            TensorSpec(f"layers.{i}.{name}", (a, b), "float32", dim, i)
            for name, (a, b, dim) in shapes.items()
        ]
        specs += [TensorSpec(f"layers.{i}.norm{k}", (h,), "float32", None, i) for k in (1, 2)]
    specs += [
        TensorSpec("norm", (h,), "float32", None, n_blocks),
        TensorSpec("head", (128256, h), "float32", 0, n_blocks),
    ]
    model = ModelProfile(
        n_blocks,
        0,
        tuple(specs),
        (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
        tp_limit=8,
    )

    def both() -> None:
        for old, new in [
            (Layout(dp_shard=64), Layout(pp=4, dp_shard=2, tp=8)),
            (Layout(dp_replicate=2, dp_shard=32), Layout(dp_shard=60)),
        ]:
            layers = (32, 32, 31, 31) if new.pp == 4 else ()
            nodes = [f"n{i // 8}" for i in range(new.world_size)] + ["m"] * (64 - new.world_size)
            mine = plan_transfers(
                model, (old, ()), (new, layers), {r: (r,) for r in range(64)}, nodes, me=3
            )
            assert len(mine) > 10_000

    assert calls(both) < 500_000  # 200,000: 0.25 s on an idle core


@pytest.mark.parametrize("seed", range(40))
def test_many_parts_at_once_go_where_one_after_the_other_would(seed: int) -> None:
    chance = Random(seed)
    loads = [chance.choice([0, 3, 3, chance.randrange(1000)]) for _ in range(chance.randint(1, 30))]
    amount, times = chance.choice([1, 7, 400]), chance.randint(1, 80)
    left, chosen = list(loads), []
    for _ in range(times):
        chosen.append(min(range(len(left)), key=lambda k: (left[k], k)))
        left[chosen[-1]] += amount
    for choose in (least_loaded, one_by_one):
        assert choose(np.array(loads), amount, times).tolist() == chosen


def test_parts_are_chosen_for_at_once_where_nobody_could_send_two_kinds_of_them() -> None:
    """Pairs of senders at places 0, 2 and 3 of `who`: apart while place 3 is left out."""
    who = np.array([7, 8, 1, 2, 3])
    first, parts = np.array([0, 2, 0, 2]), np.array([4, 5, 6, 9])
    found = [(place, some.tolist()) for place, some in choices(first, parts, 2, who=who)]
    assert found == [(0, [4, 6]), (2, [5, 9])]
    first[1] = 3
    found = [(place, some.tolist()) for place, some in choices(first, parts, 2, who=who)]
    assert found == [(0, [4]), (3, [5]), (0, [6]), (2, [9])]


@pytest.mark.parametrize("seed", range(25))
def test_plain_numbers_choose_the_senders_that_arrays_do(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    model, old, new = random_move(random)
    n = max(old[0].world_size, new[0].world_size)
    holders = {
        rank: tuple(dict.fromkeys((rank, *random.sample(range(n), min(n, random.randint(1, 3))))))
        for rank in range(old[0].world_size)
    }
    nodes = [f"n{i // 2}" for i in range(n)]
    found = []
    for few in (0, 1 << 40):
        monkeypatch.setattr(routes, "FEW", few)
        found.append(plan_transfers(model, old, new, holders, nodes))
    monkeypatch.setattr(routes, "between_two", routes.in_turn)
    found.append(plan_transfers(model, old, new, holders, nodes))
    assert found[0] == found[1] == found[2]


def test_many_replicas_become_one_group_with_few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often somebody is chosen does not grow with the ranks that get a part."""
    asked: list[int] = []
    for name in ("least_loaded", "one_by_one"):
        real = getattr(routes, name)
        monkeypatch.setattr(
            routes, name, lambda *given, real=real: asked.append(given[2]) or real(*given)
        )
    model = random_model(Random(3))
    chosen = []
    for replicas in (8, 32):
        asked.clear()
        n = 4 * replicas
        cuts = (Layout(dp_replicate=replicas, dp_shard=4), ()), (Layout(dp_shard=4), ())
        holders = {r: tuple(range(r % 4, n, 4)) for r in range(n)}
        plan_transfers(model, *cuts, holders, [f"n{i}" for i in range(4, 2 * n)])
        back = Layout(dp_replicate=2 * replicas, dp_shard=4)
        plan_transfers(model, cuts[0], (back, ()), holders, [f"n{i}" for i in range(2 * n)])
        chosen.append(len(asked))
    assert 0 < chosen[0] == chosen[1]


def test_equal_holders_of_equal_boxes_are_looked_at_once() -> None:
    """Plain data parallelism: each of n ranks holds what each other does."""
    layout, everyone = Layout(dp_replicate=300, dp_shard=2), tuple(range(0, 600, 2))
    shared = {0: everyone, 1: tuple(k + 1 for k in everyone)}
    holders = {rank: shared[rank % 2] for rank in range(600)}
    model = random_model(Random(0))
    side = Side(model, (layout, (model.n_blocks,)))
    assert alike(side, holders) == [(0, shared[0]), (1, shared[1])]
    apart = {rank: (rank,) for rank in range(600)}
    assert alike(side, apart) == list(apart.items())
    owned = random_model(Random(0), owners=True)
    assert alike(Side(owned, (layout, (owned.n_blocks,))), holders) == list(holders.items())
