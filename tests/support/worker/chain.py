"""A job of the pool, taken through a chain of layouts and compared with a plain process that trains
the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.places import PROGRAMS
from support.reference import Reference, train
from support.worker.plans import N_BLOCKS, live, plan
from support.worker.worker_pool import Pool

from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box, Layout, Plan, Resume, ShardStored, StepDone
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer


def job_of(program: str, steps: int, global_batch: int = 12) -> dict[str, Any]:
    return {
        "name": "test", "program": str(PROGRAMS / program), "steps": steps,
        "global_batch": global_batch, "seed": 7, "eval_every": 0, "eval_samples": 4,
        "clip_grad_norm": 1.0,
    }  # fmt: skip


def pass_through(
    pool: Pool,
    job: dict[str, Any],
    run: Path,
    layouts: list[Layout],
    every: int,
    n_blocks: int = N_BLOCKS,
    **more: Any,
) -> list[StepDone]:
    """Enter each layout in turn, live from the one before, after about `every` steps each; the last
    runs to the end. `more`: of `plan`."""
    workers = pool.open(job, run, n=max(layout.world_size for layout in layouts))
    plans: list[Plan] = []
    for i, layout in enumerate(layouts):
        resume = live(plans[-1]) if plans else Resume()
        plans.append(
            plan(
                i + 1, layout, workers, job["global_batch"], resume=resume, n_blocks=n_blocks,
                **more,
            )
        )  # fmt: skip
        pool.enter(plans[-1])
        pool.entered(i + 1)
        target = every * (i + 1)
        pool.wait(lambda: any(e.step >= target for e in pool.events(StepDone)), f"step {target}")  # noqa: B023
    pool.quiesced(len(layouts), len(plans[-1].ranks))
    # on a busy machine the layout before may have come to the end, too, and stored it
    pool.wait(
        lambda: len(pool.events(ShardStored, len(layouts))) == len(plans[-1].ranks),
        "the last checkpoint",
    )
    checkpoint_writer.commit(
        open_storage(str(run)),
        job["steps"],
        len(layouts),
        world_size=len(plans[-1].ranks),
        epoch=1,
        meta={},
    )
    return pool.events(StepDone)


def check(
    job: dict[str, Any],
    run: Path,
    steps: list[StepDone],
    tolerance: float,
    program: Program | None = None,
) -> Reference:
    """`program`: what the plain process trains, where that is another. Returns what that has
    left."""
    program = program or load_program(job["program"])
    alone = train(program, job, job["steps"])
    assert [e.step for e in steps] == list(range(1, job["steps"] + 1)), (
        "a step was lost or done twice"
    )
    assert len({e.generation for e in steps}) == max(e.generation for e in steps)
    worst = max(abs(e.train_loss - loss) for e, loss in zip(steps, alone.losses, strict=True))
    assert worst < tolerance, f"train loss is off by {worst}"
    assert [e.tokens for e in steps] == alone.tokens
    check_stored(checkpoint_index.find(open_storage(str(run)))[0].uri, alone)
    return alone


def check_stored(uri: str, alone: Reference) -> None:
    """The state of a checkpoint is that of the plain process."""
    checkpoint = checkpoint_index.open_checkpoint(uri)
    for name, parameter in alone.model.named_parameters():
        state = alone.state_of(parameter)
        wanted = {f"model.{name}": parameter, f"optim.step.{name}": state["step"]}
        wanted |= {f"optim.{entry}.{name}": state[entry] for entry in ("exp_avg", "exp_avg_sq")}
        for fqn, tensor in wanted.items():
            shape = tuple(tensor.shape)
            got = checkpoint.read(Box(fqn, (0,) * len(shape), shape, "float32"))
            torch.testing.assert_close(
                got, tensor.detach(), atol=2e-4, rtol=1e-3, msg=lambda m, fqn=fqn: f"{fqn}: {m}"
            )
