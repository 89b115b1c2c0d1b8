"""What a run had and paid for over time: GPUs by pool, those that trained, the bill at each step.
Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.policy.state.fold import EMPTY, Change, State
from elastic.types import CopyStored, DriverStarted, Plan, Pool, StepDone


@dataclass(frozen=True, slots=True)
class CapacityMoment:
    """From `at_s` on, until the next one: GPUs by pool that are paid for, and those that train."""

    at_s: float
    gpus: Mapping[str, int]
    training: int
    usd_per_h: float


@dataclass
class CapacityHistory:
    """Built by `take`. `trained_gpu_s`: by pool, GPU-seconds of nodes with a part in the running
    layout. `pools`: as each was last seen, those included that the newest driver has no more.
    `usd_at`: the bill when a step was finished (the last time, where it was trained again).
    `saved`: when each checkpoint was stored, and its step."""

    moments: list[CapacityMoment] = field(default_factory=list)
    trained_gpu_s: dict[str, float] = field(default_factory=dict)
    usd_at: dict[int, float] = field(default_factory=dict)
    saved: list[tuple[float, int]] = field(default_factory=list)
    pools: dict[str, Pool] = field(default_factory=dict)
    at_s: float | None = None
    _state: State = EMPTY
    _training: dict[str, int] = field(default_factory=dict)  # pool -> GPUs, of the newest moment

    def take(self, change: Change) -> None:
        event, at_s, after = change.event, change.at_s, change.after
        # nothing runs between two drivers that know nothing of each other
        apart = isinstance(event, DriverStarted) and not event.attached
        if self.at_s is not None and not apart:
            passed_s = max(0.0, at_s - self.at_s)
            for pool, gpus in self._training.items():
                self.trained_gpu_s[pool] = self.trained_gpu_s.get(pool, 0.0) + passed_s * gpus
        self.at_s = at_s
        if isinstance(event, StepDone):
            self.usd_at[event.step] = after.usd_at(at_s)
        elif isinstance(event, CopyStored) and event.copy.kind == "durable":
            self.saved.append((at_s, event.copy.step))
        before, self._state = self._state, after
        if after.pools is not before.pools:
            self.pools |= {pool.name: pool for pool in after.pools}
        if (
            after.nodes is not before.nodes
            or after.plan is not before.plan
            or after.phase != before.phase
            or after.pools is not before.pools
            or after.aborting is not before.aborting
        ):
            self._add(at_s, after)

    def _add(self, at_s: float, state: State) -> None:
        gpus: dict[str, int] = {}
        for node in state.alive:
            gpus[node.pool] = gpus.get(node.pool, 0) + node.gpus
        trains = state.phase in ("running", "entering") and state.aborting is None
        self._training = _training(state.plan, state) if trains else {}
        moment = CapacityMoment(at_s, gpus, sum(self._training.values()), state.usd_per_h)
        if self.moments and self.moments[-1].at_s == at_s:
            self.moments[-1] = moment
        else:
            self.moments.append(moment)

    def at(self, at_s: float) -> CapacityMoment | None:
        """What there was then."""
        k = bisect_right(self.moments, at_s, key=lambda moment: moment.at_s)
        return self.moments[k - 1] if k else None


def _training(plan: Plan | None, state: State) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, gpus in plan.workers_per_node.items() if plan is not None else ():
        node = state.nodes.get(name)
        if node is not None:
            found[node.pool] = found.get(node.pool, 0) + gpus
    return found
