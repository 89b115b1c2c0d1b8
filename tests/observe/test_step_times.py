"""Expected and measured seconds of a step, generation by generation."""

from __future__ import annotations

from typing import Any

from elastic.ledger.journal import Line
from elastic.observe.step_times import GenerationTimes, shown
from elastic.policy.state.fold import changes
from elastic.types import Decision, EnterPlan, Layout, Plan, StepDone, WorkerId


def step_times(lines: list[Line]) -> list[dict[str, Any]]:
    found = GenerationTimes()
    for change in changes(lines):
        found.take(change)
    return found.rows()


def line(at_s: float, *events: StepDone, plan: Plan | None = None) -> Line:
    decision = Decision((EnterPlan(plan),), "") if plan else None
    return Line(at_s, 1, tuple((at_s, event) for event in events), decision)


def plan(generation: int, expected: float, model: float = 0.0) -> Plan:
    layout = Layout(dp_shard=generation)
    return Plan(
        generation, layout, (WorkerId("a", 0),) * generation, (1,) * generation, (1,),
        predicted_step_time_s=expected, model_step_s=model,
    )  # fmt: skip


def done(generation: int, step: int, seconds: float, data_s: float = 0.0) -> StepDone:
    return StepDone(generation, step, 1.0, 10, seconds, data_s=data_s)


LINES = [
    line(1, plan=plan(1, 0.0)),
    line(2, done(1, 1, 9.0), done(1, 2, 1.0), done(1, 3, 1.5, data_s=0.3), done(1, 4, 1.1)),
    line(3, plan=plan(2, 0.6, model=0.5)),
    line(4, *(done(2, 5 + k, 0.5) for k in range(5))),
    line(5, plan=plan(3, 0.4)),
]


def test_the_first_step_and_waiting_do_not_count() -> None:
    first, second = step_times(LINES)  # generation 3 did no step
    assert first["expected_s"] is None and first["measured_s"] == 1.1 and first["steps"] == 4
    assert (second["expected_s"], second["model_s"], second["measured_s"]) == (0.6, 0.5, 0.5)


def test_both_stand_side_by_side() -> None:
    table = shown(step_times(LINES))
    assert table[0].split() == [
        "GEN",
        "LAYOUT",
        "STEPS",
        "EXPECTED",
        "MODEL",
        "ALONE",
        "MEASURED",
        "OFF",
        "BY",
    ]
    assert table[2].split() == [
        "2",
        "dp_shard=2",
        "5",
        "0.600",
        "s",
        "0.500",
        "s",
        "0.500",
        "s",
        "+20%",
    ]
    assert shown(step_times(LINES[:2])) == []


def test_a_generation_of_few_steps_is_not_measured() -> None:
    (row,) = step_times([LINES[0], line(2, done(1, 1, 9.0), done(1, 2, 1.0))])
    assert row["measured_s"] is None
