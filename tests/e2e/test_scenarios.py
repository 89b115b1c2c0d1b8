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
from elastic.scenarios.stories import SCENARIOS
from elastic.scenarios.story_checks import checks, undisturbed

pytestmark = pytest.mark.e2e
HANGS_S = 800.0  # far above what any takes on a busy machine
AT_ONCE = 128  # steps


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
        pytest.param(one, id=one.name, marks=[pytest.mark.whole] if one.whole else [])
        for one in SCENARIOS
    ],
)
def test_what_is_promised(scenario: Scenario, tmp_path: Path) -> None:
    with staged(scenario, tmp_path) as stage:
        played = play(scenario, stage, Limit.after(HANGS_S))
    found = list(checks(scenario, played, expected(max(kept(played.lines)))))
    assert [check.name for check in found] == list(scenario.checks)
    assert not [text for text in map(wrong, found) if text]
