"""Journal entries in, points for trackers out: one per step, in order, each step once.

A tracker takes no step back. What is done again after a recovery is the same step on the same
samples, so its first telling stays, and the axis has neither jumps nor duplicates. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.observe.metrics.run_numbers import RunNumbers
from elastic.observe.metrics.step_rows import row
from elastic.policy.state.fold import Change
from elastic.types import DriverStarted, Evaluated, PlanEntered, StepDone

NOT_TOLD = ("step", "at_s")  # the axes
KNOWN = ("_told", "_tokens", "_generation", "_more", "_goodput_s", "_load_at_s")
GOODPUT_EVERY_S = 5.0  # of the journal's time
GOODPUT_OLD_S = 600.0  # the same of what earlier drivers did


@dataclass(frozen=True, slots=True)
class TrackerPoint:
    step: int
    at_s: float
    numbers: dict[str, float]


@dataclass
class TrackerPoints:
    """`put` is called with each step when the next one has come: what is evaluated at a step is
    told with it."""

    put: Callable[[TrackerPoint], None]
    _open: TrackerPoint | None = None
    _told: int = 0  # the newest step
    _tokens: int = 0  # up to it
    _generation: int = 0  # of the newest transition that was told
    _more: dict[str, float] = field(default_factory=dict)  # for the next point
    _goodput_s: float = 0.0
    _load_at_s: float = 0.0

    def standing(self) -> dict[str, Any]:
        """What it knows of the lines that it has taken, as plain data."""
        found = {name: getattr(self, name) for name in KNOWN}
        return found | {"_open": asdict(self._open) if self._open is not None else None}

    def resume(self, standing: Mapping[str, Any]) -> None:
        """Continues from there. Raises KeyError, TypeError, ValueError."""
        found = {name: standing[name] for name in KNOWN}
        point = standing["_open"]
        if point is not None:
            numbers = {str(name): float(value) for name, value in point["numbers"].items()}
            self._open = TrackerPoint(int(point["step"]), float(point["at_s"]), numbers)
        self._more = {str(name): float(value) for name, value in found.pop("_more").items()}
        for name, value in found.items():
            setattr(self, name, type(getattr(self, name))(value))

    def take(self, change: Change, numbers: RunNumbers, live: bool) -> None:
        event = change.event
        if isinstance(event, DriverStarted):
            self.close()  # as the driver before did at its end
        elif isinstance(event, StepDone):
            if numbers.last is event:
                self._step(event, change.at_s, numbers, live=live)
        elif isinstance(event, Evaluated):
            found = {f"evaluated/{name}": value for name, value in event.metrics.items()}
            if self._open is not None and self._open.step == event.step:
                self._open.numbers.update(found)
        elif (
            isinstance(event, PlanEntered)
            and self._open is not None
            and event.step < self._open.step
        ):
            self._open = None  # undone before it was told

    def close(self) -> None:
        """Nothing more will come."""
        if self._open is not None:
            point, self._open = self._open, None
            self._told = point.step
            self._tokens = int(point.numbers["train/tokens"])
            self.put(point)

    def _step(self, done: StepDone, at_s: float, numbers: RunNumbers, *, live: bool) -> None:
        if self._open is not None and done.step > self._open.step:
            self.close()
        self._transition(numbers)
        if done.step <= self._told:
            return
        plan = numbers.state.plans.get(done.generation)
        workers = len(plan.ranks) if plan is not None else 0
        told = row(done, at_s=at_s, workers=workers, tokens=self._tokens + done.tokens)
        own = set(done.logged)
        found = {name: float(told[name]) for name in own}
        found |= {
            f"train/{name}": float(value)
            for name, value in told.items()
            if name not in own and name not in NOT_TOLD
        }
        found |= {f"elastic/{name}": value for name, value in _of_step(done).items()}
        found |= self._of_run(numbers, at_s, live) | self._more
        self._more = {}
        self._open = TrackerPoint(done.step, at_s, found)

    def _of_run(self, numbers: RunNumbers, at_s: float, live: bool) -> dict[str, float]:
        state = numbers.state
        found = {
            "elastic/nodes": float(len(state.alive)),
            "elastic/usd": state.usd,
            "elastic/usd_per_h": state.usd_per_h,
        }
        if (mfu := numbers.mfu) is not None:
            found["elastic/mfu"] = mfu
        found |= self._loads(numbers)
        if at_s - self._goodput_s >= (GOODPUT_EVERY_S if live else GOODPUT_OLD_S):
            self._goodput_s = at_s
            found["elastic/goodput"] = numbers.books.so_far().totals.goodput
        return found

    def _loads(self, numbers: RunNumbers) -> dict[str, float]:
        """Where nodes have told since the last point."""
        if numbers.loads.at_s == self._load_at_s:
            return {}
        self._load_at_s = numbers.loads.at_s
        return {f"system/{name}": value for name, value in numbers.system().items()}

    def _transition(self, numbers: RunNumbers) -> None:
        """The first step after one has come: it goes with the next point, also where that step
        itself was told before."""
        newest = numbers.newest_transition
        if newest is None or newest.generation == self._generation:
            return
        self._generation = newest.generation
        phases = {f"elastic/transition/{name}_s": s for name, s in newest.phases_s.items() if s}
        self._more |= {
            "elastic/transition/generation": float(newest.generation),
            "elastic/transition/pause_s": newest.pause_s,
            "elastic/transition/steps_lost": float(newest.steps_lost),
            **phases,
        }


def _of_step(done: StepDone) -> dict[str, float]:
    """What held the step up, and how unequal its ranks' work was, where that is known."""
    found = {"data_s": done.data_s, "copy_s": done.copy_s}
    known = {
        "imbalance": done.imbalance, "pad_share": done.pad_share, "expert_load": done.expert_load,
    }  # fmt: skip
    return found | {name: value for name, value in known.items() if value}
