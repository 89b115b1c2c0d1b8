"""A weighted mixture of map-style sets: which sample of which set is a function of the sample id,
with exact weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from hashlib import sha256
from itertools import accumulate
from math import ceil
from typing import Any

from elastic.data.order import permuted
from elastic.errors import SpecError


class Mixture:
    """`sets` in the shares of `weights`; without weights each sample of each set once.

    An epoch has `n_samples`; by default so many that every set has been gone through at least once.
    Of them, set c has n_c = weight * n_samples (rounded so that they add up), in a keyed order of
    its own: the first n_c of its samples, or all of them as often as they fit in and then the first
    of another order. Ids of one set are neighbors: the order of the run shuffles them. Raises
    SpecError where a set is empty or a weight is not positive.
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        n_samples: int | None = None,
        *,
        seed: int = 0,
    ) -> None:
        self.names, self.sets, self.seed = tuple(sets), tuple(sets.values()), seed
        lengths = [len(one) for one in self.sets]
        for name, length in zip(self.names, lengths):
            if not length:
                raise SpecError(f"mixture: '{name}' has no samples")
        if not lengths:
            raise SpecError("mixture: it has no sets")
        if weights is not None and set(weights) != set(self.names):
            raise SpecError(
                f"mixture: weights are for {', '.join(weights)}, the sets are "
                f"{', '.join(self.names)}"
            )
        given = [
            Fraction(weights[name]) if weights is not None else Fraction(n)
            for name, n in zip(self.names, lengths)
        ]
        for name, weight in zip(self.names, given):
            if weight <= 0:
                raise SpecError(
                    f"mixture: the weight of '{name}' is {float(weight):g}; it must be more than 0"
                )
        shares = [weight / sum(given) for weight in given]
        self.n_samples = n_samples or max(
            ceil(length / share) for length, share in zip(lengths, shares)
        )
        self.counts = apportioned(self.n_samples, shares)
        self._starts = [0, *accumulate(self.counts)]

    def __len__(self) -> int:
        return self.n_samples

    def source(self, index: int) -> tuple[int, int]:
        """(number of the set, sample of it)"""
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples}")
        one = bisect_right(self._starts, index) - 1
        length = len(self.sets[one])
        epoch, place = divmod(index - self._starts[one], length)
        key = sha256(f"{self.seed} {self.names[one]}".encode()).digest()[:8]
        return one, permuted(length, int.from_bytes(key, "little"), epoch, place)

    def length(self, index: int) -> int:
        """Of the sample, in tokens, where the sets know it."""
        one, sample = self.source(index)
        return int(self.sets[one].length(sample))

    def __getitem__(self, index: int) -> Any:
        one, sample = self.source(index)
        return self.sets[one][sample]


def apportioned(n: int, shares: list[Fraction]) -> list[int]:
    """`n` in these shares, in whole numbers (largest remainder, the earlier on a tie)."""
    exact = [n * share for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: n - sum(counts)]:
        counts[i] += 1
    return counts
