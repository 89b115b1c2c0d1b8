"""The order of the samples: a permutation per epoch, the same for every layout, for any number of
samples."""

from __future__ import annotations

import time
from collections import Counter
from random import Random

import pytest

from elastic.data.order import digest, digest_text, sample_ids, share
from elastic.errors import SpecError


def stream(n: int, batch: int, seed: int, steps: int) -> list[int]:
    return [sample for step in range(steps) for sample in sample_ids(n, batch, seed, step=step)]


@pytest.mark.parametrize("n", [*range(1, 40), 97, 256, 1000, 4099])
def test_each_sample_of_an_epoch_comes_up_once(n: int) -> None:
    for batch in (1, 7, n, n + 3):
        ids = stream(n, batch, 5, -(-3 * n // batch))
        for epoch in range(3):
            assert sorted(ids[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_the_stream_does_not_depend_on_how_it_is_cut_into_steps() -> None:
    assert stream(50, 10, 1, 12) == stream(50, 40, 1, 3) == stream(50, 1, 1, 120)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 500
    orders = [
        tuple(stream(n, n, seed, 3)[e * n : (e + 1) * n]) for seed in (0, 1, 2) for e in range(3)
    ]
    assert len(set(orders)) == 9
    assert stream(n, n, 1, 1) == stream(n, n, 1, 1)


def test_the_order_is_kept_from_release_to_release() -> None:
    """A changed order would let a resumed run repeat and leave out samples."""
    assert sample_ids(1000, 6, 42, step=7) == [147, 728, 726, 223, 705, 867]
    assert digest_text(digest(range(10))) == "000000155963f90000001452bc36"


def test_orders_look_random() -> None:
    """Positions of sample 0 over many seeds are spread evenly; neighbors in the order are not
    neighbors in the data."""
    n, tries = 16, 3200
    where = Counter(sample_ids(n, n, seed, step=0).index(0) for seed in range(tries))
    chi2 = sum((where[i] - tries / n) ** 2 / (tries / n) for i in range(n))
    assert chi2 < 45  # 15 degrees of freedom: 0.01 % at 44.3
    ids = sample_ids(10_000, 10_000, 0, step=0)
    assert sum(abs(a - b) == 1 for a, b in zip(ids, ids[1:])) < 12  # 2 are expected
    assert sum(a == i for i, a in enumerate(ids)) < 8  # 1 is expected


def test_a_trillion_samples_cost_what_a_thousand_cost() -> None:
    def seconds(n: int) -> float:
        start = time.process_time()
        ids = sample_ids(n, 512, 3, step=10**9)
        assert len(ids) == 512 and all(0 <= i < n for i in ids)
        return time.process_time() - start

    small, large = (min(seconds(n) for _ in range(5)) for n in (10**3, 10**12))
    assert large < 10 * small
    assert len(set(sample_ids(10**12, 4096, 3, step=10**6))) == 4096


def test_shares_are_a_partition_of_the_step() -> None:
    ids = sample_ids(100, 10, 0, step=4)
    samples = (3, 0, 5, 2)
    parts = [ids[share(samples, dp)] for dp in range(4)]
    assert [len(part) for part in parts] == [3, 0, 5, 2] and sum(parts, []) == ids


def test_digests_add_over_shares_and_are_exact_in_float64() -> None:
    ids = sample_ids(10**9, 1000, 0, step=3)
    parts = [digest(ids[:1]), digest(ids[1:400]), digest(ids[400:]), digest([])]
    summed = [sum(float(part[i]) for part in parts) for i in range(2)]
    assert digest_text(summed) == digest_text(digest(ids)) and len(digest_text(summed)) == 28
    assert all(float(value) == value < 2**53 for value in digest(ids))
    # so 2**27 of them stay exact
    assert max(digest([i])[k] for i in range(3000) for k in range(2)) < 2**26


def test_digest_tells_samples_apart_but_not_their_order() -> None:
    random = Random(0)
    ids = list(range(200))
    whole = digest(ids)
    random.shuffle(ids)
    assert digest(ids) == whole
    for change in ([*ids[:-1], 200], ids[:-1], [*ids, ids[0]], [*ids[:-1], ids[0]]):
        assert all(a != b for a, b in zip(digest(change), whole))
    assert len({digest([i]) for i in range(20_000)}) == 20_000


@pytest.mark.parametrize("bad", [(0, 1, 0), (5, 0, 0), (5, 1, -1)])
def test_sizes_that_make_no_sense_are_refused(bad: tuple[int, int, int]) -> None:
    n, batch, step = bad
    with pytest.raises(SpecError, match=f"dataset of {n}"):
        sample_ids(n, batch, 0, step=step)
