"""Options that have tests of their own, two at a time: the same steps in a chain of layouts as on
one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reference import train
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.planner.layout_choice import plan_layout
from elastic.program import load_program
from elastic.types import Job, Layout, Node, StepDone
from elastic.worker.profile.sample_profile import sample_profile
from elastic.worker.step.loss_scale import profile_of

pytestmark = pytest.mark.slow
STEPS = 18
OFFLOADED = [
    Layout(dp_shard=2, offload=True),
    Layout(pp=2, tp=2),
    Layout(dp_shard=3),
    Layout(dp_shard=2, cp=2, offload=True),
]
BUDGETED = [Layout(dp_shard=3), Layout(tp=2, dp_shard=2), Layout(dp_shard=2, cp=2)]


def on_one_rank(pool: Pool, job: dict[str, Any], folder: Path) -> list[StepDone]:
    return list(pass_through(pool, job, folder / "one", [Layout()], every=1))


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_two_optimizers(pool: Pool, tmp_path: Path, precision: str) -> None:
    """With parameters and both optimizers' state in host memory, and where steps overflow."""
    job = job_of("tiny_half_two.py" if precision == "float16" else "tiny_two.py", STEPS) | {
        "precision": precision
    }
    job |= {"seed": 7 if precision == "float16" else 11}
    want = on_one_rank(pool, job, tmp_path)
    got = pass_through(pool, job, tmp_path / "many", OFFLOADED, every=3)
    assert [e.step for e in got] == list(range(1, STEPS + 1))
    assert [e.step for e in got if e.skipped] == [e.step for e in want if e.skipped]
    assert any(e.skipped for e in want) == (precision == "float16")
    near = 2e-3 if precision == "float16" else 1e-4
    assert [e.train_loss for e in got] == pytest.approx([e.train_loss for e in want], rel=near)


COMPILED = pytest.param({"compile": True}, marks=pytest.mark.whole)


@pytest.mark.whole
@pytest.mark.parametrize("more", [{"precision": "float16"}, COMPILED], ids=str)
def test_token_budgets(pool: Pool, tmp_path: Path, more: dict[str, Any]) -> None:
    job = job_of("tiny_unequal.py", STEPS) | {"microbatch_tokens": 28} | more
    layouts = (
        [Layout(dp_shard=3), Layout(dp_replicate=2, dp_shard=2)] if "compile" in more else BUDGETED
    )
    want = on_one_rank(pool, job, tmp_path)
    got = pass_through(pool, job, tmp_path / "many", layouts, every=4)
    assert [e.tokens for e in got] == [e.tokens for e in want]
    assert [e.step for e in got if e.skipped] == [e.step for e in want if e.skipped]
    assert [e.train_loss for e in got] == pytest.approx([e.train_loss for e in want], rel=2e-3)
    assert want[-1].train_loss < want[0].train_loss


@pytest.mark.whole
@pytest.mark.parametrize("name", ["tiny.py", "hf_tiny.py"])
def test_auto_cuts_the_sequence_of_a_single_sample(pool: Pool, tmp_path: Path, name: str) -> None:
    """With one sample a step nothing else is left to share; the layouts that the planner takes are
    entered."""
    job = job_of(name, 8, global_batch=1) | {"layout": "auto"}
    program = load_program(job["program"])
    assert program.dataset is not None
    profile = replace(
        profile_of(program, Job.from_plain(job)),
        sample=sample_profile(program, Job.from_plain(job), program.dataset()[0]),
    )
    layouts = [
        plan_layout(profile, Job.from_plain(job), [Node("node", "pool", gpus)]).layout
        for gpus in (2, 4)
    ]
    assert layouts[0].cp == 2 and layouts[1].cp * layouts[1].tp == 4
    steps = pass_through(pool, job, tmp_path, layouts, every=3)
    alone = train(program, job, job["steps"])
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, abs=1e-4)
    assert [e.grad_norm for e in steps] == pytest.approx(alone.grad_norms, rel=1e-3)
