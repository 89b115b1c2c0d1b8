"""The samples that a small copy is compared on: from all over the dataset, unequal ones where they
are found, and as many and as long ones as this machine can pass through it."""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from elastic.data.batches import item_of
from elastic.data.collate import collate
from elastic.errors import ProgramError
from elastic.program import drawing, generators
from elastic.worker.equivalence.forward_trace import Batch
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.small_copy import ROWS, SmallCopy, TooLarge
from elastic.worker.program.calls import call_model, loss_of

# positions: of longer sequences so many are taken, where the model allows it
LONG, SHORT, LEAST = 128, 64, 8
LONGEST = 2048  # for cp, which cuts them
MOST_FLOP = 4e11  # of the passes of one process
TRIED = 16  # samples that are looked at for unequal ones
MORE, LOOKED_AT_S = 48, 1.0  # others that are, to see whether they follow from reads; seconds
AHEAD = 100_000  # reads by which a dataset that counts them is set on
OTHER = (
    "sample {} of the dataset is another one after others have been read{}: it follows from what "
    "was read before, from a generator of its own or from a clock, of which each rank and each "
    "loader process has its own; {}"
)
KEPT = (
    "sample {} of the dataset draws random numbers when it is first read, and keeps them (a "
    "cache): each rank and each loader process keeps what it drew itself, so that later passes "
    "differ with the layout; keep what it is before it draws, or draw from a generator that "
    "[sample id] makes by the sample's id"
)


def batch_of(dataset: Any, budget: Any, n_rows: int = ROWS, *, pair: bool = False) -> Batch:
    """Samples from all over the dataset; of a job with a budget of tokens, of a stream, or of a
    dataset with fewer, the first one again and again. `pair`: two of them are of one class, where
    such are found."""
    if budget is not None:
        part = budget.of_one(0, 1)
        return collate([item_of(dataset, 0, part.length)] * n_rows)
    few = not hasattr(dataset, "__len__") or len(dataset) < n_rows
    if few or type(dataset).__name__ == "Stream":
        return collate([dict(item_of(dataset, 0, None)) for _ in range(n_rows)])
    try:
        items = spread_samples(dataset, n_rows)
        return collate(_with_a_pair(dataset, items) if pair else items)
    except Exception:  # noqa: BLE001 - the user's dataset: what is wrong with its first samples is reported
        return collate([dict(item_of(dataset, i, None)) for i in range(n_rows)])


def check_samples(dataset: Any) -> None:
    """Raises ProgramError where a sample follows from what was read before it, as from a count of
    reads or from a generator that goes on, or stays what it was drawn when it was first read: each
    rank and loader process has read others. What it draws is the same each time."""
    n, until_s = len(dataset), time.monotonic() + LOOKED_AT_S
    try:
        _read(dataset, 0)  # whatever it opens first
        before, first = _numbers(dataset), dict[int, _Read]()
        unread = n - 1
        others = random.Random(n).sample(range(n), min(n, MORE))
        for index in (*_spread(n, min(n, TRIED)), *others):
            if not first or index != unread and time.monotonic() < until_s:
                first[index] = _read(dataset, index)
        counts = {k: x for k, x in _numbers(dataset).items() if x != before.get(k)}
        again = {index: _read(dataset, index) for index in first}
        with _set_on(dataset, {name: value + AHEAD for name, value in counts.items()}):
            ahead = {0: _read(dataset, 0)} if counts else {}
        kept = next((i for i in first if first[i].draws and not again[i].draws), None)
        if kept is not None and _is_its_own(dataset, unread):
            kept = None
    except Exception:  # noqa: BLE001 - the user's dataset: its first samples are reported on
        return
    later = [*again.items(), *ahead.items()]
    other = next((i for i, one in later if not _same(one.item, first[i].item)), None)
    if other is None and kept is None:
        return
    what = f" (it counts by {next(iter(counts))})" if counts else ""
    raise ProgramError(
        KEPT.format(kept) if other is None else OTHER.format(other, what, _mend(counts))
    )


@dataclass(frozen=True)
class _Read:
    """`draws`: from the generators that all share."""

    item: dict[str, Any]
    draws: bool


def _read(dataset: Any, index: int, seed: int = 0) -> _Read:
    with drawing(seed):
        before = generators()
        item = copy.deepcopy(dict(item_of(dataset, index, None)))
        return _Read(item, generators() != before)


def _is_its_own(dataset: Any, index: int) -> bool:
    """Does what it draws for this sample, which was not read yet, follow from the sample alone, by
    a seed that it sets itself? False: nor is it known."""
    try:
        one, other = (_read(copy.deepcopy(dataset), index, seed) for seed in (1, 2))
    except Exception:  # noqa: BLE001 - the user's dataset: an open file has no copy
        return False
    return _same(one.item, other.item)


def _mend(counts: Mapping[str, Any]) -> str:
    if counts:
        return "let it follow from the sample id alone"
    albumentations = "albumentations: transform.set_random_seed(random.getrandbits(32))"
    more = f" ({albumentations})" if "albumentations" in sys.modules else ""
    return (
        "draw by random, numpy.random or torch, or seed a generator of its own in [sample id] by a "
        f"number that these draw{more}"
    )


def _numbers(dataset: Any) -> dict[str, int | float]:
    """What it keeps as numbers of Python, as plain attributes."""
    held = getattr(dataset, "__dict__", {})
    return {k: x for k, x in held.items() if isinstance(x, int | float)}


@contextmanager
def _set_on(dataset: Any, values: dict[str, int | float]) -> Iterator[None]:
    own = {name: getattr(dataset, name) for name in values}
    try:
        for name, value in values.items():
            setattr(dataset, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(dataset, name, value)


def spread_samples(dataset: Any, n: int) -> list[dict[str, Any]]:
    """Samples from all over a dataset of at least `n`, unequal ones where they are found."""
    unequal: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for index in dict.fromkeys((*_spread(len(dataset), n), *_spread(len(dataset), TRIED))):
        item = dict(item_of(dataset, index, None))
        (others if any(_same(item, one) for one in unequal) else unequal).append(item)
        if len(unequal) == n:
            break
    return (unequal + others)[:n]


def _with_a_pair(dataset: Any, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the place of the last one a sample of the first one's class, where no two are of one: that
    beside it, as of classes that stand in order, or another."""
    classes = any(_of_one_class(one, one) for one in items)
    if not classes or any(_of_one_class(one, other) for one, other in combinations(items, 2)):
        return items
    until_s = time.monotonic() + LOOKED_AT_S
    for index in (1, *_spread(len(dataset), TRIED)):
        if time.monotonic() > until_s:
            break
        item = dict(item_of(dataset, index, None))
        if _of_one_class(items[0], item) and not any(_same(item, one) for one in items):
            return [*items[:-1], item]
    return items


def _of_one_class(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Have they a whole number in common?"""
    numbers = ((np.asarray(one[key]), np.asarray(other[key])) for key in one.keys() & other.keys())
    return any(
        a.size == b.size == 1 and a.dtype.kind in "iu" and a.item() == b.item() for a, b in numbers
    )


def _spread(size: int, n: int) -> list[int]:
    """Of each part of the dataset one, each at another place of it: what repeats with a period is
    seen too."""
    step = size / n
    return sorted({min(size - 1, int(i * step) + (i if step > n else 0)) for i in range(n)})


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)


def _alike(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    gaps = "f" == one.dtype.kind == other.dtype.kind  # what is missing in a table is NaN
    return np.array_equal(one, other, equal_nan=gaps)


def positions(batch: Batch) -> int:
    return max((x.shape[1] for x in batch.values() if x.ndim == 2), default=0)


def first_positions(batch: Batch, most: int) -> Batch:
    n = positions(batch)
    return {key: x[:, :most] if x.ndim > 1 and x.shape[1] == n else x for key, x in batch.items()}


def shortened(small: SmallCopy, batch: Batch) -> Batch:
    """With the first positions of long sequences, where that is all the same to the model; not for
    cp (`compare`)."""
    n = positions(batch)
    if n <= LONG:
        return batch
    allowed = int(MOST_FLOP / (small.flop * ROWS))
    cut = first_positions(batch, max(LEAST, min(SHORT, allowed // LEAST * LEAST)))
    try:
        with torch.no_grad(), Still():
            output = call_model(
                small.program, copy.deepcopy(small.model), {key: x[:1] for key, x in cut.items()}
            )
            loss_of(small.program, output, {key: x[:1] for key, x in cut.items()})
    except Exception:  # noqa: BLE001 - the user's model: its length is its own
        return batch
    small.long_batch = batch
    return cut


def longest(small: SmallCopy, batch: Batch) -> tuple[int, int]:
    """Samples and positions of a batch whose passes this machine can do: all positions of one
    rather than some of each."""
    n, most = positions(batch), MOST_FLOP / small.flop
    for rows in (ROWS, 2, 1):
        if n * rows <= most and n <= LONGEST:
            return rows, n
    return 1, max(LEAST, min(LONGEST, int(most)) // LEAST * LEAST)


def check_rows(small: SmallCopy, batch: Batch) -> None:
    """Raises ProgramError where even one process has no finite loss, TooLarge where its passes
    would take too long."""
    tokens = max((x.shape[1] for x in batch.values() if x.ndim > 1), default=1) * ROWS
    if small.flop * tokens > MOST_FLOP:
        raise TooLarge(
            f"{small.flop * tokens:.1e} FLOP for {ROWS} samples, {MOST_FLOP:.0e} are done"
        )
    with torch.no_grad(), Still():
        model = copy.deepcopy(small.model)
        value = float(loss_of(small.program, call_model(small.program, model, batch), batch))
    if not math.isfinite(value):
        raise ProgramError(f"the loss of {ROWS} samples of a fresh model is {value}")
