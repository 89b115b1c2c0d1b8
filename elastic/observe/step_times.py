"""What a step was expected to take in each generation, and what it took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from elastic.observe.run_tables import columns
from elastic.policy.state.fold import Change
from elastic.types import Decided, EnterPlan, Plan, StepDone

LEAST = 3  # steps behind a generation's first one, which also builds and compiles


@dataclass
class GenerationTimes:
    """Built by `take`: plans as they were ordered, and seconds of their steps, by generation."""

    plans: dict[int, Plan] = field(default_factory=dict)
    took: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, change: Change) -> None:
        event = change.event
        if isinstance(event, StepDone) and event.step_time_s > 0:
            self.took[event.generation].append(event.step_time_s - event.data_s - event.copy_s)
        elif isinstance(event, Decided):
            ordered = (a.plan for a in event.decision.actions if isinstance(a, EnterPlan))
            self.plans |= {plan.generation: plan for plan in ordered}

    def rows(self) -> list[dict[str, Any]]:
        """A row per generation that trained: seconds as expected when it was ordered, as the cost
        model alone said (None = it did not), and as measured (median without the first step,
        waiting for data and copies left out; None = too few steps)."""
        return [
            {
                "generation": generation,
                "layout": str(plan.layout),
                "expected_s": plan.predicted_step_time_s or None,
                "model_s": plan.model_step_s or None,
                "measured_s": median(took[1:]) if len(took) > LEAST else None,
                "steps": len(took),
            }
            for generation, plan in sorted(self.plans.items())
            if (took := self.took.get(generation))
        ]


def shown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Nothing where nothing was expected."""
    if not any(row["expected_s"] for row in rows):
        return []
    head = ("GEN", "LAYOUT", "STEPS", "EXPECTED", "MODEL ALONE", "MEASURED", "OFF BY")
    table: list[tuple[str, ...]] = [head]
    for row in rows:
        expected, measured = row["expected_s"], row["measured_s"]
        off = f"{expected / measured - 1:+.0%}" if expected and measured else "-"
        seconds = (
            f"{row[name]:.3f} s" if row[name] else "-"
            for name in ("expected_s", "model_s", "measured_s")
        )
        table.append((str(row["generation"]), row["layout"], str(row["steps"]), *seconds, off))
    return columns(table, right=(0, 2, 3, 4, 5, 6))
