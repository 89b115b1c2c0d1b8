"""Drills on the virtual clock: they happen as on the embedded cluster, and what one run measures
predicts another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.e2e.prediction import FIRST_DRILL, OTHER_DRILL, STEPS, deviations, transitions
from support.sim.scenario import MODEL

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.observe.reporting.report import ledger
from elastic.scenarios.judge import Undisturbed, wrong
from elastic.scenarios.kept_steps import events
from elastic.sim.markets.calibration import Calibration, calibrated
from elastic.sim.markets.drilled_run import checked, drilled_run
from elastic.sim.scripted_faults import Delays
from elastic.types import DrillAsked, DriverStarted, Evaluated, NodeReady, Plan, Pool, RequestFailed

JOB = {
    "name": "timed", "steps": STEPS, "global_batch": 12, "peer_every": 5, "durable_every": 25,
    "layout": {"3": "dp_shard=3", "2": "dp_shard=2", "1": "dp_shard=1"}, "min_workers": 1,
    "budget_usd": 20.0, "eval_every": 20,
}  # fmt: skip
POOLS = (
    Pool("spot", "CPU", 1, "spot", 1.2, 0, 2, notice_s=10.0),
    Pool("on-demand", "CPU", 1, "on-demand", 3.4, 0, 1),
)
START = DriverStarted("timed", 1, JOB, POOLS, MODEL, forms_ahead=True, expects_measured=True)
CHANGES_S = {
    "start/fresh": 4.0, "notice/live": 1.1, "growth/live": 2.3, "loss/peer": 1.7,
    "loss/durable": 3.0,
}  # fmt: skip
REAL = Calibration(
    Delays(boot_s=0.4, prepare_s=6.0, store_s=0.9, copy_s=0.02, detect_s=0.3, confirm_s=0.3,
           quiesce_s=0.2, release_s=0.1, changes_s=CHANGES_S),
    {(0, "dp_shard=3"): 0.4, (0, "dp_shard=2"): 0.6, (0, "dp_shard=1"): 1.2}, 1.0, {},
    first_prepare_s=9.0, evaluation_s=0.5, work=0.95, data=0.01, start=START,
)  # fmt: skip


def run(drill: Sequence[Mapping[str, Any]], measured: Calibration = REAL) -> list[Line]:
    def step_s(plan: Plan) -> float:
        return measured.step_s[0, str(plan.layout)]

    return drilled_run(START, drill, measured=measured, step_s=step_s)


def test_a_drill_happens_as_on_the_embedded_cluster() -> None:
    lines = run(OTHER_DRILL)
    digests = [f"sample-{step}" for step in range(1, STEPS + 1)]
    assert not wrong(lines, Undisturbed([1.0] * STEPS, digests))
    drilled = [one.drill for one in events(lines, DrillAsked)]
    assert len(drilled) == len(OTHER_DRILL) and not any("error" in one for one in drilled)
    assert [e.node.node_id for e in events(lines, NodeReady)] == [
        "spot-1", "spot-2", "on-demand-1", "spot-3", "spot-4"
    ]  # fmt: skip
    assert events(lines, RequestFailed), "what a drill took is not given again"
    assert [one.step for one in events(lines, Evaluated)][:2] == [20, 40]
    found = ledger(lines)[0]
    assert [one[0] for one in transitions(found)] == ["start", "loss", "growth", "notice", "growth"]
    pauses = [round(one["pause_s"], 1) for one in found["transitions"][1:]]
    assert pauses == [2.3, 2.3, 1.1, 2.3]  # of the loss also detection and quiescing


def test_what_one_run_measures_predicts_another() -> None:
    """The whole way with a run whose delays are known."""
    measured = calibrated(run(FIRST_DRILL))
    for kind in ("notice/live", "growth/live", "loss/peer", "start/fresh"):
        assert measured.delays.changes_s[kind] == pytest.approx(CHANGES_S[kind], abs=0.1), kind
    assert measured.step_s[0, "dp_shard=2"] == pytest.approx(0.6, rel=0.02)
    assert measured.first_prepare_s == pytest.approx(9.0, abs=0.1)
    assert measured.delays.prepare_s == pytest.approx(6.0, abs=0.1)
    assert measured.evaluation_s == pytest.approx(0.5)
    predicted, real = (ledger(run(OTHER_DRILL, known))[0] for known in (measured, REAL))
    assert transitions(predicted) == transitions(real)
    found = deviations(predicted, real)
    assert abs(found.wall) < 0.01 and found.worst_pause < 0.1 and found.worst_category < 0.5


def test_nodes_without_a_name_that_fits_are_said_as_a_run_says_it() -> None:
    lines = run([{"at_step": 5, "kill": "spot-9"}, {"at_step": 6, "add": "moon"}])
    errors = [one.drill["error"] for one in events(lines, DrillAsked)]
    assert "'spot-9' is no node" in errors[0] and "no pool 'moon'" in errors[1]


@pytest.mark.parametrize("kind", ["hang", "stall", "partition", "device_error"])
def test_other_kinds_happen_too(kind: str) -> None:
    lines = run([{"at_step": 13, kind: "any-spot"}])
    assert "loss" in [one[0] for one in transitions(ledger(lines)[0])]


def test_what_no_simulation_carries_out_is_refused() -> None:
    with pytest.raises(SpecError, match=r"b.yaml, entry 2: slow is not simulated; notice, kill"):
        checked(
            [{"at_step": 1, "kill": "any"}, {"at_step": 2, "slow": "any", "factor": 2}], "b.yaml"
        )


def test_one_who_nobody_joined_later_prepares_as_the_first_did() -> None:
    alone = calibrated(run([]))
    assert alone.delays.prepare_s == pytest.approx(9.0, abs=0.1)
