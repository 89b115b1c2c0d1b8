"""Samples per data-parallel rank and blocks per pipeline stage together, so that heterogeneous GPUs
end a step at the same time.

Every data-parallel rank of a stage goes through the same blocks, so that stages follow what is
common to them, and shares the rest. Blocks are moved one by one from stage to stage while that
makes the step shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from itertools import combinations, islice
from math import comb
from operator import le
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner.cost.stage_balance import loads_at
from elastic.planner.hetero import unequal_shares
from elastic.types import Layout

WORTH = 0.01  # of a step, that other than even stages must gain
# from so many stages on, so many blocks at most are moved, out of the deepest stages only
MANY, FEW_MOVES = 16, 8
EXACT = 400  # ways to cut the blocks that are all looked at
ROUNDS = 3  # of shares for the stages, then stages for the shares

# [data-parallel rank][place on the pp axis], in blocks per second of a sample
Speeds = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Split:
    """`busy_s`: of the busiest data-parallel rank, in which its busiest stage computes for
    `stage_s`; the rest it waits."""

    samples: tuple[int, ...]
    layers: tuple[int, ...]
    busy_s: float
    stage_s: float


@dataclass(frozen=True)
class SplitTask:
    """What is dealt out. `ends`: the head behind the last block, in blocks. `most_blocks`: at each
    place on the pp axis, and `most_rows`: totals of blocks -> samples that each data-parallel rank
    can hold at once; None = any number. `unit`: so many samples stay in one microbatch. `loads`:
    what each block takes, in mean ones, () = all are alike."""

    layout: Layout
    n_blocks: int
    global_batch: int
    n_microbatches: int
    ends: float = 0.0
    most_blocks: tuple[int, ...] | None = None
    most_rows: Callable[[tuple[int, ...]], Sequence[int]] | None = None
    unit: int = 1
    loads: tuple[float, ...] = ()

    @cached_property
    def per_rank(self) -> int:
        """Stages of a rank."""
        return self.layout.n_stages // self.layout.pp

    def sample_s(self, speeds: Sequence[float], blocks: Sequence[int]) -> tuple[float, float]:
        """Of a sample of a step on one data-parallel rank: its share of the pipeline's whole time,
        and of the busiest stage alone. As unequal_shares.busy_s; an interleaved pipeline waits less
        (Narayanan et al. 2021, section 2.2)."""
        at: Sequence[float] = blocks
        if self.loads:
            at = loads_at(self.layout, self.layers(blocks), self.loads)
        times = [n / speed for n, speed in zip(at, speeds, strict=True)]
        times[-1] += self.ends / speeds[-1]
        slowest = max(times)
        waits = (sum(times) - slowest) / self.n_microbatches / self.per_rank
        return slowest + waits, slowest

    def layers(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Per stage, from the blocks at each place."""
        found = [0] * self.layout.n_stages
        for p, n in enumerate(blocks):
            for k, part in enumerate(unequal_shares.stage_layers(n, self.per_rank)):
                found[p + k * self.layout.pp] = part
        return tuple(found)


def split(task: SplitTask, speeds: Speeds) -> Split:
    """The best that is found; even stages where other ones gain less than WORTH. Raises
    InfeasiblePlan."""
    even = unequal_shares.stage_layers(
        task.n_blocks, task.layout.n_stages, task.loads, ends=task.ends
    )
    pp = task.layout.pp
    blocks = tuple(sum(even[p::pp]) for p in range(pp))
    plain: Split | None = None
    try:
        if all(n <= most for n, most in zip(blocks, task.most_blocks or blocks, strict=True)):
            plain = _assigned(task, speeds, blocks, layers=even)
    except InfeasiblePlan:
        if pp == 1:
            raise
    if pp == 1:
        if plain is None:
            raise InfeasiblePlan(f"{task.n_blocks} blocks are more than its memory holds")
        return plain
    found = _search(task, speeds, blocks)
    if found is None and plain is None:
        raise InfeasiblePlan(
            f"{task.n_blocks} blocks do not fit the memory of these {pp} stages however they are "
            "cut"
        )
    if found is None or (plain is not None and found.busy_s >= plain.busy_s * (1 - WORTH)):
        assert plain is not None
        return plain
    return found


def _assigned(
    task: SplitTask, speeds: Speeds, blocks: tuple[int, ...], *, layers: tuple[int, ...] = ()
) -> Split:
    m, unit = task.n_microbatches, task.unit
    each = {row: task.sample_s(row, blocks) for row in set(speeds)}
    most = [n // unit for n in task.most_rows(blocks)] if task.most_rows else ()
    samples = unequal_shares.shares(
        task.global_batch // (m * unit), [1 / each[row][0] for row in speeds], m * unit, most=most
    )
    worst = max(range(len(samples)), key=lambda d: samples[d] * each[speeds[d]][0])
    whole, stage = each[speeds[worst]]
    return Split(
        samples, layers or task.layers(blocks), samples[worst] * whole, samples[worst] * stage
    )


def _search(task: SplitTask, speeds: Speeds, even: tuple[int, ...]) -> Split | None:
    best: Split | None = None
    rows = Counter(speeds)
    starts = _starts(task, speeds, even)
    moved = [_moved(task, one, lambda blocks: _together(task, rows, blocks)) for one in starts]
    # shares are whole: what is best by shares of any size need not be best by them
    for blocks in dict.fromkeys([*moved, *starts]):
        for _ in range(ROUNDS):
            try:
                found = _assigned(task, speeds, blocks)
            except InfeasiblePlan:
                break
            if best is not None and found.busy_s >= best.busy_s * (1 - 1e-9):
                break
            best = found
            most: dict[tuple[float, ...], int] = {}
            for row, n in zip(speeds, found.samples, strict=True):
                most[row] = max(n, most.get(row, 0))

            def slowest(blocks: tuple[int, ...], most: Mapping[Any, int] = most) -> float:
                return max(n * task.sample_s(row, blocks)[0] for row, n in most.items())

            blocks = _moved(task, blocks, slowest)
    return best


def _starts(task: SplitTask, speeds: Speeds, even: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Even stages, stages in proportion to the speeds, and of few ways to cut the blocks the best
    by shares of any size."""
    pp, v, caps = task.layout.pp, task.per_rank, task.most_blocks
    found = (
        [even] if caps is None or all(n <= most for n, most in zip(even, caps, strict=True)) else []
    )
    columns = list(zip(*speeds, strict=True))
    room = [n - v + 1 for n in caps] if caps is not None else []
    for of in (lambda column: len(column) / sum(1 / speed for speed in column), min):
        try:
            made = unequal_shares.shares(
                task.n_blocks - (v - 1) * pp, [of(column) for column in columns], 1, most=room
            )
        except InfeasiblePlan:
            return found
        found.append(tuple(n + v - 1 for n in made))
    if comb(task.n_blocks - 1, pp - 1) <= EXACT:
        rows = Counter(speeds)
        cuts = (
            (0, *middle, task.n_blocks) for middle in combinations(range(1, task.n_blocks), pp - 1)
        )
        every = [tuple(b - a for a, b in zip(cut, cut[1:])) for cut in cuts]
        allowed = [one for one in every if _allowed(task, one)]
        found += islice(sorted(allowed, key=lambda one: _together(task, rows, one)), 8)
    return list(dict.fromkeys(found))


def _allowed(task: SplitTask, blocks: Sequence[int]) -> bool:
    most = task.most_blocks
    return min(blocks) >= task.per_rank and (most is None or all(map(le, blocks, most)))


def _moved(
    task: SplitTask, blocks: tuple[int, ...], value: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """Blocks go from stage to stage, one at a time, while the value falls."""
    pp, now = len(blocks), value(blocks)
    for _ in range(task.n_blocks if pp < MANY else FEW_MOVES):
        tried = []
        for i in range(pp) if pp < MANY else nlargest(2, range(pp), key=lambda p: blocks[p]):
            for j in range(pp):
                if i != j:
                    one = list(blocks)
                    one[i], one[j] = one[i] - 1, one[j] + 1
                    if _allowed(task, one):
                        tried.append(tuple(one))
        least = min(tried, key=value, default=blocks)
        if value(least) >= now * (1 - 1e-9):
            break
        blocks, now = least, value(least)
    return blocks


def _together(task: SplitTask, rows: Counter[tuple[float, ...]], blocks: tuple[int, ...]) -> float:
    """Seconds of a sample on all data-parallel ranks, in shares of any size."""
    return 1 / sum(n / task.sample_s(row, blocks)[0] for row, n in rows.items())
