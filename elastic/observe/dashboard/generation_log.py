"""The generations of a run: when each was ordered, entered and left, why, and how fast it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.observe.accounting.transitions import Transition
from elastic.policy.state.fold import Change
from elastic.types import Decided, Plan, StepDone

MOST_SENT = 1000  # to a page, the newest


@dataclass(slots=True)
class GenerationRow:
    """One that was ordered. Times are the journal's; None = it has not come to that."""

    generation: int
    cause: str
    layout: str
    source: str
    n_ranks: int
    n_nodes: int
    ordered_at_s: float
    expected_step_s: float
    reason: str = ""
    entered_at_s: float | None = None
    left_at_s: float | None = None
    n_steps: int = 0
    seconds: float = 0.0  # of its steps without the first, data and copies left out


@dataclass
class GenerationLog:
    """Built by `take`."""

    rows: dict[int, GenerationRow] = field(default_factory=dict)

    def take(self, change: Change) -> None:
        before, after, event = change.before, change.after, change.event
        if after.target is not None and after.target is not before.target:
            self._ordered(after.target, change)
        if after.plan is not before.plan:
            self._running(before.plan, after.plan, change.at_s)
        if isinstance(event, StepDone) and after.last_step is event:
            row = self.rows.get(event.generation)
            if row is not None:
                row.seconds += (
                    event.step_time_s - event.data_s - event.copy_s if row.n_steps else 0.0
                )
                row.n_steps += 1

    def _ordered(self, plan: Plan, change: Change) -> None:
        if plan.generation in self.rows:
            return
        event = change.event
        self.rows[plan.generation] = GenerationRow(
            plan.generation, plan.cause, str(plan.layout), plan.resume.source, len(plan.ranks),
            len(plan.nodes), change.at_s, plan.predicted_step_time_s,
            event.decision.reason if isinstance(event, Decided) else "",
        )  # fmt: skip

    def _running(self, before: Plan | None, now: Plan | None, at_s: float) -> None:
        left = self.rows.get(before.generation) if before is not None else None
        entered = self.rows.get(now.generation) if now is not None else None
        if left is not None and left is not entered and left.left_at_s is None:
            left.left_at_s = at_s
        if entered is not None and entered.entered_at_s is None:
            entered.entered_at_s = at_s

    def plain(self, transitions: list[Transition], began_s: float) -> dict[str, Any]:
        """Seconds since the run's start. `pause_s` and `phases_s`: see Transition."""
        known = {one.generation: one for one in transitions}
        rows = list(self.rows.values())
        return {
            "left_out": max(0, len(rows) - MOST_SENT),
            "rows": [_plain(row, known.get(row.generation), began_s) for row in rows[-MOST_SENT:]],
        }


def _plain(row: GenerationRow, found: Transition | None, began_s: float) -> dict[str, Any]:
    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - began_s, 3)

    made = {
        "generation": row.generation, "cause": row.cause, "layout": row.layout,
        "source": row.source, "n_ranks": row.n_ranks, "n_nodes": row.n_nodes,
        "reason": row.reason, "ordered_at_s": since(row.ordered_at_s),
        "entered_at_s": since(row.entered_at_s), "left_at_s": since(row.left_at_s),
        "n_steps": row.n_steps, "expected_step_s": round(row.expected_step_s, 6),
        "step_s": round(row.seconds / (row.n_steps - 1), 6) if row.n_steps > 1 else None,
    }  # fmt: skip
    if found is None:
        return made
    return made | {
        "at_step": found.at_step, "steps_lost": found.steps_lost, "pause_s": found.pause_s,
        "phases_s": {name: seconds for name, seconds in found.phases_s.items() if seconds},
        "bytes_moved": found.bytes_moved, "digest_ok": found.digest_ok,
        "loss_equal": found.loss_equal,
    }  # fmt: skip
