"""Mixtures: exact shares per epoch, every sample of every set, and the same for everybody."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.mixture import Mixture, apportioned
from elastic.data.order import sample_ids
from elastic.errors import SpecError


def named(name: str, n: int) -> list[tuple[str, int]]:
    return [(name, i) for i in range(n)]


SETS = {"code": named("code", 30), "web": named("web", 100), "books": named("books", 7)}


def test_without_weights_each_sample_comes_up_once() -> None:
    mixture = Mixture(SETS)
    assert len(mixture) == 137
    assert sorted(mixture[i] for i in range(137)) == sorted(sum(SETS.values(), []))


def test_weights_are_exact_and_every_set_is_gone_through() -> None:
    mixture = Mixture(SETS, {"code": 0.5, "web": 0.25, "books": 0.25})
    assert len(mixture) == 400
    found = Counter(mixture[i] for i in range(400))
    assert [sum(n for (name, _), n in found.items() if name == wanted) for wanted in SETS] == [
        200,
        100,
        100,
    ]
    for name, items in SETS.items():
        times = [found[item] for item in items]
        assert min(times) >= 1 and max(times) - min(times) <= 1, name


def test_a_given_length_cuts_each_set_in_its_own_order() -> None:
    mixture = Mixture(SETS, {"code": 1, "web": 2, "books": 1}, n_samples=41)
    assert mixture.counts == [10, 21, 10]
    web = [item for item in (mixture[i] for i in range(41)) if item[0] == "web"]
    assert len(set(web)) == 21 and [i for _, i in web] != sorted(i for _, i in web)
    other = Mixture(SETS, {"code": 1, "web": 2, "books": 1}, n_samples=41, seed=1)
    assert [other[i] for i in range(41)] != [mixture[i] for i in range(41)]
    assert [Mixture(SETS, {"code": 1, "web": 2, "books": 1}, 41)[i] for i in range(41)] == [
        mixture[i] for i in range(41)
    ]


def test_a_huge_mixture_costs_nothing() -> None:
    sets = {"a": range(10**12), "b": range(10**9)}
    mixture = Mixture(sets, {"a": 0.9, "b": 0.1})
    ids = sample_ids(len(mixture), 1000, 0, step=5)
    share = sum(mixture.source(i)[0] == 0 for i in ids) / 1000
    assert 0.85 < share < 0.95 and len({mixture[i] for i in ids}) == 1000


@given(
    n=st.integers(1, 10**6),
    weights=st.lists(st.fractions(Fraction(1, 1000), 1), min_size=1, max_size=8),
)
def test_apportioned(n: int, weights: list[Fraction]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    counts = apportioned(n, shares)
    assert sum(counts) == n and all(
        abs(count - n * share) < 1 for count, share in zip(counts, shares)
    )


def test_bad_mixtures() -> None:
    with pytest.raises(SpecError, match="'b' has no samples"):
        Mixture({"a": [1], "b": []})
    with pytest.raises(SpecError, match="no sets"):
        Mixture({})
    with pytest.raises(SpecError, match="weights are for a, the sets are a, b"):
        Mixture({"a": [1], "b": [2]}, {"a": 1})
    with pytest.raises(SpecError, match="weight of 'a' is 0; it must be more"):
        Mixture({"a": [1]}, {"a": 0})
    with pytest.raises(IndexError, match="sample 1 of 1"):
        Mixture({"a": [1]})[1]
