"""A tiny job in a folder, a run of it that is prepared and not started, and the events of its
steps."""

from __future__ import annotations

from pathlib import Path

from elastic import api
from elastic.api.running import run as running
from elastic.api.running.program_file import job_given
from elastic.data.order import digest, digest_text, sample_ids
from elastic.types import DriverStarted, ModelProfile, StepDone, TensorSpec

PROGRAM = """
import elastic
program = elastic.Program(model=lambda: None, optimizer=lambda named: None, dataset=lambda: range(100), loss=lambda o, b: 0)
"""
MODEL = ModelProfile(1, 4, (TensorSpec("w", (2, 2), "float32"),))
START = DriverStarted("tiny-1", 1, {"steps": 4, "global_batch": 8, "seed": 3}, (), MODEL)


def prepared(folder: Path, **options: object) -> running.JobRun:
    """A run of the folder's job that has not begun."""
    return running.JobRun(job_given(folder, None, api.Options()), api.Options(**options))  # type: ignore[arg-type]


def steps(
    numbers: list[int], n_samples: int = 100, generation: int = 1
) -> list[tuple[float, StepDone]]:
    ids = {k: digest_text(digest(sample_ids(n_samples, 8, 3, step=k - 1))) for k in numbers}
    return [(float(k), StepDone(generation, k, 1.0, 8, 0.1, digest=ids[k])) for k in numbers]
