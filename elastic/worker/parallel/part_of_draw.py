"""Which part of a draw a rank has: the rows of its samples, and of each the features that tp has
left it and the positions that cp has.

A tensor that a program computes with says nothing of that, so it is found by comparing its sizes
with those that the whole model has at this place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private: the only way to ask for a DTensor's place in the whole.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic.models.attention import SequenceShard
from elastic.types import Layout
from elastic.types.grid import Coordinates
from elastic.worker.parallel.keyed_numbers import Distribution

Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Draw:
    """What a place draws for two samples. `rows_at`: the dimension that the samples are in, -1 =
    none: one draw for all samples of a step. `along`: of one sample's draw (`of_one`), the
    dimensions that are as long as the sample, None = those of that size: the model takes samples of
    one length only. `one_length`: another dimension changes with the length, so that the sizes are
    known for samples as long as the trial's only."""

    sizes: tuple[int, ...]
    rows_at: int
    along: tuple[int, ...] | None = None
    one_length: bool = False


@dataclass(frozen=True)
class Part:
    """`whole`: sizes of one sample's draw; `cuts`: what makes this rank's part of [samples,
    *whole]."""

    rows_at: int
    whole: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    def fill(self, distribution: Distribution, keys: Sequence[int], noise: Tensor) -> None:
        """Fills this rank's part, each sample's by its key."""
        local = noise._local_tensor if isinstance(noise, DTensor) else noise
        mine = local.movedim(self.rows_at, 0) if self.rows_at >= 0 else local
        if not self.cuts and mine.is_contiguous():
            distribution.fill(mine.view(len(keys), -1), keys)
            return
        drawn = mine.new_empty(len(keys), *self.whole)
        distribution.fill(drawn.view(len(keys), -1), keys)
        for cut in self.cuts:
            drawn = cut(drawn)
        mine.copy_(drawn.reshape(mine.shape))


def part_of(
    noise: Tensor,
    n_rows: int,
    draw: Draw | None,
    *,
    lengths: tuple[int, int],
    layout: Layout,
    at: Coordinates,
) -> Part | None:
    """None = it cannot be told. `draw`: None = the trial has not come here; `lengths`: positions of
    the trial's samples and of these."""
    rows_at = draw.rows_at if draw is not None else 0
    if isinstance(noise, DTensor):
        return _of_dtensor(noise, n_rows, rows_at)
    if rows_at >= noise.ndim or (rows_at >= 0 and noise.shape[rows_at] % max(1, n_rows)):
        return None
    mine = of_one(noise.shape, rows_at, n_rows)
    if layout.tp * layout.cp == 1:
        return Part(rows_at, mine)
    if draw is None or len(draw.sizes) != noise.ndim:
        return None
    known, now = lengths
    if draw.one_length and now not in (0, known):
        return None
    then = of_one(draw.sizes, rows_at, 2)
    along = draw.along
    if along is None:
        along = tuple(i for i, size in enumerate(then) if size == known)
    whole = tuple(now if i in along and now else size for i, size in enumerate(then))
    cuts = _cuts(whole, mine, along, layout=layout, at=at)
    return None if cuts is None else Part(rows_at, whole, cuts)


def of_one(sizes: Sequence[int], rows_at: int, n_rows: int) -> tuple[int, ...]:
    """Sizes of one sample's draw: what is left of the dimension of the samples comes first."""
    if rows_at < 0:
        return (1, *sizes)
    others = (size for i, size in enumerate(sizes) if i != rows_at)
    return (sizes[rows_at] // max(1, n_rows), *others)


def _cuts(
    whole: Sequence[int], mine: Sequence[int], along: Sequence[int], *, layout: Layout,
    at: Coordinates,
) -> tuple[Cut, ...] | None:  # fmt: skip
    found: list[Cut] = []
    sequence = layout.cp > 1  # has still to come
    for dim, (full, own) in enumerate(zip(whole, mine, strict=True), 1):
        if sequence and own != full and dim - 1 in along:
            sequence = False
            found.append(partial(SequenceShard(at.cp, layout.cp, None).take, dim=dim))
            full //= layout.cp
        if own == full:
            continue
        if own * layout.tp != full:
            return None
        found.append(partial(torch.narrow, dim=dim, start=at.tp * own, length=own))
    return tuple(found)


def _of_dtensor(noise: DTensor, n_rows: int, rows_at: int) -> Part | None:
    if any(placement.is_partial() for placement in noise.placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(
        noise.shape, noise.device_mesh, noise.placements
    )
    if rows_at >= 0 and (sizes[rows_at] != noise.shape[rows_at] or sizes[rows_at] % max(1, n_rows)):
        return None
    cuts: list[Any] = []
    others = [i for i in range(noise.ndim) if i != rows_at]
    for dim, i in enumerate(others, 2):
        if sizes[i] != noise.shape[i]:
            cuts.append(partial(torch.narrow, dim=dim, start=offsets[i], length=sizes[i]))
    return Part(rows_at, of_one(noise.shape, rows_at, n_rows), tuple(cuts))
