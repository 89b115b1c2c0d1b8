"""What a worker finds out of a program before its first plan is found once for all pools of a test
session: each process would find the same. What it is, is asserted without a pool."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from support.api.traced_once import APART

from elastic.types import Job
from elastic.worker.session import preparation, rehearsal
from elastic.worker.session.workplace import Workplace

VARIABLE = "ELASTIC_TESTS_PREPARED"  # the folder of what was found
KNOWN: dict[str, Any] = {}
# of a job besides, what neither a trace nor a trial reads
PASSED_OVER = APART | {"global_batch": 0, "seed": 0, "eval_every": 0, "eval_samples": 0}


@cache
def folder() -> str:
    """Of this test session."""
    made = tempfile.mkdtemp(prefix="elastic-prepared-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def prepare_once() -> None:
    """In this process of a pool, from now on."""
    profile_of, sample_profile = preparation.profile_of, preparation.sample_profile
    keyed, try_draws = preparation.keyed, rehearsal.try_draws

    def keyed_once(place: Workplace) -> Any:
        rehearsal.try_draws = lambda program, batch: known(
            "draws", place.job, lambda: try_draws(program, batch)
        )
        return keyed(place)

    preparation.keyed = keyed_once
    preparation.profile_of = lambda program, job: known(
        "profile", job, lambda: profile_of(program, job)
    )
    preparation.sample_profile = lambda program, job, sample: known(
        "sample", job, lambda: sample_profile(program, job, sample)
    )


def known(what: str, job: Job, find: Callable[[], Any]) -> Any:
    """By the program's file and the keys of the job; what it raises is not kept."""
    if job.script:
        return find()  # its model is the loop's
    program = Path(job.program).read_text()
    key = sha256(repr((what, job.program, program, replace(job, **PASSED_OVER))).encode())
    kept = Path(os.environ[VARIABLE], key.hexdigest())
    if kept.name not in KNOWN and kept.exists():
        KNOWN[kept.name] = pickle.loads(kept.read_bytes())
    if kept.name not in KNOWN:
        KNOWN[kept.name] = find()
        being_written = kept.with_suffix(f".{os.getpid()}")
        being_written.write_bytes(pickle.dumps(KNOWN[kept.name]))
        being_written.replace(kept)
    return KNOWN[kept.name]
