"""Random jobs under random faults, in processes: what `make chaos ENGINE=processes` plays, for some seeds."""

from __future__ import annotations

import pytest
from support.chaos.processes import play

pytestmark = [pytest.mark.e2e, pytest.mark.whole]
# A minute or two each. 11 has a failed device and a loss at once, 35 wrong numbers of the only worker beside a killed driver.
SEEDS = (0, 1, 4, 5, 11, 12, 14, 18, 30, 34, 35)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(seed: int) -> None:
    played = play(seed)
    assert not played.wrong, f"{[fault.kind for fault in played.happened]}: {'; '.join(played.wrong)}"
