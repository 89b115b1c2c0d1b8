"""One set of processes passes through a chain of layouts; the loss is that of one process, and so is the state at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plans import live, plan
from reference import Reference, train
from worker_pool import Pool

from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box, Layout, Plan, Resume, ShardStored, StepDone
from elastic.worker import durable

PROGRAMS = Path(__file__).parent.parent / "programs"
CHAIN = [
    Layout(dp_shard=4), Layout(pp=2, tp=2), Layout(dp_shard=3), Layout(pp=2, dp_shard=2),
    Layout(tp=2), Layout(dp_shard=1), Layout(dp_shard=2, tp=2),
]  # fmt: skip


def job_of(program: str, steps: int, global_batch: int = 12) -> dict[str, Any]:
    return {
        "name": "test", "program": str(PROGRAMS / program), "steps": steps, "global_batch": global_batch, "seed": 7,
        "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
    }  # fmt: skip


def pass_through(pool: Pool, job: dict[str, Any], run: Path, layouts: list[Layout], every: int) -> list[StepDone]:
    """Enter each layout in turn, live from the one before, after about `every` steps each; the last runs to the end."""
    workers = pool.open(job, run)
    plans: list[Plan] = []
    for i, layout in enumerate(layouts):
        resume = live(plans[-1]) if plans else Resume()
        plans.append(plan(i + 1, layout, workers, job["global_batch"], resume=resume))
        pool.enter(plans[-1])
        pool.entered(i + 1)
        target = every * (i + 1)
        pool.wait(lambda: any(e.step >= target for e in pool.events(StepDone)), f"step {target}")  # noqa: B023
    pool.quiesced(len(layouts), len(plans[-1].ranks))
    pool.wait(lambda: len(pool.events(ShardStored)) == len(plans[-1].ranks), "the last durable copy")
    durable.commit(open_storage(str(run)), job["steps"], len(layouts), len(plans[-1].ranks), 1, {})
    return pool.events(StepDone)


def check(job: dict[str, Any], run: Path, steps: list[StepDone], tolerance: float, program: Program | None = None) -> Reference:
    """`program`: what the plain process trains, where that is another. Returns what that has left."""
    program = program or load_program(job["program"])
    alone = train(program, job, job["steps"])
    assert [e.step for e in steps] == list(range(1, job["steps"] + 1)), "a step was lost or done twice"
    assert len({e.generation for e in steps}) == max(e.generation for e in steps)
    worst = max(abs(e.train_loss - loss) for e, loss in zip(steps, alone.losses, strict=True))
    assert worst < tolerance, f"train loss is off by {worst}"
    assert [e.tokens for e in steps] == alone.tokens
    checkpoint = durable.open_checkpoint(durable.find(open_storage(str(run)))[0].uri)
    for name, parameter in alone.model.named_parameters():
        state = alone.state_of(parameter)
        wanted = {f"model.{name}": parameter, f"optim.step.{name}": state["step"]}
        wanted |= {f"optim.{entry}.{name}": state[entry] for entry in ("exp_avg", "exp_avg_sq")}
        for fqn, tensor in wanted.items():
            shape = tuple(tensor.shape)
            got = checkpoint.read(Box(fqn, (0,) * len(shape), shape, "float32"))
            torch.testing.assert_close(got, tensor.detach(), atol=2e-4, rtol=1e-3, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
    return alone


@pytest.mark.slow
def test_chain_of_layouts_twice(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny.py", steps=30)
    pids = list(pool.pids)
    steps = pass_through(pool, job, tmp_path, CHAIN + CHAIN, every=2)
    check(job, tmp_path, steps, 1e-4)
    assert pool.pids == pids
    assert all(process.is_alive() for process in pool.processes)
    for generation in range(2, 2 * len(CHAIN) + 1):
        parts = pool.digests(generation)
        assert sum(p.before for p in parts if p.before is not None) % 2**64 == sum(p.after for p in parts if p.after) % 2**64
