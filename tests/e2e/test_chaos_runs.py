"""Random jobs under random faults, in processes: what `make chaos ENGINE=processes` plays, for some
seeds; and the engines of `make chaos` for some minutes, from a random seed on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.chaos.processes import RUN_MOST_S, play
from support.places import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.whole]
# A minute or two each. 11 has a failed device and a loss at once, 35 silent data corruption of the
# only worker beside a killed driver.
MINUTES = 2
SEEDS = (0, 11, 12, 14, 18, 30, 34, 35)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(seed: int) -> None:
    played = play(seed)
    assert not played.wrong, (
        f"{[fault.kind for fault in played.happened]}: {'; '.join(played.wrong)}"
    )


# the last run begins in the last minute, and its seed must be told
@pytest.mark.timeout(60 * MINUTES + 3 * RUN_MOST_S)
@pytest.mark.parametrize("engine", ["virtual", "markets", "processes"])
def test_minutes_of_random_runs(engine: str) -> None:
    """Other runs each time: what it prints says from which seed on, and of each wrong run the seed
    that plays it again."""
    played = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "chaos.py"),
            "--engine",
            engine,
            "--minutes",
            str(MINUTES),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert played.returncode == 0, played.stdout
