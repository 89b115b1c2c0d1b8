"""How measured times become numbers: medians of repetitions that take turns, and a line through
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

LEAST_S = 0.01  # of a repetition: shorter calls are timed several at once
LEAST, MOST = 3, 15  # repetitions


def nothing() -> None:
    """Settles a device that is never behind."""


def medians_s(
    calls: Mapping[str, Callable[[], object]],
    for_s: float,
    settle: Callable[[], None] = nothing,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each call: the median of repetitions that take turns, so that what disturbs the
    machine for a while disturbs all alike. Goes on for `for_s` seconds, but repeats each LEAST to
    MOST times. The first call of each does not count."""
    began = clock()
    many = {name: _many(call, settle, clock) for name, call in calls.items()}
    took: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(MOST):
        if n >= LEAST and clock() - began > for_s:
            break
        for name, call in calls.items():
            took[name].append(_timed(call, many[name], settle, clock=clock) / many[name])
    return {name: median(values) for name, values in took.items()}


def _many(
    call: Callable[[], object], settle: Callable[[], None], clock: Callable[[], float]
) -> int:
    """How often it is called in one repetition."""
    _timed(call, 1, settle, clock=clock)
    n = 1
    while n < 1 << 16 and (took := _timed(call, n, settle, clock=clock)) < LEAST_S:
        n *= 2 if took > LEAST_S / 8 else 8
    return n


def _timed(
    call: Callable[[], object], n: int, settle: Callable[[], None], *, clock: Callable[[], float]
) -> float:
    settle()
    began = clock()
    for _ in range(n):
        call()
    settle()
    return clock() - began


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(bytes, seconds) -> alpha (seconds) and beta (seconds per byte) of seconds = alpha + beta
    bytes, neither below 0: least squares of the relative errors, so that the small sizes tell alpha
    and the large ones beta."""
    weights = [1 / seconds**2 for _, seconds in points]
    w = sum(weights)
    x = sum(weight * n for weight, (n, _) in zip(weights, points)) / w
    y = sum(weight * seconds for weight, (_, seconds) in zip(weights, points)) / w
    spread = sum(weight * (n - x) ** 2 for weight, (n, _) in zip(weights, points))
    each = zip(weights, points)
    slope = sum(weight * (n - x) * (seconds - y) for weight, (n, seconds) in each)
    beta = slope / spread if spread else 0.0
    if beta <= 0:
        return y, 0.0
    if y < beta * x:  # through 0
        square = sum(weight * n * n for weight, (n, _) in zip(weights, points))
        return 0.0, sum(weight * n * s for weight, (n, s) in zip(weights, points)) / square
    return y - beta * x, beta
