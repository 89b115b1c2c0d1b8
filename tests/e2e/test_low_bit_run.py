"""A run with adapters on weights of 4 bits, through a notice and a growth, on the embedded cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import BATCH, SEED, SOON_S, job, run
from support.places import PROGRAMS
from support.reference import train_alone

from elastic.models.nf4 import in_nf4
from elastic.program import load_program
from elastic.scenarios.kept_steps import kept

# losses and live changes in a pool of workers: tests/worker/session/test_low_bit_chain.py
pytestmark = [pytest.mark.e2e, pytest.mark.whole]
torchao = pytest.importorskip("torchao", reason="it is in the extra 'test'")
STEPS = 60
SLOW = f"""
import time
from dataclasses import replace
import torch
from elastic.program import load_program

base = load_program({str(PROGRAMS / "tiny_qlora.py")!r})


def optimizer(named):
    # small: rounding must not grow into another run
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


def loss(output, batch):
    time.sleep(0.2)
    return base.loss(output, batch)


program = replace(base, loss=loss, optimizer=optimizer)
"""


def test_a_run_with_adapters_on_4_bits_shrinks_and_grows(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SLOW)
    drill = [
        {"at_step": 4, "notice": "any-spot", "deadline_s": SOON_S},
        {"at_step": 10, "add": "spot"},
    ]
    layout = {"6": "dp_shard=3,tp=2", "4": "dp_shard=2,tp=2", "2": "pp=2"}
    more = {"program": str(program), "frozen_weights": "nf4", "layout": layout}
    summary, lines = run(job(tmp_path, STEPS, drill, **more))
    assert summary["steps"] == STEPS and summary["samples_exact"] is True
    made = [(t["cause"], t["source"]) for t in summary["transitions"]]
    assert made == [("start", "fresh"), ("notice", "live"), ("growth", "live")]
    assert all(t["digest_ok"] for t in summary["transitions"][1:])
    settings = {"seed": SEED, "global_batch": BATCH, "clip_grad_norm": 1.0}
    alone = train_alone(in_nf4(load_program(program)), settings, STEPS)
    losses = [done.train_loss for _, done in sorted(kept(lines).items())]
    assert losses == pytest.approx(alone, abs=1e-4)
