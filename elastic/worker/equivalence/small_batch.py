"""The samples that a small copy is compared on: from all over the dataset, unequal ones where they
are found, and as many and as long ones as this machine can pass through it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elastic.data.batches import item_of
from elastic.data.collate import collate
from elastic.errors import ProgramError
from elastic.worker.equivalence.forward_trace import Batch
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.small_copy import ROWS, SmallCopy, TooLarge
from elastic.worker.program.calls import call_model, loss_of

# positions: of longer sequences so many are taken, where the model allows it
LONG, SHORT, LEAST = 128, 64, 8
LONGEST = 2048  # for cp, which cuts them
MOST_FLOP = 4e11  # of the passes of one process
TRIED = 16  # samples that are looked at for unequal ones
AHEAD = 100_000  # reads by which a dataset that counts them is set on


def batch_of(dataset: Any, budget: Any, n_rows: int = ROWS) -> Batch:
    """Samples from all over the dataset; of a job with a budget of tokens, of a stream, or of a
    dataset with fewer, the first one again and again."""
    if budget is not None:
        part = budget.of_one(0, 1)
        return collate([item_of(dataset, 0, part.length)] * n_rows)
    few = not hasattr(dataset, "__len__") or len(dataset) < n_rows
    if few or type(dataset).__name__ == "Stream":
        return collate([dict(item_of(dataset, 0, None)) for _ in range(n_rows)])
    try:
        return collate(spread_samples(dataset, n_rows))
    except Exception:  # noqa: BLE001 - the user's dataset: what is wrong with its first samples is reported
        return collate([dict(item_of(dataset, i, None)) for i in range(n_rows)])


def check_samples(dataset: Any) -> None:
    """Raises ProgramError where a sample follows from what was read before it, as from a count of
    reads: each rank and loader process has read others. What it draws is the same each time."""
    n = len(dataset)
    state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]):
        try:
            first, before = _drawn_alike(dataset), _numbers(dataset)
            for index in _spread(n, min(n, TRIED)):
                item_of(dataset, index, None)
            _drawn_alike(dataset)
            counts = {k: x for k, x in _numbers(dataset).items() if x != before.get(k)}
            again = _drawn_alike(dataset)
            with _set_on(dataset, {name: value + AHEAD for name, value in counts.items()}):
                ahead = _drawn_alike(dataset) if counts else again
        except Exception:  # noqa: BLE001 - the user's dataset: its first samples are reported on
            return
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)
    if _same(first, again) and _same(first, ahead):
        return
    what = f" (it counts by {next(iter(counts))})" if counts else ""
    raise ProgramError(
        f"sample 0 of the dataset is another one after others have been read{what}: it follows "
        "from what was read before, which each rank and each loader process has its own of; let it "
        "follow from the sample id alone"
    )


def _drawn_alike(dataset: Any) -> dict[str, Any]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return copy.deepcopy(dict(item_of(dataset, 0, None)))


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


def _spread(size: int, n: int) -> list[int]:
    """Of each part of the dataset one, each at another place of it: what repeats with a period is
    seen too."""
    step = size / n
    return sorted({min(size - 1, int(i * step) + (i if step > n else 0)) for i in range(n)})


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[k]), np.asarray(other[k])) for k in one
    )


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
