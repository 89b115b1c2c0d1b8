"""Samples of unequal length: a step's samples dealt to the ranks and cut into micro-batches of a
budget of tokens.

All of it is a function of the lengths, so every rank finds the same cut by itself, and all ranks
have the same number of micro-batches, as the collectives of sharded parameters need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic.errors import ProgramError, SpecError
from elastic.types import Job

KEY = "microbatch_tokens"


@dataclass(frozen=True)
class Microbatch:
    """Samples that are computed at once, each filled up to `length` tokens; None = all samples have
    one shape. Without samples its tensors have no rows."""

    ids: Sequence[int]
    length: int | None = None

    @property
    def n_places(self) -> int:
        return len(self.ids) * (self.length or 0)


Cut = tuple[tuple[Microbatch, ...], ...]  # [data-parallel rank][micro-batch]


@dataclass(frozen=True)
class TokenBudget:
    """`tokens`: the most places of a micro-batch, rows x longest row, filling included. `length`:
    sample id -> its tokens. Rows are filled up to a multiple of `multiple`."""

    length: Callable[[int], int]
    tokens: int
    multiple: int = 1

    def cut(self, ids: Sequence[int], weights: Sequence[int]) -> Cut:
        """Samples `ids` for ranks that take shares in proportion to `weights` (0 = none), in
        equally many micro-batches each.

        Raises ProgramError for a sample that is longer than the budget.
        """
        lengths = [self.length(sample) for sample in ids]
        for sample, length in zip(ids, lengths, strict=True):
            if self.filled(length) > self.tokens:
                raise ProgramError(
                    f"sample {sample} has {length} tokens (filled up: {self.filled(length)}), "
                    f"{KEY} is {self.tokens}; cut it shorter in the dataset, or raise the budget"
                )
        ranks = [
            self._fitted([(lengths[i], ids[i]) for i in dealt])
            for dealt in partition(lengths, weights)
        ]
        n = max(1, *(len(rank) for rank in ranks))
        return tuple(tuple(self._microbatch(part) for part in split(rank, n)) for rank in ranks)

    def filled(self, length: int) -> int:
        return -(-max(1, length) // self.multiple) * self.multiple

    def of_one(self, sample: int, times: int) -> Microbatch:
        """A sample as often as it fits, at most `times`."""
        length = self.filled(self.length(sample))
        return Microbatch((sample,) * max(1, min(times, self.tokens // length)), length)

    def _fitted(self, rows: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Rows (length, sample), the longest first, in the fewest pieces of neighbors that the
        budget allows."""
        found: list[list[tuple[int, int]]] = []
        for row in rows:
            if not found or (len(found[-1]) + 1) * self.filled(found[-1][0][0]) > self.tokens:
                found.append([])
            found[-1].append(row)
        return found

    def _microbatch(self, rows: Sequence[tuple[int, int]]) -> Microbatch:
        return Microbatch(
            tuple(sample for _, sample in rows), self.filled(rows[0][0] if rows else self.length(0))
        )


def partition(lengths: Sequence[int], weights: Sequence[int]) -> list[list[int]]:
    """Places in `lengths` for each rank, the longest first: each goes where it would be finished
    first, when a rank gets through `weights[rank]` tokens at once (0: it gets none). Longest
    processing time first (Graham 1969): with equal weights no rank has more than the mean and one
    sample, nor more than 4/3 of the best there is."""
    found: list[list[int]] = [[] for _ in weights]
    speeds = np.asarray(weights, dtype=np.float64)
    loads = np.where(speeds > 0, 0.0, np.inf)
    speeds = np.maximum(speeds, 1e-9)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = int(np.argmin((loads + lengths[i]) / speeds))
        found[rank].append(i)
        loads[rank] += lengths[i]
    return found


def split(pieces: Sequence[list[tuple[int, int]]], n: int) -> list[list[tuple[int, int]]]:
    """As `n` pieces: the one with the most places is halved until there are enough, or each has one
    row; then empty ones."""
    found = list(pieces)
    while len(found) < n:
        i = max(
            range(len(found)),
            key=lambda i: (len(found[i]) > 1, len(found[i]) * found[i][0][0]),
            default=-1,
        )
        if i < 0 or len(found[i]) < 2:
            break
        half = len(found[i]) // 2
        found[i : i + 1] = [found[i][:half], found[i][half:]]
    return [*found, *([] for _ in range(n - len(found)))]


def pad_share(cut: Cut, n_tokens: int) -> float:
    """Share of the places of all micro-batches that hold none of the `n_tokens`."""
    n_places = sum(part.n_places for rank in cut for part in rank)
    return 1 - n_tokens / n_places if n_places else 0.0


def budget_of(job: Job, dataset: Any, multiple: int = 1) -> TokenBudget | None:
    """None where the job cuts micro-batches by samples."""
    tokens = job.microbatch_tokens
    return TokenBudget(dataset.length, tokens, multiple) if tokens else None


def check_lengths(job: Job, dataset: Any, what: str) -> None:
    """Raises SpecError that begins with `what` where the job needs lengths that the dataset does
    not know, or has a sample that fits into no micro-batch."""
    tokens = job.microbatch_tokens
    if not tokens:
        return
    if not callable(getattr(dataset, "length", None)):
        raise SpecError(
            f"{what}: {KEY} needs the length of a sample before it is read; give "
            f"{type(dataset).__name__} a method length(sample id) -> tokens"
        )
    longest = getattr(dataset, "longest", None)
    if longest is not None and longest()[0] > tokens:
        raise SpecError(
            f"{what}: {longest()[1]}: a sample of {longest()[0]} tokens, {KEY} is {tokens}; raise "
            "it"
        )


def no_rows(job: Job, raised: str, where: str) -> str:
    """What is said of a program that raises over a micro-batch without samples."""
    return (
        f"{raised}, over a micro-batch of 0 rows: {where}; let the program take 0 rows (in view "
        f"and reshape sizes in place of -1), or give a larger {KEY} (it is "
        f"{job.microbatch_tokens}) or global_batch ({job.global_batch}), or fewer ranks "
        "(max_workers)"
    )
