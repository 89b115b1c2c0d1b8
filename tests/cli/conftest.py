"""A storage folder with one run in it, and what stands in for somebody, or nobody, who drives
it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.api import control
from elastic.driver import drive
from elastic.ledger.journal import Journal
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted, Job, ModelProfile, OptimizerSpec, Pool, TensorSpec

MODEL = ModelProfile(
    4,
    1000,
    (TensorSpec("w", (100, 10), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",), ("step",)),),
    tp_limit=2,
)
POOLS = (Pool("spot", "CPU", 2, "spot", 0.9, 0, 3),)
JOB = {
    "name": "tiny", "folder": "/jobs/tiny", "steps": 30, "global_batch": 8, "seed": 0,
    "layout": "auto", "min_workers": 1, "max_workers": None, "peer_every": 3, "durable_every": 10,
    "budget_usd": None, "max_nodes": None,
}  # fmt: skip


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage folder with one run, done by the simulator: a notice and a loss on the way."""
    folder = tmp_path / "elastic_runs"
    faults = [Fault(25.0, "notice", 0, 10.0), Fault(33.0, "loss", 1)]
    backend = SimBackend(POOLS, Job.from_plain(JOB), faults, delays=Delays(work_s=4.0))
    state = drive(
        backend,
        Journal(folder / "tiny-1" / "journal.jsonl", 1),
        DriverStarted("tiny-1", 1, JOB, POOLS, MODEL),
    )
    assert state.phase == "succeeded"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    return folder


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "holder", lambda run: "somebody")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "holder", lambda run: "")
