"""A drill is simulated with what a run of another drill has measured, and comes as it was
predicted.

What happens is exact. Times are the machine's: the bounds here are those that two cores keep which
others use, too, several times what `tests/bench/predict.py` finds on a quiet machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.e2e.prediction import FIRST_DRILL, JOB, OTHER_DRILL, STEPS, deviations, transitions
from support.e2e.shell import Shell, last_line

# two whole runs of a minute each, for their times; that what one run measured is what another is
# simulated with, and what comes of it: tests/api/test_simulated_drill.py
pytestmark = [pytest.mark.e2e, pytest.mark.whole]
WALL, PAUSE, PAUSE_S, POINTS = 0.4, 0.5, 1.5, 15.0  # in CI; quiet: 0.15, 0.25, 0, 5
# Of a step's time: as measured before, as it came then, and of a layout that the run had not had.
SEEN, SEEN_LATER, UNSEEN = 0.1, 0.25, 0.4  # quiet: 0.1, 0.1, 0.3


def test_what_one_run_measures_predicts_another(shell: Shell) -> None:
    name = shell.job(**JOB)
    for run, drill in (("first", FIRST_DRILL), ("other", OTHER_DRILL)):
        (shell.root / f"{run}.yaml").write_text(json.dumps(drill))
        code, out, err = shell.call(
            "run", name, "--run-name", run, "--drill", f"{run}.yaml", "--json"
        )
        assert code == 0, err
        assert last_line(out)["samples_exact"] is True
    code, out, err = shell.here(
        "simulate", name, "--drill", "other.yaml", "--calibrate", "first", "--json"
    )
    assert code == 0, err
    predicted = last_line(out)
    assert (predicted["outcome"], predicted["steps"]) == ("succeeded", STEPS)
    code, out, err = shell.here("ledger", "other", "--json")
    assert code == 0, err
    real = last_line(out)
    assert transitions(predicted) == transitions(real)
    assert [one[0] for one in transitions(real)] == ["start", "loss", "growth", "notice", "growth"]
    found = deviations(predicted, real)
    said = "\n".join(found.lines())
    assert abs(found.wall) <= WALL, said
    assert all(abs(mine - its) <= max(PAUSE * its, PAUSE_S) for mine, its in found.pauses_s), said
    assert found.worst_category <= POINTS, said
    _steps_are_expected_as_they_were_measured(real["step_times"])


def _steps_are_expected_as_they_were_measured(rows: list[dict[str, Any]]) -> None:
    """The ledger's last table. A layout that was measured before is expected to take what it took
    then, whatever the machine does meanwhile; both come within bounds of what they took."""
    before: dict[str, float] = {}
    for row in rows:
        layout, expected, measured = row["layout"], row["expected_s"], row["measured_s"]
        assert measured, f"generation {row['generation']} has too few steps"
        if layout in before:
            assert expected == pytest.approx(before[layout], rel=SEEN), rows
        if expected:
            bound = SEEN_LATER if layout in before else UNSEEN
            assert expected == pytest.approx(measured, rel=bound), rows
        before[layout] = measured
    assert len(before) < len(rows) - 1, "no layout was seen twice"
