"""A stream passes through layouts like any other data: the losses are those of one process that
reads it once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.reference import train
from support.worker.chain import job_of, pass_through
from support.worker.plans import plan
from support.worker.worker_pool import Pool

from elastic.data.order import sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import Job, Layout, Resume, StepDone
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state
from elastic.worker.program.model_profile import fresh_buffers
from elastic.worker.step.loss_scale import profile_of

STEPS, N = 9, 31


class InOrder:
    """What the stream gives, under the ids by which a plain trainer asks for it."""

    def __init__(self, items: Any, job: dict[str, Any]) -> None:
        ids = [
            i
            for step in range(STEPS)
            for i in sample_ids(N_POSITIONS, job["global_batch"], job["seed"], step=step)
        ]
        self.items, self.place = items, {sample: place for place, sample in enumerate(ids)}

    def __len__(self) -> int:
        return N_POSITIONS

    def __getitem__(self, sample: int) -> Any:
        return self.items[self.place[sample] % N]


@pytest.mark.e2e
def test_a_stream_is_read_once_through_three_layouts(pool: Pool, tmp_path: Path) -> None:
    job = job_of("tiny_stream.py", STEPS)
    steps = pass_through(
        pool, job, tmp_path / "run", [Layout(dp_shard=2), Layout(dp_shard=3), Layout(pp=2)], 3
    )
    tiny = load_program(Path(job["program"]).with_name("tiny.py"))
    alone = train(replace(tiny, dataset=lambda: InOrder(tiny.dataset(), job)), job, STEPS)
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    assert len({event.generation for event in steps}) == 3
    assert [event.tokens for event in steps] == alone.tokens
    assert max(abs(event.train_loss - loss) for event, loss in zip(steps, alone.losses)) < 2e-5


@pytest.mark.e2e
def test_weights_are_imported_into_a_job_with_a_stream(pool: Pool, tmp_path: Path) -> None:
    """Nothing is known there of the stream: it passes over what the steps before have used up."""
    job = job_of("tiny_stream.py", 4)
    program, seed = load_program(job["program"]), int(job["seed"])
    (tmp_path / "in").mkdir()
    save_file(
        {name: tensor.detach().clone() for name, tensor in program.model().named_parameters()},
        tmp_path / "in" / "a.safetensors",
    )
    profile = profile_of(program, Job.from_plain(job))
    wanted = ImportRequest(
        profile, seed, at_step=2, buffers=lambda: fresh_buffers(program, seed, profile)
    )
    done = import_state(str(tmp_path / "in"), open_storage(tmp_path / "run"), wanted)
    workers = pool.open(job, tmp_path / "run", n=1)
    pool.enter(plan(5, Layout(), workers, 12, resume=Resume("durable", 2, 0, uri=done["uri"])))
    pool.quiesced(5, 1)
    assert [(event.step, event.skipped) for event in pool.events(StepDone)] == [
        (3, False),
        (4, False),
    ]
    tiny = load_program(Path(job["program"]).with_name("tiny.py")).dataset()
    for event in pool.events(StepDone):
        ids = [position % N for position in range((event.step - 1) * 12, event.step * 12)]
        assert event.tokens == sum(
            int((torch.as_tensor(tiny[i]["target"]) != -100).sum()) for i in ids
        )
