"""Lines and areas as paths of SVG, in a box of WIDTH x HEIGHT that the page stretches: its labels
stand beside it as text, so that they stay readable at any width. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from elastic.observe.reporting.capacity_history import CapacityHistory
from elastic.observe.run_view import View
from elastic.text import duration

WIDTH, HEIGHT = 1000, 300
BUCKETS = 400  # of a long curve: each shows its least and its most
MARKS_MOST = 40  # lines that are drawn through the curve
LABELS_MOST = 12  # of them with a number
APART = 9.0  # percent of the width, below which two numbers would lie on each other on a phone
AREAS_MOST = 500


@dataclass(frozen=True)
class Tick:
    """`at`: percent of the width from the left, or of the height from the top."""

    at: float
    text: str


@dataclass(frozen=True)
class ChartMark:
    """A change: `number` as in the table of changes, '' = too many to be numbered; it stands `row`
    rows above the chart."""

    at: float
    cause: str
    number: str
    text: str
    row: int = 0


@dataclass(frozen=True)
class Series:
    """`kind`: line, dots, area; a class of the page's style sheet."""

    name: str
    kind: str
    path: str


@dataclass(frozen=True)
class Chart:
    series: tuple[Series, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    marks: tuple[ChartMark, ...] = ()


@dataclass(frozen=True)
class Scale:
    low: float
    high: float

    def of(self, value: float) -> float:
        """0 to 1."""
        span = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.5


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within."""
    span = high - low
    if not isfinite(span) or span <= 0:
        return [low]
    rough = span / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = floor(low / step) + (0 if low / step == floor(low / step) else 1)
    return [k * step for k in range(first, floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most two points a bucket: its least and its most, in their order."""
    if len(points) <= 2 * BUCKETS:
        return list(points)
    kept, each = [], len(points) / BUCKETS
    for k in range(BUCKETS):
        bucket = points[int(k * each) : int((k + 1) * each)]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def line(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return _polyline(thinned(points), x, y) if points else ""


def dots(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """Strokes of no length: with round ends they are dots, however the box is stretched."""
    return "".join(
        f"M{x.of(a) * WIDTH:.1f} {(1 - y.of(b)) * HEIGHT:.1f}h0" for a, b in thinned(points)
    )


def loss_chart(view: View, numbers: dict[int, str]) -> Chart | None:
    """`numbers`: generation -> its number in the table of changes. None = no step was finished."""
    curve = [(float(p.step), p.train_loss) for p in view.curve() if isfinite(p.train_loss)]
    if not curve:
        return None
    counted = {(p.step, p.generation) for p in view.curve()}
    undone = [
        (float(p.step), p.train_loss)
        for p in view.points
        if (p.step, p.generation) not in counted and isfinite(p.train_loss)
    ]
    checked = [
        (float(step), loss) for step, loss in view.validation_losses().items() if isfinite(loss)
    ]
    every = [value for _, value in (*curve, *checked, *undone)]
    low, high = min(every), max(every)
    room = 0.06 * (high - low) or 0.1
    x, y = Scale(curve[0][0], curve[-1][0]), Scale(low - room, high + room)
    series = [Series("train loss", "line", line(curve, x, y))]
    if checked:
        series.append(Series("validation loss", "dots", dots(checked, x, y)))
    if undone:
        series.append(Series("steps that were trained again", "undone", dots(undone, x, y)))
    return Chart(
        tuple(series),
        tuple(
            Tick(100 * x.of(at), f"{at:,.0f}" if k else f"step {at:,.0f}")
            for k, at in enumerate(ticks(x.low, x.high, 8))
        ),
        tuple(Tick(100 * (1 - y.of(at)), f"{at:.4g}") for at in ticks(y.low, y.high)),
        _marks(view, x, numbers),
    )


def _marks(view: View, x: Scale, numbers: dict[int, str]) -> tuple[ChartMark, ...]:
    entered = [
        (event.step, plan)
        for _, event in view.entered
        if (plan := view.planned.get(event.generation)) is not None and event.generation in numbers
    ]
    if len(entered) > MARKS_MOST:
        return ()
    labelled, ends = len(entered) <= LABELS_MOST, list[float]()
    found = []
    for step, plan in sorted(entered, key=lambda one: one[0]):
        at, number = 100 * x.of(step), numbers[plan.generation]
        row = next((k for k, end in enumerate(ends) if at - end >= APART), len(ends))
        if labelled:
            ends[row : row + 1] = [at]
        text = f"{number}: {plan.cause} at step {step}"
        found.append(ChartMark(at, plan.cause, number if labelled else "", text, row))
    return tuple(found)


def capacity_chart(view: View, history: CapacityHistory, word: str) -> Chart | None:
    """GPUs that are paid for, pool over pool, and those that train. None = there never were
    any."""
    moments = [m for m in history.moments if m.gpus or m.training]
    if not moments:
        return None
    since_s, until_s = view.started_at_s, max(view.at_s, history.moments[-1].at_s)
    pools = list(dict.fromkeys(pool for m in history.moments for pool in m.gpus))
    most = max(sum(m.gpus.values()) for m in history.moments)
    x, y = Scale(0.0, max(1e-9, until_s - since_s)), Scale(0.0, most * 1.08)
    kept = _sampled(history, since_s, until_s)
    series, below = [], [0.0] * len(kept)
    for k, pool in enumerate(pools):
        above = [b + gpus.get(pool, 0) for b, (_, gpus, _) in zip(below, kept, strict=True)]
        top = _stairs([(at, up) for (at, _, _), up in zip(kept, above, strict=True)], x.high)
        bottom = _stairs([(at, low) for (at, _, _), low in zip(kept, below, strict=True)], x.high)
        market = view.pools[pool].market_type if pool in view.pools else ""
        name = pool if market in ("", pool) else f"{pool} ({market})"
        series.append(
            Series(name, f"area{k % 4}", _polyline([*top, *reversed(bottom)], x, y) + "Z")
        )
        below = above
    trains = _stairs([(at, float(n)) for at, _, n in kept], x.high)
    series.append(Series(f"{word}s that train", "line", _polyline(trains, x, y)))
    return Chart(
        tuple(series),
        tuple(Tick(100 * x.of(at), text) for at, text in _times(x.high)),
        tuple(
            Tick(100 * (1 - y.of(at)), f"{at:,.0f}")
            for at in ticks(0.0, y.high, 4)
            if at == int(at)
        ),
    )


def _sampled(
    history: CapacityHistory, since_s: float, until_s: float
) -> list[tuple[float, dict[str, int], int]]:
    """Each moment; of very many what there was at AREAS_MOST times, evenly spread."""
    if len(history.moments) <= AREAS_MOST:
        return [(m.at_s - since_s, dict(m.gpus), m.training) for m in history.moments]
    found = []
    for k in range(AREAS_MOST):
        at_s = (until_s - since_s) * k / AREAS_MOST
        there = history.at(since_s + at_s)
        if there is not None:
            found.append((at_s, dict(there.gpus), there.training))
    return found


def _stairs(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Each value holds until the next one."""
    out: list[tuple[float, float]] = []
    for at, value in points:
        if out:
            out.append((at, out[-1][1]))
        out.append((at, value))
    return [*out, (end, out[-1][1])] if out else []


def _polyline(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{x.of(a) * WIDTH:.1f} {(1 - y.of(b)) * HEIGHT:.1f}" for a, b in points)


def _times(whole_s: float) -> list[tuple[float, str]]:
    for unit_s, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if whole_s >= 2 * unit_s:
            return [(at * unit_s, f"{at:g} {name}") for at in ticks(0.0, whole_s / unit_s, 8)]
    return [(0.0, duration(0.0))]
