"""The steps of a run that count, as columns of numbers: 100,000 of them take a few megabytes. A
chart gets the least and the greatest value of each of its few hundred buckets."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from elastic.observe.accounting.sampled_curve import counts_until
from elastic.policy.state.fold import Change, ran_until_s
from elastic.types import DriverStarted, StepDone

CHARTED = ("train_loss", "tokens_per_s", "step_time_s", "usd", "grad_norm")
DIGITS = 6  # that a chart can show
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Stretch:
    """What of a curve is asked for: `by` step or time (seconds since the run's start), between
    `low` and `high` (None = its ends), in at most `buckets`."""

    by: str = "time"
    low: float | None = None
    high: float | None = None
    buckets: int = 500


class StepCurve:
    """Built by `take`. A step that is trained again takes the place of what it was, and of all that
    came after. `run_s`: of the run's time, without that in which nothing ran."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns = {
            name: array("d")
            for name in ("at_s", "run_s", "train_loss", "tokens", "step_time_s", "usd", "grad_norm")
        }
        self._at_s: float | None = None
        self._run_s = 0.0

    def __len__(self) -> int:
        return len(self.steps)

    def take(self, change: Change) -> None:
        self._pass(change)
        last = counts_until(change)
        if last is None:
            return
        self._cut(last)
        if isinstance(change.event, StepDone):
            self._append(change.event, change)

    def _pass(self, change: Change) -> None:
        """As the ledger has it: between two drivers clocks may differ, and nothing may run."""
        event, at_s, before_s = change.event, change.at_s, self._at_s
        started = event if isinstance(event, DriverStarted) else None
        if before_s is not None:
            until_s = at_s if started is None else ran_until_s(started, at_s, before_s)
            self._run_s += max(0.0, until_s - before_s)
        self._at_s = at_s if started is not None or before_s is None else max(at_s, before_s)

    def _append(self, done: StepDone, change: Change) -> None:
        self.steps.append(done.step)
        values = {
            "at_s": change.at_s,
            "run_s": self._run_s,
            "train_loss": done.train_loss,
            "tokens": done.tokens,
            "step_time_s": done.step_time_s,
            "usd": change.after.usd,
            "grad_norm": done.grad_norm,
        }
        for name, value in values.items():
            self.columns[name].append(value)

    def _cut(self, step: int) -> None:
        """What came after `step` counts no more."""
        n = bisect_right(self.steps, step)
        if n < len(self.steps):
            del self.steps[n:]
            for column in self.columns.values():
                del column[n:]

    def last(self, name: str) -> float | None:
        """None = no step is done, or the number is none (a loss that is not finite)."""
        value = self.columns[name][-1] if self.steps else float("nan")
        return value if np.isfinite(value) else None

    def numbers(self, name: str) -> Numbers:
        """A whole column, copied."""
        if name == "tokens_per_s":
            seconds = self.numbers("step_time_s")
            rate = np.zeros_like(seconds)
            np.divide(self.numbers("tokens"), seconds, out=rate, where=seconds > 0)
            return rate
        found = self.steps if name == "step" else self.columns[name]
        return np.array(found, dtype=np.float64)

    def charted(self, asked: Stretch, began_s: float) -> dict[str, Any]:
        """`x`, and of each of CHARTED the mean (`mid`) of each bucket, with `min` and `max` where a
        bucket holds more than one step. A value that is no number is None."""
        if asked.by == "step":
            x = self.numbers("step")
        else:  # clocks of two drivers may differ
            x = np.maximum.accumulate(self.numbers("at_s") - began_s) if len(self) else np.array([])
        if not len(x):
            return {"x": [], **{name: {"mid": []} for name in CHARTED}, "steps": 0}
        low = float(x[0]) if asked.low is None else asked.low
        high = float(x[-1]) if asked.high is None else asked.high
        first = max(0, int(np.searchsorted(x, low)) - 1)  # the line begins left of the chart
        end = min(len(x), int(np.searchsorted(x, high, "right")) + 1)
        found: dict[str, Any] = {"steps": end - first}
        starts = _starts(x[first:end], asked.buckets)
        counts = np.diff(np.append(starts, end - first))
        found["x"] = _plain(_means(x[first:end], starts, counts))
        for name in CHARTED:
            values = self.numbers(name)[first:end]
            found[name] = {"mid": _plain(_means(values, starts, counts))}
            if len(starts) < end - first:
                found[name]["min"] = _plain(np.fmin.reduceat(values, starts))
                found[name]["max"] = _plain(np.fmax.reduceat(values, starts))
        return found


def _starts(x: Numbers, buckets: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each bucket begins: they are equally wide, and none is empty."""
    if len(x) <= buckets:
        return np.arange(len(x), dtype=np.int64)
    edges = np.linspace(x[0], x[-1], buckets + 1)[:-1]
    return np.unique(np.searchsorted(x, edges)).astype(np.int64)


def _means(values: Numbers, starts: Any, counts: Any) -> Numbers:
    with np.errstate(invalid="ignore", over="ignore"):
        means: Numbers = np.add.reduceat(values, starts) / counts
    return means


def _plain(values: Numbers) -> list[float | None]:
    """With as many digits as a chart shows. A whole number by a power of ten is the number nearest
    to the decimal one, and is sent as short as that."""
    size = np.abs(values)
    known = np.isfinite(values) & (size > 0)
    places = DIGITS - 1 - np.floor(np.log10(size, where=known, out=np.zeros_like(values)))
    more, less = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    found = np.where(known, np.rint(values * more / less) * less / more, values).tolist()
    return [value if isfinite(value) else None for value in found]
