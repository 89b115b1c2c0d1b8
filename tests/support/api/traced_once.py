"""A model that several tests plan with is traced once: what its trace says is asserted in
tests/worker/equivalence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.program import Program
from elastic.types import Job

if TYPE_CHECKING:
    import pytest

KNOWN: dict[object, Any] = {}
# of a job, what no trace reads
APART = {
    "name": "", "folder": "", "program": "", "steps": 0, "storage": None, "pools": (),
    "budget_usd": None, "deadline_h": None, "max_nodes": None, "min_workers": 1,
    "max_workers": None, "purpose": "auto", "on_demand_floor": "auto", "head_usd_per_h": 0.0,
    "trackers": {}, "fingerprint": None, "drill": (),
}  # fmt: skip


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone."""
    from elastic.worker.equivalence import job_numbers

    for name in ("model_profile_of", "structure_of_job"):
        patch.setattr(job_numbers, name, once(getattr(job_numbers, name)))


def once(traced: Callable[[Program, Job], Any]) -> Callable[[Program, Job], Any]:
    """By the code in the job's folder and the keys of the job; what it raises is not kept."""

    def known(program: Program, job: Job) -> Any:
        code = tuple(file.read_text() for file in sorted(Path(job.program).parent.glob("*.py")))
        where = job.folder if job.data.train else ""  # its data may lie there
        key = (traced.__name__, code, where, repr(replace(job, **APART)))
        if not code:
            return traced(program, job)
        if key not in KNOWN:
            KNOWN[key] = traced(program, job)
        return KNOWN[key]

    return known
