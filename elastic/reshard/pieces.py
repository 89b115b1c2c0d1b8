"""The pieces that a layout cuts each tensor into, which rank holds which, and how those of two
layouts overlap.

What is known of all pieces, overlaps or ranks is an array each: thousands of ranks cost what their
numbers do. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from elastic.reshard.rank_boxes import (
    Kind,
    Placed,
    Region,
    check_layers,
    fsdp_chunk,
    meet,
    owners,
    placements,
    region,
    stages_of,
)
from elastic.types import AXES, DTYPE_BYTES, Layout, ModelProfile
from elastic.types.replacing import follows_from

Ints = NDArray[np.int64]
Cut = tuple[Layout, tuple[int, ...]]  # a layout and its layers per stage
Stages = tuple[int, ...]
# stages, cut by tp?, cut by fsdp?, the only ranks that have it, where that is so: tensors of equal
# value are held by the same ranks
Held = tuple[Stages, bool, bool, tuple[int, ...]]

# tensors of equal value are cut into equal pieces
Cutting = tuple[tuple[int, ...], int | None, bool, bool, bool]


@dataclass(frozen=True)
class TensorBundle:
    """Tensors (by their place in `placements`) of equal shape, dtype and placement under both
    layouts."""

    first: Placed
    tensors: tuple[int, ...]
    old: Held
    new: Held


@dataclass(frozen=True)
class StageBundles:
    """Bundles that differ in nothing but the new stages that need them. `counts`: how many of their
    tensors each place on the pp axis does."""

    bundles: tuple[TensorBundle, ...]
    counts: Ints

    @property
    def together(self) -> TensorBundle:
        """One tensor on all of the stages."""
        first = self.bundles[0]
        stages = tuple(np.flatnonzero(self.counts).tolist())
        return replace(first, tensors=first.tensors[:1], new=(stages, *first.new[1:]))


@dataclass(frozen=True)
class PieceColumn:
    """Pieces of a tensor that are equal beyond dimension 0 (`across`) and follow each other along
    it, the last up to `end`. `numbers`: tp index x fsdp + fsdp index, 0 on an axis that does not
    cut the tensor. A scalar is one piece, from 0 to 1."""

    across: Region
    numbers: Ints
    starts: Ints
    end: int

    @property
    def sizes(self) -> Ints:
        return np.append(self.starts[1:], self.end) - self.starts


@dataclass(frozen=True)
class OverlapParts:
    """The overlaps of the new pieces of a tensor with the old ones, in the order of both: numbers
    of the pieces, what it is along dimension 0, and beyond it: the place in `regions`."""

    new: Ints
    old: Ints
    start: Ints
    size: Ints
    across: Ints
    regions: list[Region]

    @cached_property
    def row_elements(self) -> Ints:
        """Of each region."""
        return np.array([prod(sizes) for _, sizes in self.regions], dtype=np.int64)

    @property
    def elements(self) -> Ints:
        return self.size * self.row_elements[self.across]


class Side:
    """Which ranks of one layout hold a tensor, by pieces."""

    def __init__(self, model: ModelProfile, cut: Cut) -> None:
        self.model, (self.layout, self.layers) = model, cut
        check_layers(model, *cut)
        layout = self.layout
        self.fsdp = layout.dp_shard * layout.cp
        at = np.unravel_index(
            np.arange(layout.world_size), [getattr(layout, axis) for axis in AXES]
        )
        self.pp, _, dp_shard, cp, self._tp = at
        self._fsdp = dp_shard * layout.cp + cp
        self._held: dict[Kind, Held] = {}
        self._numbers: dict[Held, Ints] = {}
        self._columns: dict[Cutting, list[PieceColumn]] = {}

    def held(self, placed: Placed) -> Held:
        if placed.kind not in self._held:
            stages = stages_of(placed.blocks, self.model, self.layout, layers=self.layers)
            only = owners(self.model, self.layout, self.layers)[placed.of] if placed.of else ()
            self._held[placed.kind] = stages, placed.tp_cut, placed.fsdp_cut, only
        return self._held[placed.kind]

    def numbers(self, held: Held) -> Ints:
        """[rank]: the number of the piece that it holds, -1: none."""
        if held not in self._numbers:
            stages, tp_cut, fsdp_cut, only = held
            number = self._tp * (self.fsdp if tp_cut else 0) + (self._fsdp if fsdp_cut else 0)
            at = np.zeros(self.layout.pp, dtype=bool)
            at[list(stages)] = True
            there = at[self.pp]
            if only:
                there &= np.isin(np.arange(self.layout.world_size), only)
            self._numbers[held] = np.where(there, number, -1)
        return self._numbers[held]

    def columns(self, placed: Placed) -> list[PieceColumn]:
        """All pieces that are not empty."""
        cutting = cutting_of(placed)
        if cutting not in self._columns:
            self._columns[cutting] = self._cut(placed)
        return self._columns[cutting]

    def _cut(self, placed: Placed) -> list[PieceColumn]:
        found: dict[Region, PieceColumn] = {}
        for t in range(self.layout.tp if placed.tp_cut else 1):
            offsets, sizes = region(placed, (t, self.layout.tp), (0, 1), ep=1)
            if 0 in sizes:
                continue
            start, size = (offsets[0], sizes[0]) if sizes else (0, 1)
            if placed.ep_cut and self.layout.ep > 1:
                index, starts = self._by_expert(start, size)
            else:
                step = -(-size // self.fsdp) if placed.fsdp_cut else size  # as `chunk`
                starts = np.arange(start, start + size, step)
                index = np.arange(len(starts))
            numbers, across = t * self.fsdp + index, (offsets[1:], sizes[1:])
            if across in found:  # tp cuts along dimension 0 too
                before = found[across]
                numbers, starts = (
                    np.append(before.numbers, numbers),
                    np.append(before.starts, starts),
                )
            found[across] = PieceColumn(across, numbers, starts, start + size)
        return list(found.values())

    def _by_expert(self, start: int, size: int) -> tuple[Ints, Ints]:
        """Of parts that are not empty, in their order: whose it is on the axis fsdp, where it
        begins."""
        each = (
            (at, i)
            for i in range(self.fsdp)
            for at, n in (fsdp_chunk(size, self.fsdp, i, ep=self.layout.ep),)
            if n
        )
        starts, index = zip(*sorted(each), strict=True)
        return np.array(index, dtype=np.int64), start + np.array(starts, dtype=np.int64)


def cutting_of(placed: Placed) -> Cutting:
    spec = placed.spec
    return spec.shape, spec.tp_dim, placed.tp_cut, placed.fsdp_cut, placed.ep_cut


@follows_from()
def _kinds(model: ModelProfile) -> tuple[tuple[Placed, tuple[int, ...]], ...]:
    """Tensors of the state (the first, the places of all) that every layout cuts alike and gives to
    the same ranks."""
    found: dict[tuple[object, ...], list[int]] = {}
    state = placements(model)
    for i, placed in enumerate(state):
        spec = placed.spec
        found.setdefault((placed.kind, spec.shape, spec.tp_dim, spec.dtype), []).append(i)
    return tuple((state[tensors[0]], tuple(tensors)) for tensors in found.values())


def bundles(source: Side, target: Side) -> list[TensorBundle]:
    """The state in bundles, in the order of their first tensors."""
    found: dict[tuple[object, ...], list[tuple[Placed, tuple[int, ...]]]] = {}
    for placed, tensors in _kinds(source.model):
        spec, held = placed.spec, (source.held(placed), target.held(placed))
        key = (*held, spec.shape, spec.tp_dim, spec.dtype, placed.ep_cut)
        found.setdefault(key, []).append((placed, tensors))
    return [
        TensorBundle(
            kinds[0][0],
            tuple(sorted(i for _, tensors in kinds for i in tensors)),
            source.held(kinds[0][0]),
            target.held(kinds[0][0]),
        )
        for kinds in found.values()
    ]


def staged(source: Side, target: Side) -> list[StageBundles]:
    """In the order of their first bundles."""
    groups: dict[tuple[object, ...], list[TensorBundle]] = {}
    for bundle in bundles(source, target):
        spec = bundle.first.spec
        cut = (bundle.new[1:], spec.shape, spec.tp_dim, spec.dtype, bundle.first.ep_cut)
        groups.setdefault((bundle.old, *cut), []).append(bundle)
    out = []
    for group in groups.values():
        counts = np.zeros(target.layout.pp, dtype=np.int64)
        for bundle in group:
            counts[list(bundle.new[0])] += len(bundle.tensors)
        out.append(StageBundles(tuple(group), counts))
    return out


class Overlaps:
    """Of each new piece of a tensor with the old ones, made once for all tensors that are cut
    alike."""

    def __init__(self, source: Side, target: Side) -> None:
        self.source, self.target = source, target
        self._found: dict[Cutting, OverlapParts] = {}

    def of(self, placed: Placed) -> OverlapParts:
        cutting = cutting_of(placed)
        if cutting not in self._found:
            self._found[cutting] = _overlaps(
                self.source.columns(placed), self.target.columns(placed)
            )
        return self._found[cutting]


def _overlaps(old: Sequence[PieceColumn], new: Sequence[PieceColumn]) -> OverlapParts:
    regions: list[Region] = []
    found = [np.empty((5, 0), dtype=np.int64)]
    for one in new:
        for other in old:
            across = meet(one.across, other.across)
            if across is not None:
                starts = distinct(np.append(one.starts, other.starts))
                sizes = np.append(starts[1:], one.end) - starts
                numbers = [
                    side.numbers[side.starts.searchsorted(starts, "right") - 1]
                    for side in (one, other)
                ]
                found.append(
                    np.array([*numbers, starts, sizes, np.full_like(starts, len(regions))])
                )
                regions.append(across)
    rows = np.concatenate(found, axis=1)
    new_numbers, old_numbers, start, size, at = rows[:, np.lexsort((rows[1], rows[0]))]
    return OverlapParts(new_numbers, old_numbers, start, size, at, regions)


def distinct(numbers: Ints) -> Ints:
    """Each once, in order. numpy's own `unique` hashes them, which takes twenty times as long for a
    million."""
    found = np.sort(numbers)
    return found[np.append(True, found[1:] != found[:-1])] if len(found) else found


def bytes_of(side: Side, padded: bool = False, aligned: int = 1) -> Ints:
    """Bytes of the training state that each rank of the layout holds. `padded`: as FSDP has them in
    memory, where each part of a parameter that is not empty has the size of the largest. `aligned`:
    each box begins at a multiple of so many bytes."""
    out = np.zeros(side.layout.world_size, dtype=np.int64)
    for same in staged(Side(side.model, (Layout(), ())), side):
        first, held = same.bundles[0].first, same.together.new
        of_piece = np.zeros(side.layout.tp * side.fsdp + 1, dtype=np.int64)  # the last one: of -1
        for column in side.columns(first):
            of_piece[column.numbers] = column.sizes * prod(column.across[1])
            if padded and first.fsdp_cut:
                of_piece[column.numbers] = of_piece[column.numbers - column.numbers % side.fsdp]
        of_piece = -(-of_piece * DTYPE_BYTES[first.spec.dtype] // aligned) * aligned
        out += of_piece[side.numbers(held)] * same.counts[side.pp]
    return out
