"""A day of one step a second, as the bench `month` makes it: what a month leaves behind follows
from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.ledger.parts import PART_BYTES

BENCH = Path(__file__).resolve().parent / "month.py"
MONTH_MB, RESUME_S, GROWN_MB = 100.0, 5.0, 16.0


@pytest.mark.whole
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_a_day_of_steps_fits_a_month_into_its_bounds() -> None:
    words = [sys.executable, str(BENCH), "--json", "--days", "0.5", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    half, day = figures["by_day"]["0.5"], figures["by_day"]["1"]
    open_mb = day["journal_mb"] - day["packed_mb"]  # is packed as well as the parts are
    packed = day["packed_mb"] / (figures["parts"] * PART_BYTES / 1e6)
    assert figures["parts"] >= 4 and 30 * (day["packed_mb"] + open_mb * packed) <= MONTH_MB
    assert day["resume_s"] <= RESUME_S
    assert day["driver_mb"] - half["driver_mb"] <= GROWN_MB
