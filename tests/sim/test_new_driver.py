"""The driver dies at a random time, another one attaches to what still runs: the run finishes
within the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos.simulated import play

from elastic.sim.scripted_faults import Fault
from elastic.types import DriverStarted

pytestmark = pytest.mark.slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", range(8))
def test_a_new_driver_goes_on_with_what_lives(batch: int, tmp_path: Path) -> None:
    n_attached = 0
    for seed in range(1000 + batch, 1060, 8):
        played = play(
            seed,
            tmp_path / f"{seed}.jsonl",
            [Fault(8.0 + seed % 30, "driver", seed // 4, lasts_s=1.0)],
        )
        assert not played.wrong, f"seed {seed}: {'; '.join(played.wrong)}"
        n_attached += any(
            isinstance(e, DriverStarted) and e.attached
            for line in played.lines
            for _, e in line.events
        )
    assert n_attached > 2
