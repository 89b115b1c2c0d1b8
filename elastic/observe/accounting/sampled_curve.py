"""The steps of a run that count, few enough to draw a trend of. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from elastic.ledger.journal import Doubles
from elastic.policy.state.fold import Change
from elastic.types import PlanEntered, StepDone

MOST = 1 << 16


def counts_until(change: Change) -> int | None:
    """The step behind which none of those before counts any more; None = all do."""
    event, target = change.event, change.before.target
    if isinstance(event, StepDone):  # one of another generation takes no place
        return event.step - 1 if change.after.last_step is event else None
    if isinstance(event, PlanEntered) and target is not None:
        return event.step if target.generation == event.generation else None
    return None


def _numbers() -> Doubles:
    return array("d")


@dataclass
class SampledCurve:
    """Built by `take`. Of more than MOST steps each second one is kept, or each fourth, and so on
    (`every`), whatever their numbers are; `since`: steps behind the last that is kept. `rates`:
    tokens per second, NaN = the step took no time."""

    every: int = 1
    since: int = 0
    steps: Doubles = field(default_factory=_numbers)
    losses: Doubles = field(default_factory=_numbers)
    rates: Doubles = field(default_factory=_numbers)

    def take(self, change: Change) -> None:
        last = counts_until(change)
        if last is None:
            return
        n, done = bisect_right(self.steps, last), change.event
        if n < len(self.steps):
            self.since = 0
            for column in (self.steps, self.losses, self.rates):
                del column[n:]
        if not isinstance(done, StepDone):
            return
        self.since += 1
        if n and self.since < self.every:
            return
        took_s, self.since = done.step_time_s, 0
        self.steps.append(done.step)
        self.losses.append(done.train_loss)
        self.rates.append(done.tokens / took_s if took_s > 0 else float("nan"))
        if len(self.steps) > MOST:  # an odd number: the last one stays
            self.every *= 2
            for column in (self.steps, self.losses, self.rates):
                del column[1::2]
