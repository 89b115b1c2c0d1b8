"""What each phase of a job is planned to take on given nodes, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.api.planning.plan_nodes import MachineGroup
from elastic.api.planning.query import Query


def of_phases(query: Query, machines: Sequence[MachineGroup]) -> dict[str, Any]:
    """{} where the job has none. A deadline is that of the sum. Raises InfeasiblePlan that names
    the phase."""
    rows, begin = list[dict[str, Any]](), 0
    for number, phase in enumerate(query.subject.phases, 1):
        offer = query.of_phase(number, machines)
        rows.append(
            {
                "phase": number, "from_step": begin, "steps": phase.steps,
                "global_batch": phase.job.global_batch, "sample_tokens": phase.sample_tokens,
                "tokens": phase.tokens, "layout": str(offer.layout), "step_s": offer.step_s,
                "hours": offer.hours, "usd": offer.usd,
            }
        )  # fmt: skip
        begin += phase.steps
    if not rows:
        return {}
    return {"phases": rows, "all_phases": {**_sums(rows), "deadline_h": query.aim.deadline_h}}


def with_first(offer: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """What `of_phases` found, with this offer for the first phase; {} where the job has none."""
    if not data.get("phases"):
        return {}
    first, *later = data["phases"]
    rows = [first | {key: offer[key] for key in ("layout", "step_s", "hours", "usd")}, *later]
    return {"phases": rows, "all_phases": data["all_phases"] | _sums(rows)}


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: sum(row[key] for row in rows) for key in ("steps", "tokens", "hours", "usd")}
