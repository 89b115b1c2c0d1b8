"""Random jobs under random faults, in processes: what `make chaos ENGINE=processes` plays, for some seeds."""

from __future__ import annotations

import pytest
from support.chaos.processes import play

pytestmark = [pytest.mark.e2e, pytest.mark.whole]
SEEDS = range(12)  # half a minute to a minute and a half each


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(seed: int) -> None:
    played = play(seed)
    assert not played.wrong, f"{[fault.kind for fault in played.happened]}: {'; '.join(played.wrong)}"
