"""Every scenario of elastic/scenarios, on nodes of this machine: what `elastic certify` plays too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.certify.roomy import wrong

from elastic.scenarios.judge import Undisturbed
from elastic.scenarios.kept_steps import kept
from elastic.scenarios.limit import Limit
from elastic.scenarios.play import play
from elastic.scenarios.scenario import Scenario
from elastic.scenarios.stages import staged
from elastic.scenarios.stories import AXES, FAULTY, SCENARIOS
from elastic.scenarios.story_checks import checks, undisturbed

pytestmark = pytest.mark.e2e
HANGS_S = 800.0  # far above what any takes on a busy machine
AT_ONCE = 128  # steps
# What `make test` plays of two long ones, as one: a device error behind the stall and the corrupt
# results. Left out: a stopped worker (tests/cluster/backend/test_drill_runner.py says that it is
# seen; then it is left behind as a stalled one is) and the end of rank 0
# (tests/worker/session/test_peer_recovery.py).
ERROR = replace(AXES.acts[0], drill="device_error=rank:1 gpu=0 place=backward")
SHORT = replace(FAULTY, acts=(*FAULTY.acts[:4], ERROR))
INSTEAD = (AXES, FAULTY)


@cache
def alone(n_steps: int) -> Undisturbed:
    return undisturbed(n_steps, Limit.after(HANGS_S))


def expected(n_steps: int) -> Undisturbed:
    """All scenarios train the same: what is computed for one does for others."""
    found = alone(-(-n_steps // AT_ONCE) * AT_ONCE)
    return replace(found, losses=found.losses[:n_steps], digests=found.digests[:n_steps])


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(SHORT, id="faulty worker and failed GPU"),
        *(
            pytest.param(one, id=one.name, marks=[pytest.mark.whole] * whole)
            for one in SCENARIOS
            for whole in [one.whole or one in INSTEAD]
        ),
    ],
)
def test_what_is_promised(scenario: Scenario, tmp_path: Path) -> None:
    with staged(scenario, tmp_path) as stage:
        played = play(scenario, stage, Limit.after(HANGS_S))
    found = list(checks(scenario, played, expected(max(kept(played.lines)))))
    assert [check.name for check in found] == list(scenario.checks)
    assert not [text for text in map(wrong, found) if text]
