"""Medians and fits on a made-up clock."""

from __future__ import annotations

import pytest

from elastic.worker.profile.timings import LEAST, LEAST_S, MOST, fitted, medians_s


class Clock:
    """Calls take as long as they are told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def call(self, name: str, *seconds: float):  # type: ignore[no-untyped-def]
        left = list(seconds)

        def run() -> None:
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_a_median_is_not_moved_by_the_first_call_nor_by_one_disturbance() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", 9.0, 1.0, 2.0, 50.0, 1.0), "b": clock.call("b", 2.0)}
    assert medians_s(calls, 0.0, clock=lambda: clock.now) == {"a": 2.0, "b": 2.0}
    assert clock.order[-2 * LEAST :] == ["a", "b"] * LEAST  # they take turns


def test_short_calls_are_timed_several_at_once_and_the_time_bounds_the_repetitions() -> None:
    clock = Clock()
    found = medians_s({"short": clock.call("short", 1e-5)}, 1e9, clock=lambda: clock.now)
    assert found["short"] == pytest.approx(1e-5)
    assert len(clock.order) >= MOST * LEAST_S / 1e-5
    few = Clock()
    medians_s({"long": few.call("long", 1.0)}, 6.5, clock=lambda: few.now)
    assert LEAST < len(few.order) - 2 < MOST


def test_a_line_through_measured_sizes() -> None:
    alpha, beta = fitted([(n, 1e-4 + 3e-10 * n) for n in (4096, 1 << 20, 1 << 26)])
    assert (alpha, beta) == (pytest.approx(1e-4), pytest.approx(3e-10))
    noisy = fitted([(4096, 1.1e-4), (1 << 20, 4.0e-4), (1 << 26, 2.1e-2)])
    assert noisy == (pytest.approx(1e-4, rel=0.2), pytest.approx(3e-10, rel=0.1))


def test_neither_number_is_below_nothing() -> None:
    # relative errors, through 0
    assert fitted([(1000, 1e-6), (2000, 4e-6)]) == (0.0, pytest.approx(1.2e-9))
    assert fitted([(1000, 3e-3), (2000, 3e-3), (3000, 1e-3)])[1] == 0.0
    assert fitted([(1000, 2e-3)]) == (2e-3, 0.0)
