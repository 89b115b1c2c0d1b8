"""When a run will be done and what it will have cost, with a range: from how its pace varied so
far, pauses included."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from elastic.observe.dashboard.step_curve import Numbers, StepCurve
from elastic.policy.state.fold import State

LEAST = 8  # steps
N_WINDOWS = 20
Z = 1.2816  # of the normal distribution: 80 % lie within +- Z


@dataclass(frozen=True)
class Range:
    """What is expected, and the bounds between which it is in 8 of 10 cases."""

    low: float
    mid: float
    high: float

    def plus(self, more: float) -> Range:
        return Range(self.low + more, self.mid + more, self.high + more)

    def plain(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 4) for name in ("low", "mid", "high")}


@dataclass(frozen=True)
class Forecast:
    """`rest_s`: seconds to the end; `usd`: the whole bill then. `n_windows`: stretches of the run
    that the range comes of, over the last `n_steps` steps."""

    rest_s: Range
    usd: Range
    n_windows: int
    n_steps: int

    def plain(self) -> dict[str, Any]:
        return {
            "rest_s": self.rest_s.plain(),
            "usd": self.usd.plain(),
            "n_windows": self.n_windows,
            "n_steps": self.n_steps,
        }


def forecast(curve: StepCurve, state: State) -> Forecast | None:
    """The later half of the steps counts, as the pools and the layout are now; hours in which
    nothing ran do not. A step of another phase of the job counts as many as it asks of the model.
    None = too few steps, or nothing is left to do."""
    n, rest_steps = len(curve), state.rest_work
    if n < LEAST or not 0 < rest_steps < float("inf"):
        return None
    used = max(LEAST, n // 2)
    n_windows = min(N_WINDOWS, used // 4)
    at = np.linspace(n - used, n - 1, n_windows + 1).astype(np.int64)
    steps = curve.numbers("step")[at]
    work = np.array([state.work_between(a, b) for a, b in pairwise(steps.tolist())])
    seconds, bill = (np.diff(curve.numbers(name)[at]) for name in ("run_s", "usd"))
    rest_s, cost = (_range(values, work, rest_steps) for values in (seconds, bill))
    return Forecast(rest_s, cost.plus(state.usd), n_windows, int(steps[-1] - steps[0]))


def _range(values: Numbers, steps: Numbers, rest_steps: float) -> Range:
    """Of `rest_steps` more steps, where windows of `steps` took `values`. The mean of a few windows
    is known the less well the fewer there are, and those to come vary as they did (Student's t by
    the first term of its expansion, Abramowitz and Stegun 26.7.5)."""
    n, each = len(values), values / steps
    mean = float(values.sum() / steps.sum())
    free = max(1, n - 1)
    spread = float(each.std(ddof=1)) if n > 1 else 0.0
    t = Z + (Z**3 + Z) / (4 * free)
    to_come = max(1.0, rest_steps / float(steps.mean()))
    off = t * spread * sqrt(1 / n + 1 / to_come)
    low = max(float(each.min()), mean - off)  # no faster than it ever was
    return Range(rest_steps * min(low, mean), rest_steps * mean, rest_steps * (mean + off))
