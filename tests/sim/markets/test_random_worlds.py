"""300 random worlds of markets, within the rules; `make chaos ENGINE=markets` plays any number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.chaos.markets import PlayedWorld, judged, play
from support.sim.worlds import world

from elastic.config.job import JobSpec
from elastic.ledger.journal import Line
from elastic.observe.accounting.accounts import account
from elastic.types import Decision, DriverStarted, Event, Job, PlanEntered, StepDone

N_WORLDS, N_BATCHES, N_IN_UNIT = 300, 60, 2
# they were wrong once
KEPT = (
    73, 1595, 3111, 3420, 3724, 4797, 7583, 15281, 24295, 7101933, 7102612, 7200753, 9177375,
)  # fmt: skip


def check(seed: int) -> PlayedWorld:
    played = play(seed)
    assert not played.wrong, f"seed {seed}: {'; '.join(played.wrong)}"
    return played


# the other batches take longer than a unit tier of minutes has room for
E2E = (pytest.mark.slow, pytest.mark.e2e)


@pytest.mark.parametrize(
    "batch",
    [
        *(pytest.param(i, marks=pytest.mark.slow) for i in range(N_IN_UNIT)),
        *(pytest.param(i, marks=E2E) for i in range(N_IN_UNIT, N_BATCHES)),
    ],
)
def test_random_worlds_keep_the_rules(batch: int) -> None:
    for seed in range(batch, N_WORLDS, N_BATCHES):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", KEPT)
def test_worlds_that_were_wrong_once(seed: int) -> None:
    check(seed)


def test_jobs_that_are_drawn_are_jobs_that_a_person_may_write() -> None:
    plain = Job.from_plain({"name": ""}).plain()
    for seed in (*range(N_WORLDS), *KEPT):
        drawn = world(seed).subject.job.plain()
        written = {key: value for key, value in drawn.items() if value != plain[key]}
        JobSpec.model_validate({"folder": ".", "program": "program.py", **written})


NOTICED = 48  # a world whose run grows and gets a notice


@pytest.mark.slow
def test_what_breaks_a_rule_is_said() -> None:
    """One fault at a time, in the journal of a world that keeps them all."""
    good = check(NOTICED)
    assert good.result.done and {"growth", "notice"} <= set(good.result.causes)

    def said(**changed: Any) -> str:
        return "; ".join(judged(replace(good, **changed)))

    def with_events(change: Callable[[Event], list[Event]]) -> list[Line]:
        return [
            replace(line, events=tuple((at_s, e) for at_s, one in line.events for e in change(one)))
            for line in good.lines
        ]

    twice = with_events(lambda one: [one] * (2 if isinstance(one, PlanEntered) else 1))
    assert "is entered twice" in said(lines=twice)
    steps = {e.step for line in good.lines for _, e in line.events if isinstance(e, StepDone)}
    middle = sorted(steps)[len(steps) // 2]
    other = with_events(
        lambda one: (
            [replace(one, digest="other") if getattr(one, "step", 0) == middle else one]
            if isinstance(one, StepDone)
            else [one]
        )
    )
    assert f"step {middle} of generation" in said(lines=other)
    few = with_events(
        lambda one: (
            [replace(one, pools=tuple(replace(p, max_nodes=1) for p in one.pools))]
            if isinstance(one, DriverStarted)
            else [one]
        )
    )
    assert "which may have 1" in said(lines=few)
    moves = account(good.lines).transitions
    grown = next(m.generation for m in moves if m.cause == "growth" and m.at_step > 3)
    back = with_events(
        lambda one: (
            [replace(one, step=one.step - 3)]
            if isinstance(one, PlanEntered) and one.generation == grown
            else [one]
        )
    )
    assert "lost 3 steps" in said(lines=back)
    dearer = replace(good.result, usd=good.result.usd + 0.01)
    assert "the ledger says" in said(result=dearer)
    again = replace(good.lines[-1], at_s=good.lines[-1].at_s + 1, decision=_orders(good.lines))
    assert "is ordered after the end" in said(lines=[*good.lines, again])
    twice = replace(good.lines[-1], at_s=good.lines[-1].at_s + 1, events=())
    assert "is ordered after the end" in said(lines=[*good.lines, twice])


def _orders(lines: list[Line]) -> Decision:
    return next(line.decision for line in lines if line.decision and line.decision.actions)
