"""What rank 0 tells of how fast each rank computes: medians over the newest steps, soon where they
change or become surer, else rarely; and who is slow beside the others. Workers, the simulator, the
policy and what people see have the same of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastic.types import ModelProfile, Plan, RanksTimed, WorkerId

WARM_UP = 2  # steps of a generation that do not count: caches are cold, code is compiled
RECENT = 3  # steps that show a change
KEPT = 64  # steps that a median is taken over at most
CHANGED, DRIFTED = 0.25, 0.05  # relative: at once, and when something has been told LEAST_S ago
LEAST_S, MOST_S = 1.0, 30.0  # between two reports
SURER = 2  # times as many steps since what was told

# seconds per unit, and of waiting for data, of each rank
Row = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass
class RankTimes:
    """Of one generation. A change of a rank by more than CHANGED over RECENT steps makes what was
    before it count no more."""

    generation: int
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT))
    n_seen: int = 0
    told: tuple[float, ...] = ()
    told_at_s: float = 0.0
    told_steps: int = 0  # that it was made from

    def add(
        self, step: int, unit_s: Sequence[float], data_s: Sequence[float], *, now_s: float
    ) -> RanksTimed | None:
        """Takes in a step; a report where one is due."""
        self.n_seen += 1
        if self.n_seen <= WARM_UP:
            return None
        self.rows.append((tuple(unit_s), tuple(data_s)))
        if len(self.rows) < RECENT:
            return None
        recent = _medians([row for row, _ in list(self.rows)[-RECENT:]])
        changed = len(self.rows) > RECENT and _differ(
            recent, _medians([row for row, _ in list(self.rows)[:-RECENT]]), CHANGED
        )
        if changed:
            self.rows = deque(list(self.rows)[-RECENT:], maxlen=KEPT)
        now = _medians([row for row, _ in self.rows])
        since_s = now_s - self.told_at_s
        news = len(self.rows) >= SURER * self.told_steps or _differ(now, self.told, DRIFTED)
        due = not self.told or since_s >= MOST_S or (since_s >= LEAST_S and news)
        return self._report(step, now, now_s) if due else None

    def _report(self, step: int, now: tuple[float, ...], now_s: float) -> RanksTimed:
        self.told, self.told_at_s, self.told_steps = now, now_s, len(self.rows)
        spread = tuple(
            round(median(abs(row[rank] - middle) for row, _ in self.rows) / middle, 4)
            if middle
            else 0.0
            for rank, middle in enumerate(now)
        )
        data_s = tuple(round(one, 6) for one in _medians([row for _, row in self.rows]))
        unit_s = tuple(float(f"{one:.4g}") for one in now)
        return RanksTimed(self.generation, step, len(self.rows), unit_s, spread, data_s)


def _medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*rows, strict=True))


def _differ(a: Sequence[float], b: Sequence[float], by: float) -> bool:
    return any(abs(x - y) > by * min(x, y) for x, y in zip(a, b, strict=True) if x and y)


def times_slower(
    unit_s: Mapping[WorkerId, float],
    pool_of: Callable[[WorkerId], str],
    places: Mapping[WorkerId, int],
) -> dict[WorkerId, float]:
    """Of every measured worker: its seconds per unit over those of the faster half of its pool.
    `places`: see unlike_stages."""
    among = {worker: (pool_of(worker), places.get(worker)) for worker in unit_s}
    alike: dict[tuple[str, int | None], list[float]] = {}
    for worker, one in unit_s.items():
        alike.setdefault(among[worker], []).append(one)
    faster = {key: median(sorted(found)[: (len(found) + 1) // 2]) for key, found in alike.items()}
    return {worker: one / faster[among[worker]] for worker, one in unit_s.items()}


def unlike_stages(model: ModelProfile | None, plan: Plan | None) -> dict[WorkerId, int]:
    """Of each worker its place in the pipeline, where that says what its blocks cost: ranks of
    other places have blocks of another kind, so that their times per block say nothing of their
    speed. {} = all blocks are alike, or all ranks have all."""
    if model is None or plan is None or plan.layout.pp == 1:
        return {}
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for spec in model.specs:
        if spec.block is not None and 0 <= spec.block < model.n_blocks:
            shapes.setdefault(spec.block, []).append(spec.shape)
    if len({tuple(sorted(found)) for found in shapes.values()}) <= 1:
        return {}
    a_place = len(plan.ranks) // plan.layout.pp
    return {worker: rank // a_place for rank, worker in enumerate(plan.ranks)}
