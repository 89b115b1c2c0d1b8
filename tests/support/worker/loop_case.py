"""The job of a script that enters elastic.loop, and its losses through a change of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.loop_reference import train_script_alone
from support.places import PROGRAMS
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.types import Layout, StepDone


def loop_job(name: str = "loop_tiny.py", **more: Any) -> dict[str, Any]:
    """The job of a script whose losses are those of tiny.py."""
    return job_of("tiny.py", **more) | {"script": str(PROGRAMS / name), "args": []}


def losses_agree_when_resized(pool: Pool, folder: Path, script: str, at_step: int) -> None:
    """On shards with unequal shares, and from about that step on more workers: the losses of eight
    steps of one process."""
    workers = pool.open(loop_job(script, steps=8) | {"clip_grad_norm": None}, folder)
    one = plan(1, Layout(dp_shard=2), workers, 12, samples=(8, 4), n_blocks=0)
    pool.enter(one)
    pool.wait(lambda: any(e.step >= at_step for e in pool.events(StepDone)), f"step {at_step}")
    pool.enter(plan(2, Layout(dp_replicate=3), workers, 12, resume=live(one), n_blocks=0))
    pool.quiesced(2, 3)
    alone = train_script_alone(PROGRAMS / script, [], 7, 8)
    assert [e.train_loss for e in pool.events(StepDone)] == pytest.approx(alone, abs=1e-5)
