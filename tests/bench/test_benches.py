"""The benches themselves, once through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster import processes

pytestmark = pytest.mark.whole
HERE = Path(__file__).resolve().parent


def bench(name: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py"), "--json", "--repeats", "1"], text=True, stdout=subprocess.PIPE
    )
    out, _ = process.communicate(timeout=560)
    assert not processes.descendants(process.pid)
    assert process.returncode == 0, out
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert found["bench"] == name
    figures: dict[str, Any] = found["figures"]
    return figures


def test_recovery() -> None:
    found = bench("recovery")
    assert found["pause_loss_s"] < found["cold_restart_s"] / 5
    assert found["steps_lost_notice"] == found["steps_lost_growth"] == 0
    assert found["contents_equal"] is True
    for cause in ("notice", "loss", "growth", "hang"):
        assert found[f"pause_{cause}_s"] > 0
        assert set(found["phases_s"][cause]) >= {"detect", "groups", "build", "transfer", "first_step", "rest"}


def test_reshard() -> None:
    found = bench("reshard")
    assert found["state_mb"] > 1000 and len(found["pairs"]) >= 6
    assert found["moved_vs_least"] == 1.0
    assert found["live_vs_dcp"] > 1
    for pair in found["pairs"].values():
        assert pair["gbps"] > 0 and 0 < pair["peak"] <= 1.05


def test_overhead() -> None:
    found = bench("overhead")
    assert found["step_time_ratio"] > 0
    assert found["cpu_seconds_ratio"] > 0


def test_capacity() -> None:
    found = bench("capacity")
    assert 0 < found["event_to_drained_s"] < found["notice_to_drained_s"]
    assert found["notice_to_event_s"] > 0
    assert found["kill_to_abort_s"] > 0 and found["ready_to_prepare_s"] >= 0


def test_planner() -> None:
    found = bench("planner")
    assert 0 < found["search_64_s"] < found["search_1024_s"] and found["search_16384_s"] < 5
    sizes = [max(by.values()) for by in found["growth_s"].values()]
    assert len(sizes) >= 6 and sizes[-1] < 40 * sizes[0]  # 2,048 times as many GPUs
