"""The folder of a tiny job, where no cluster and no storage of the user's are seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.api.tiny_job import PROGRAM
from support.api.traced_once import trace_once


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is planned with in several tests."""
    trace_once(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "tiny"
    job.mkdir()
    (job / "program.py").write_text(PROGRAM)
    (job / "job.yaml").write_text("steps: 4\nglobal_batch: 8\nseed: 3\n")
    return job
