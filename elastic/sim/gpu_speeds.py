"""How fast simulated GPUs really are: given speeds, faults that slow them down, chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import pi, sin

from elastic.planner.hetero.unequal_shares import busy_s
from elastic.sim.scripted_faults import Fault
from elastic.types import Plan, WorkerId

FORWARD = 1 / 3  # of the work of a pass there and back: what is timed


@dataclass
class Paces:
    """`on`: something is unequal; else every step takes the same time and nobody tells any."""

    on: bool = False
    speeds: dict[str, float] = field(default_factory=dict)  # node -> units of nominal speed
    # from, until, times
    slow: dict[WorkerId, list[tuple[float, float, float]]] = field(default_factory=dict)
    # from, until, part, chance
    jitter: list[tuple[float, float, float, random.Random]] = field(default_factory=list)
    drift: list[tuple[float, float, float]] = field(default_factory=list)  # from, part, period

    def take(self, fault: Fault, node_id: str, gpus: int) -> None:
        """A fault of one of the kinds that are about speed."""
        until_s = float("inf") if fault.lasting else fault.at_s + fault.lasts_s
        if fault.kind == "jitter":
            self.jitter.append((fault.at_s, until_s, fault.amount, random.Random(fault.which)))
        elif fault.kind == "drift":
            self.drift.append((fault.at_s, fault.amount, fault.lasts_s))
        else:
            for k in range(gpus):
                if fault.gpu in (-1, k):
                    self.slow.setdefault(WorkerId(node_id, k), []).append(
                        (fault.at_s, until_s, fault.amount)
                    )

    def times(self, worker: WorkerId, at_s: float) -> float:
        """How many times as long as a nominal GPU's its work takes, chance left out."""
        found = 1 / self.speeds.get(worker.node_id, 1.0)
        for from_s, until_s, times in self.slow.get(worker, ()):
            if from_s <= at_s < until_s:
                found *= times
        for from_s, part, period_s in self.drift:
            phase = random.Random(str(worker)).uniform(0, 2 * pi)
            found *= 1 + part * sin(2 * pi * (at_s - from_s) / period_s + phase)
        return found

    def units(self, plan: Plan, at_s: float) -> list[float]:
        """Of each rank in the step that begins now, in multiples of the nominal time."""
        found = []
        for worker in plan.ranks:
            one = self.times(worker, at_s)
            for from_s, until_s, part, chance in self.jitter:
                one *= 1 + chance.uniform(-part, part) if from_s <= at_s < until_s else 1.0
            found.append(one)
        return found


def step_s(
    plan: Plan, samples: Sequence[int], units: Sequence[float], *, work_s: float, n_blocks: int
) -> float:
    """`work_s`: of all samples through all blocks on a nominal GPU."""
    unit_s = work_s / (sum(samples) * n_blocks)
    return busy_s(
        plan.layout,
        samples,
        plan.layers,
        n_microbatches=plan.n_microbatches,
        rates=[1 / (unit_s * one) for one in units],
    )
