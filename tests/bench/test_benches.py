"""Whole benches, once through: ratios of things that were measured in the same run. The rest is in
test_smoke.py."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.places import ROOT

pytestmark = pytest.mark.whole


def bench(name: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, f"tests/bench/{name}.py", "--json", "--repeats", "1", *words],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])["figures"]
    return figures


def test_recovery() -> None:
    found = bench("recovery", "--parts", "drills")
    assert found["pause_loss_s"] < found["cold_restart_s"] / 5
    for cause in ("notice", "loss", "growth", "hang"):
        assert set(found["phases_s"][cause]) >= {
            "detect",
            "groups",
            "build",
            "transfer",
            "first_step",
            "rest",
        }


def test_reshard() -> None:
    found = bench("reshard")
    assert found["state_mb"] > 1000 and len(found["pairs"]) >= 6
    assert found["live_vs_dcp_least"] > 1
    for pair in found["pairs"].values():
        assert pair["gbps"] > 0 and 0 < pair["peak"] <= 1.05


def test_planner() -> None:
    found = bench("planner")
    assert found["search_64_s"] < found["search_1024_s"]
    sizes = [max(by.values()) for by in found["growth_s"].values()]
    assert len(sizes) >= 6 and sizes[-1] < 40 * sizes[0]  # 2,048 times as many GPUs
