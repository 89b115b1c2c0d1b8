"""A run with Muon for the matrices, through the loss of a node and a notice, on the embedded
cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import BATCH, SEED, SOON_S, job, run
from support.places import PROGRAMS
from support.reference import train_alone

from elastic.program import load_program
from elastic.scenarios.kept_steps import kept
from elastic.types import Job
from elastic.worker.program.job_program import with_job

# the same loss and live change in a pool of workers: tests/worker/state/test_owner_update.py
pytestmark = [pytest.mark.e2e, pytest.mark.whole]
STEPS = 30
SLOW_AND_BARE = f"""
from dataclasses import replace
from elastic.program import load_program
program = replace(load_program({str(PROGRAMS / "tiny_slow.py")!r}), optimizer=None, lr_factor=None)
"""


def test_muon_goes_on_from_a_peer_copy_and_through_a_notice(tmp_path: Path) -> None:
    """Replicas of the values do not hold what owners keep: the loss goes back to a peer copy."""
    optimizer = {"path": "muon+adamw", "lr": 2e-3, "weight_decay": 0.1, "no_decay": ["*norm*"]}
    program = tmp_path / "program.py"
    program.write_text(SLOW_AND_BARE)
    notice = {"at_step": 16, "notice": "any-spot", "deadline_s": SOON_S}
    drill = [{"at_step": 8, "kill": "any-spot"}, notice]
    layout = {"6": "dp_replicate=3,dp_shard=2", "4": "dp_replicate=2,tp=2", "2": "dp_shard=2"}
    more = {"program": str(program), "optimizer": optimizer, "layout": layout}
    summary, lines = run(job(tmp_path, STEPS, drill, **more))
    assert summary["steps"] == STEPS and summary["samples_exact"] is True
    made = [(t["cause"], t["source"]) for t in summary["transitions"]]
    assert made[:3] == [("start", "fresh"), ("loss", "peer"), ("notice", "live")]
    assert all(t["digest_ok"] for t in summary["transitions"] if t["source"] != "fresh")
    given = Job(steps=STEPS, global_batch=BATCH, optimizer=optimizer, seed=SEED)
    settings = {"seed": SEED, "global_batch": BATCH, "clip_grad_norm": 1.0}
    alone = train_alone(with_job(load_program(program), given), settings, STEPS)
    losses = [done.train_loss for _, done in sorted(kept(lines).items())]
    assert losses == pytest.approx(alone, abs=1e-4)
