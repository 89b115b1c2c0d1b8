"""Micro-batches of a budget of tokens: each sample once, the budget kept, ranks balanced, a cut
that all ranks find alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.batches import batch_of, filled, item_of
from elastic.data.budget import Microbatch, TokenBudget, check_lengths, pad_share, partition, split
from elastic.data.collate import collate
from elastic.errors import ProgramError, SpecError
from elastic.types import Job

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)


@settings(deadline=None)
@given(
    LENGTHS,
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(0, 200),
    st.sampled_from([1, 2, 8, 12]),
)
def test_each_sample_once_within_the_budget(
    lengths: list[int], weights: list[int], more: int, multiple: int
) -> None:
    first = 1000  # ids are no places
    length = {first + i: n for i, n in enumerate(lengths)} | {0: lengths[0]}
    budget = TokenBudget(length.__getitem__, 72 + more, multiple)
    ids = [first + i for i in range(len(lengths))]
    cut = budget.cut(ids, weights)
    assert len(cut) == len(weights) and len({len(rank) for rank in cut}) == 1
    assert sorted(sample for rank in cut for part in rank for sample in part.ids) == ids
    for part in (part for rank in cut for part in rank):
        assert (
            part.length is not None and part.length % multiple == 0 and part.n_places <= 72 + more
        )
        assert all(length[sample] <= part.length for sample in part.ids)
        assert not part.ids or part.length < max(length[sample] for sample in part.ids) + multiple
    assert budget.cut(ids, weights) == cut
    fewest = max(
        len(budget._fitted([(length[s], s) for part in rank for s in part.ids])) for rank in cut
    )
    assert len(cut[0]) == fewest  # as few as the fullest rank needs
    assert 0 <= pad_share(cut, sum(lengths)) < 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_equal_ranks_have_equal_tokens_but_for_one_sample(lengths: list[int], n_ranks: int) -> None:
    loads = [sum(lengths[i] for i in dealt) for dealt in partition(lengths, [3] * n_ranks)]
    assert max(loads) - min(loads) <= max(lengths)
    assert max(loads) <= sum(lengths) / n_ranks + max(lengths) * (n_ranks - 1) / n_ranks
    least = max(
        max(lengths),
        sum(lengths) / n_ranks,
        2 * sorted(lengths)[-n_ranks - 1] if len(lengths) > n_ranks else 0,
    )
    assert max(loads) <= 1.5 * least  # whatever the best is, it is not below this


@settings(deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
def test_no_rank_would_rather_give_its_last_sample_away(
    lengths: list[int], weights: list[int]
) -> None:
    dealt = partition(lengths, weights)
    loads = [sum(lengths[i] for i in places) for places in dealt]
    for rank, places in enumerate(dealt):
        assert not places or weights[rank]
        for other, weight in enumerate(weights):
            if places and weight:
                assert (
                    loads[rank] / weights[rank]
                    <= (loads[other] + lengths[places[-1]]) / weight + 1e-9
                )


def test_halves_of_the_largest_then_empty_ones() -> None:
    rows = [(9, 0), (8, 1), (3, 2), (3, 3)]
    assert split([rows], 2) == [rows[:2], rows[2:]]
    assert split([rows], 3) == [rows[:1], rows[1:2], rows[2:]]
    assert split([rows], 6) == [*([row] for row in rows), [], []]
    assert split([], 2) == [[], []]
    budget = TokenBudget([4, 30, 5].__getitem__, 30, 8)
    cut = TokenBudget([4, 30, 5].__getitem__, 32, 8).cut([1, 2], [1, 1, 1])
    assert cut == ((Microbatch((1,), 32),), (Microbatch((2,), 8),), (Microbatch((), 8),))
    with pytest.raises(
        ProgramError, match=r"sample 1 has 30 tokens \(filled up: 32\), microbatch_tokens is 30"
    ):
        budget.cut([0, 1], [1])
    assert budget.of_one(0, 9) == Microbatch((0, 0, 0), 8) and budget.of_one(1, 9) == Microbatch(
        (1,), 32
    )


class Words:
    """Sample i has i + 1 tokens."""

    def __len__(self) -> int:
        return 9

    def length(self, index: int) -> int:
        return index + 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = index + 1
        return {
            "input": torch.arange(1, n + 1), "labels": np.arange(n), "vectors": np.ones((n, 2),
            np.float32), "document": torch.zeros(n, dtype=torch.int64), "n": n,
        }  # fmt: skip


def test_rows_are_filled_up_by_key() -> None:
    batch = batch_of(partial(item_of, Words()), Microbatch((2, 0), 4), collate)
    assert batch["input"].tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]] and batch["n"].tolist() == [3, 1]
    assert batch["labels"].tolist() == [[0, 1, 2, -100], [0, -100, -100, -100]]
    assert batch["document"].tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    assert (
        batch["vectors"].shape == (2, 4, 2)
        and batch["vectors"].sum() == 8
        and batch["vectors"].dtype == torch.float32
    )
    none = batch_of(partial(item_of, Words()), Microbatch((), 4), collate)
    assert {key: tuple(value.shape) for key, value in none.items()} == {
        "input": (0, 4), "labels": (0, 4), "vectors": (0, 4, 2), "document": (0, 4), "n": (0,),
    }  # fmt: skip


def test_what_cannot_be_filled_up() -> None:
    with pytest.raises(
        ProgramError,
        match=r"length\(\) says 4 tokens, but no array begins with that dimension: 'x' \[3\]",
    ):
        filled({"x": torch.zeros(3)}, 4, 4)
    with pytest.raises(
        ProgramError, match="a sample has input_ids: none of target, labels, .*attention_mask: ones"
    ):
        filled({"input_ids": torch.zeros(3)}, 3, 4)
    assert filled({"input_ids": torch.zeros(3)}, 3, 3)["input_ids"].shape == (3,)
    with pytest.raises(ProgramError, match="must be a dict of tensors, not a list of 1"):
        item_of([[1]], 0, 2)
    with pytest.raises(
        SpecError,
        match=r"Program.dataset: microbatch_tokens needs .* give list a method length\(sample id\)",
    ):
        check_lengths(Job(microbatch_tokens=8), [1], "Program.dataset")
    check_lengths(Job(), [1], "Program.dataset")
