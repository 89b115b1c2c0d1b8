"""A network with BatchNorm, taken through layouts: losses and running statistics are those of plain
torch that passes the groups of each step one after another, or the whole step at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import Reference, train
from support.worker.chain import job_of, pass_through
from support.worker.worker_pool import Pool

from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box, Layout, StepDone
from elastic.worker.checkpoint import checkpoint_index

RESNET, BATCH, GROUP = load_program(PROGRAMS / "tiny_resnet.py"), 24, 4
CHAIN = [
    Layout(dp_shard=2),
    Layout(pp=2, activation_checkpointing="full"),
    Layout(dp_replicate=2, microbatch_size=4, activation_checkpointing="selective"),
    Layout(dp_shard=2, dp_replicate=2),
]
OF_A_STEP = [Layout(dp_replicate=2), Layout(dp_shard=3, activation_checkpointing="full"), Layout()]


def in_groups(program: Program, group: int) -> Program:
    """Plain torch that passes so many samples after another."""

    def build() -> torch.nn.Module:
        model = program.model()
        whole = model.forward
        model.forward = lambda x: torch.cat([whole(part) for part in x.split(group)])
        model.train = lambda mode=True: model  # what is frozen stays so
        return model

    return replace(program, model=build)


def job(steps: int, **keys: Any) -> dict[str, Any]:
    return job_of("tiny_resnet.py", steps, BATCH) | {"clip_grad_norm": None} | keys


def compare(run: Path, steps: list[StepDone], alone: Reference) -> None:
    assert [e.train_loss for e in steps] == pytest.approx(alone.losses, abs=1e-5)
    stored = checkpoint_index.open_checkpoint(checkpoint_index.find(open_storage(str(run)))[0].uri)
    for name, wanted in alone.model.state_dict().items():
        kind = str(wanted.dtype).removeprefix("torch.")
        got = stored.read(Box(f"model.{name}", (0,) * wanted.ndim, tuple(wanted.shape), kind))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)


def test_groups_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    settings = job(2 * len(CHAIN), batch_norm={"group": GROUP})
    steps = pass_through(pool, settings, tmp_path, CHAIN, every=2, together=GROUP)
    compare(tmp_path, steps, train(in_groups(RESNET, GROUP), settings, settings["steps"]))


def test_a_whole_step_in_a_chain_of_layouts(pool: Pool, tmp_path: Path) -> None:
    settings = job(2 * len(OF_A_STEP), batch_norm="step")
    steps = pass_through(pool, settings, tmp_path, OF_A_STEP, every=2, together=0)
    compare(tmp_path, steps, train(in_groups(RESNET, BATCH), settings, settings["steps"]))


def test_a_loop_that_passes_parts_of_its_batch(pool: Pool, tmp_path: Path) -> None:
    script = str(PROGRAMS / "loop_resnet.py")
    settings = job(6, batch_norm={"group": GROUP}) | {"program": script, "script": script}
    layouts = [Layout(dp_shard=2), Layout(dp_replicate=3), Layout()]
    steps = pass_through(pool, settings, tmp_path, layouts, every=2, together=GROUP)
    compare(tmp_path, steps, train(in_groups(RESNET, GROUP), settings, settings["steps"]))
