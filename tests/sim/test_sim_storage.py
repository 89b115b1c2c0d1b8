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
from elastic.sim.sim_storage import CLOSED, STORAGE_KINDS
from elastic.types import (
    CopyFailed,
    CopyStored,
    EnterPlan,
    PlansFound,
    Pool,
    StepDone,
    Stop,
    StorageSeen,
)

JOB = {
    "name": "weather", "steps": 30, "global_batch": 12, "seed": 0, "layout": "auto",
    "min_workers": 1, "max_workers": None, "peer_every": 1, "durable_every": 5, "budget_usd": None,
    "max_nodes": None,
}  # fmt: skip
POOL = Pool("spot", "CPU", 1, "spot", 3600.0, 3, 3)  # a dollar a second
# longer than a lease; steps 1 to 16 are done from 12 s to 33 s, 30 of them until 52 s
LASTS_S = 40.0
LENGTHS_S = (10.0, 120.0, 7200.0)
SPELL_STEPS = 10  # at most; the longer a spell, the longer a step
FIRST_STEP_S = 12.0  # is begun then
# moment: begins so many steps after the first one began, and what happens so many steps later
MOMENTS: dict[str, tuple[float, FaultKind | None, str, float]] = {
    "start": (-1.0, None, "inside", 0.0),
    "step": (1.5, None, "inside", 0.0),
    "plan change": (1.5, "loss", "inside", 0.3),
    "checkpoint": (4.8, "process", "inside", 0.3),
    "end": (13.0, None, "inside", 0.0),
    "takeover": (4.5, "driver", "inside", 2.0),
    "takeover elsewhere": (4.5, "driver", "torn", 2.0),  # from another machine
}
CASES = [
    (kind, moment, lasts_s)
    for i, kind in enumerate(STORAGE_KINDS)
    for j, moment in enumerate(MOMENTS)
    for lasts_s in LENGTHS_S[(i + j) % 3 :] + LENGTHS_S[: (i + j) % 3]
]
# every kind with every moment and every length, and every moment with every length
PAIRS = CASES[:: len(LENGTHS_S)]


def play(
    monkeypatch: pytest.MonkeyPatch, *faults: Fault, delays: Delays | None = None, **changes: object
) -> simulated.Played:
    monkeypatch.setattr(
        simulated,
        "scenario",
        lambda seed: (JOB | changes, (POOL,), list(faults), delays or Delays()),
    )
    played = simulated.play(0)
    assert MODEL is not None
    return played


def told(played: simulated.Played, kind: type) -> list[object]:
    return [event for line in played.lines for _, event in line.events if isinstance(event, kind)]


def spell(
    kind: FaultKind, moment: str, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[simulated.Played, simulated.Played]:
    """A run with that weather, and the same one without."""
    at_step, also, how, later = MOMENTS[moment]
    step_s = max(4 / 3, lasts_s / SPELL_STEPS)
    at_s = max(0.0, FIRST_STEP_S + at_step * step_s) if at_step >= 0 else 0.0
    weather = Fault(at_s, kind, lasts_s=lasts_s, amount=8.0)
    more = (
        [Fault(at_s + later * step_s, also, 1 - (also == "driver"), 1.0, moment=how)]
        if also
        else []
    )  # type: ignore[arg-type]
    beside, calm = (
        play(monkeypatch, *faults, *more, steps=16, delays=Delays(work_s=3 * step_s))
        for faults in ([weather], [])
    )
    return beside, calm


def check_spell(
    kind: FaultKind, moment: str, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = (kind, moment, lasts_s)
    played, calm = spell(*case, monkeypatch)
    assert not played.wrong, (case, played.wrong)
    stored = {e.copy.step for e in told(played, CopyStored) if e.copy.kind == "durable"}  # type: ignore[attr-defined]
    assert max(stored) == 16, (case, "what is owed is written afterwards")
    if moment == "plan change" and kind != "past":
        (plan,) = [p for p in plans(played) if p.cause == "loss" and p.generation == 2]
        assert plan.resume.source == "peer", case
    times, usual = (
        [at for line in one.lines for at, e in line.events if isinstance(e, StepDone)]
        for one in (played, calm)
    )
    if moment in ("step", "plan change"):  # it ends in the midst of the run
        assert times == pytest.approx(usual, abs=0.01), (case, "no step waits for storage")
    if moment == "end" and lasts_s <= simulated.Job().orphan_lease_s:
        assert len(times) == len(usual), (case, "no step is done twice")
    if moment == "start":  # the first plan may: it begins from nothing
        assert times[-1] <= usual[-1] + lasts_s, case
    away_s = simulated.account(played.lines).totals.storage_away_s
    if kind in CLOSED and moment in ("step", "plan change") and lasts_s > simulated.LEASE_S:
        # it is seen with the next line that is not taken, at the end of a step
        assert lasts_s - lasts_s / SPELL_STEPS - 1 <= away_s <= lasts_s + 1, (case, away_s)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORAGE_KINDS)
def test_every_moment_of_a_run_bears_it(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in PAIRS if case[0] == kind]
    assert {moment for _, moment, _ in cases} == {*MOMENTS}
    assert {lasts_s for *_, lasts_s in cases} == {*LENGTHS_S}
    for case in cases:
        check_spell(*case, monkeypatch)


@pytest.mark.whole
@pytest.mark.parametrize("kind", STORAGE_KINDS)
def test_for_ten_seconds_two_minutes_and_two_hours(
    kind: FaultKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in CASES:
        if case[0] == kind:
            check_spell(*case, monkeypatch)


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


def test_the_checkpoint_of_a_stop_is_stored_when_storage_takes_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try is a generation from memory, which may do one more step."""
    played = play(monkeypatch, Fault(20.0, "full", lasts_s=LASTS_S), Fault(24.0, "stop"))
    refused, asked = told(played, CopyFailed), told(played, StepDone)
    assert len(refused) > 1 and [w for w in played.wrong if "it stopped" not in w] == []
    assert len(asked) <= 10 + len(refused), "it does not train on"
    (stop,) = [
        a for ln in played.lines if ln.decision for a in ln.decision.actions if isinstance(a, Stop)
    ]
    step = played.state.step
    assert stop.reason == f"scripted; step {step} reached, last checkpoint at step {step}"
    assert 20.0 + LASTS_S < played.lines[-1].at_s < 20.0 + LASTS_S + 40.0
