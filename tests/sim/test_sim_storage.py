"""Every kind of weather of a run's storage at every moment of a run, on the virtual clock."""

from __future__ import annotations

import re

import pytest
from support.chaos import simulated
from support.sim.scenario import MODEL

from elastic.observe import event_messages
from elastic.observe.run_tables import status
from elastic.observe.run_view import view_of
from elastic.sim.scripted_faults import Delays, Fault, FaultKind
from elastic.sim.sim_storage import STORAGE_KINDS
from elastic.types import EnterPlan, PlansFound, Pool, StepDone, Stop, StorageSeen

JOB = {
    "name": "weather", "steps": 30, "global_batch": 12, "seed": 0, "layout": "auto",
    "min_workers": 1, "max_workers": None, "peer_every": 1, "durable_every": 5, "budget_usd": None,
    "max_nodes": None,
}  # fmt: skip
POOL = Pool("spot", "CPU", 1, "spot", 3600.0, 3, 3)  # a dollar a second
# longer than a lease; steps 1 to 16 are done from 12 s to 33 s, 30 of them until 52 s
LASTS_S = 40.0
MOMENTS = {
    "start": (0.0, None),
    "step": (14.0, None),
    "loss": (14.0, "loss"),
    "checkpoint": (18.5, "process"),
    "end": (28.0, None),
}


def play(monkeypatch: pytest.MonkeyPatch, *faults: Fault, **changes: object) -> simulated.Played:
    monkeypatch.setattr(
        simulated, "scenario", lambda seed: (JOB | changes, (POOL,), list(faults), Delays())
    )
    played = simulated.play(0)
    assert MODEL is not None
    return played


def told(played: simulated.Played, kind: type) -> list[object]:
    return [event for line in played.lines for _, event in line.events if isinstance(event, kind)]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STORAGE_KINDS)
def test_every_moment_of_a_run_bears_it(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment, (at_s, also) in MOMENTS.items():
        more = [Fault(at_s + 6.0, also, 1)] if also else []  # type: ignore[arg-type]
        played = play(monkeypatch, Fault(at_s, kind, lasts_s=LASTS_S, amount=8.0), *more, steps=16)
        assert not played.wrong, (kind, moment, played.wrong)
        if also and kind != "past":
            (plan,) = [
                p for p in plans(played) if p.cause in ("loss", "growth") and p.generation == 2
            ]
            assert plan.resume.source == "peer", (kind, moment)
    for machine in ("inside", "torn"):  # the next driver is on the same one, or on another
        driver = Fault(24.0, "driver", lasts_s=1.0, moment=machine)  # type: ignore[arg-type]
        played = play(monkeypatch, Fault(14.0, kind, lasts_s=LASTS_S, amount=8.0), driver, steps=16)
        assert not played.wrong, (kind, machine, played.wrong)


def plans(played: simulated.Played) -> list:
    actions = [a for line in played.lines if line.decision for a in line.decision.actions]
    return [action.plan for action in actions if isinstance(action, EnterPlan)]


def test_a_loss_costs_no_time_while_storage_is_away_and_everybody_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = Fault(14.0, "storage", lasts_s=LASTS_S)
    beside, calm = (play(monkeypatch, *more, Fault(32.0, "loss", 1)) for more in ([away], []))
    times = [
        [at_s for line in one.lines for at_s, e in line.events if isinstance(e, StepDone)]
        for one in (beside, calm)
    ]
    assert times[0] == pytest.approx(times[1]), "each step is done when it is without the outage"
    seen = told(beside, StorageSeen)
    assert [(e.answers, round(e.since_s, 1)) for e in seen] == [(False, 14.0), (True, 14.0)]  # type: ignore[attr-defined]
    view = view_of(beside.lines)
    notes = [note.text for note in view.notes if note.kind == "StorageSeen"]
    assert "training continues" in notes[0] and notes[1] == "storage answers again after 0:40"
    i = next(
        i
        for i, line in enumerate(beside.lines)
        if any(isinstance(e, StorageSeen) for _, e in line.events)
    )
    during = view_of(beside.lines[: i + 1])
    assert any(re.search("does not answer since 0:1.*no answer", row) for row in status(during)), (
        status(during)
    )
    assert event_messages.of(seen[0], during) is not None  # type: ignore[arg-type]


def test_a_driver_on_another_machine_learns_the_plan_that_no_storage_took_from_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = (
        Fault(14.0, "storage", lasts_s=LASTS_S),
        Fault(20.0, "loss", 1),
        Fault(34.0, "driver", lasts_s=1.0, moment="torn"),
        Fault(40.0, "loss", 0),
    )
    played = play(monkeypatch, *faults, durable_every=0)
    assert not played.wrong, played.wrong
    (found,) = told(played, PlansFound)
    assert [plan.generation for plan in found.plans][0] == 2  # type: ignore[attr-defined]
    assert not [
        plan for plan in plans(played) if plan.generation > 1 and plan.resume.source == "fresh"
    ], "no step is lost"


def test_what_waits_for_storage_is_booked_as_such_and_a_budget_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = Fault(20.0, "storage", lasts_s=100.0)
    losses = [Fault(30.0, "loss", k) for k in range(3)]
    played = play(monkeypatch, away, *losses)
    books = simulated.account(played.lines)
    assert not played.wrong and books.seconds["checkpoint_restore"] > 50.0
    assert books.totals.storage_away_s == pytest.approx(100.0, abs=0.5)
    spent = play(monkeypatch, away, *losses, budget_usd=150.0)
    stop = [
        line
        for line in spent.lines
        if line.decision and any(isinstance(a, Stop) for a in line.decision.actions)
    ]
    assert spent.state.phase == "stopped" and spent.backend.usd() < 160.0 and stop[-1].at_s < 120.0
