"""`elastic profile JOB --scale`. That a run is profiled while it trains: test_numbers_told.py."""

from __future__ import annotations

import json

import pytest
from support.e2e.shell import PROGRAMS, Shell

SLOW = str(PROGRAMS / "tiny_slow.py")
NODE = {"name": "own", "market_type": "owned", "gpus_per_node": 4, "max_nodes": 1}


@pytest.mark.whole
def test_a_job_runs_at_each_number_of_workers(shell: Shell) -> None:
    name = shell.job(program=SLOW, steps=300, pools=[NODE], layout="auto", durable_every=0)
    code, out, err = shell.call(
        "profile", name, "--local", "--scale", "1,2", "--png", "s.png", "--json"
    )
    assert (code, err) == (0, "")
    rows = json.loads(out)["scale"]
    assert [row["workers"] for row in rows] == [1, 2]
    assert all(row["parts"]["compute"] > 0 and row["steps"] >= 3 for row in rows)
    assert (shell.root / "s.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:  # stopped when enough was measured, and kept
        assert shell.status(row["run"])["phase"] in ("stopped", "succeeded")
