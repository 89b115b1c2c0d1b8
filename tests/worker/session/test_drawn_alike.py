"""What a program draws while it is built is the same in every process, and a dataset that is another
one there is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.reference import train_alone
from support.worker.chain import job_of
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool

from elastic.data.open_datasets import dataset_of
from elastic.data.sample_draws import SampleDraws
from elastic.program import load_program
from elastic.types import Evaluated, Job, Layout, Plan, StepDone, WorkerFailed
from elastic.worker.program.job_program import with_job

pytestmark = pytest.mark.slow
STEPS = 8
PROGRAM = """
import os, random
import numpy as np
import torch
from torch import nn
import elastic

SHIFT = torch.randn(16)                             # while it is imported

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.salt = random.randrange(1, 1000)       # of Python
        self.turn = np.random.randn(16, 16) / 4     # of numpy, an attribute
        self.plain = torch.randn(16) / 4            # a tensor that is no buffer
        self.register_buffer("waves", torch.randn(16, 16) / 4, persistent=False)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
    def forward(self, ids):
        x = self.embed((ids * self.salt) % 31) + SHIFT.to(self.head.weight)
        x = x + x @ torch.as_tensor(self.turn, dtype=x.dtype)
        return self.head(x + self.plain.to(x) + torch.sin(x @ self.waves))

def init(model):
    for p in model.parameters():
        p.data.copy_(torch.from_numpy(np.random.randn(*p.shape) * random.uniform(0.1, 0.3)))

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.order = ORDER
    def __len__(self):
        return 96
    def __getitem__(self, index):
        ids = (int(self.order[index]) + torch.arange(9) * 3) % 32
        return {"input": ids[:-1], "target": ids[1:]}

def loss(logits, batch):
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["target"].flatten(), reduction="sum"
    )

program = elastic.Program(
    model=Net, init=init, dataset=Rows, loss=loss,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
)
"""


def begun(pool: Pool, folder: Path, order: str, more: str = "") -> tuple[dict[str, Any], Plan]:
    """Two ranks at work on samples in this order. `more`: behind the program."""
    file = folder / "program.py"
    file.write_text(PROGRAM.replace("ORDER", order) + more)
    job = job_of(str(file), steps=STEPS) | {"n_samples": 96}
    workers = pool.open(job, folder / "run", n=2)
    first = plan(1, Layout(dp_replicate=2), workers, job["global_batch"], n_blocks=0)
    pool.enter(first)
    return job, first


def test_each_rank_draws_what_one_process_draws(pool: Pool, tmp_path: Path) -> None:
    job, first = begun(pool, tmp_path, "np.random.permutation(96)")
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    second = plan(2, Layout(), list(first.ranks), 12, resume=live(first), n_blocks=0)
    pool.enter(second)
    pool.wait(lambda: any(e.step == STEPS for e in pool.events(StepDone)), "the last step")
    assert not pool.events(WorkerFailed)
    program, plain = load_program(job["program"]), Job.from_plain(job)
    opened = dataset_of(program, plain)
    alone = train_alone(replace(with_job(program, plain), dataset=lambda: opened), job, STEPS)
    losses = {e.step: e.train_loss for e in pool.events(StepDone)}
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(alone, rel=1e-5)


class ReadInTurn:
    """A dataset for one process, whose samples of a step are read one after the other."""

    def __init__(self, dataset: Any, job: dict[str, Any]) -> None:
        self.dataset, self.draws = dataset, SampleDraws(job["seed"])
        self.n, self.n_read = job["global_batch"], 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> Any:
        step, self.n_read = self.n_read // self.n, self.n_read + 1
        return self.draws.item(self.dataset, sample, step=step)


AUGMENTED = """
import random
import numpy as np
import torch
from torch import nn
import elastic

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        x = torch.sin(torch.arange(16.0) * index)
        if random.random() < 0.5:
            x, index = x.flip(0), index + 1  # so the target is drawn as well
        x = torch.roll(x, int(torch.randint(16, ()))) + 0.1 * torch.randn(16)
        return {"input": x * np.random.uniform(0.5, 2), "target": torch.tensor(index % 8)}

def loss(logits, batch):
    return nn.functional.cross_entropy(logits, batch["target"], reduction="sum")

program = elastic.Program(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), DROP, nn.Linear(32, 8)),
    dataset=Rows, validation=Rows, loss=loss,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.5),
)
"""


def augmented(folder: Path, drop: str, **more: Any) -> dict[str, Any]:
    file = folder / "program.py"
    file.write_text(AUGMENTED.replace("DROP", drop))
    return job_of(str(file), steps=STEPS) | {"n_samples": 96} | more


def losses_of(
    pool: Pool, job: dict[str, Any], run: Path, layouts: list[Layout], *, n_blocks: int = 0
) -> list[float]:
    """Of each step, through these layouts, each from its part of the steps on."""
    workers = pool.open(job, run, n=max(layout.world_size for layout in layouts))
    plans: list[Plan] = []
    for i, layout in enumerate(layouts):
        resume = {"resume": live(plans[-1])} if plans else {}
        plans.append(plan(i + 1, layout, workers, job["global_batch"], n_blocks=n_blocks, **resume))
        pool.enter(plans[-1])
        wanted = STEPS * (i + 1) // len(layouts) - (layout is not layouts[-1])
        pool.wait(lambda: any(e.step >= wanted for e in pool.events(StepDone)), "a step")  # noqa: B023
    assert not pool.events(WorkerFailed)
    losses = {e.step: e.train_loss for e in pool.events(StepDone)}
    return [losses[step] for step in range(1, STEPS + 1)]


RESIZED = [Layout(dp_replicate=2), Layout(dp_shard=3)]


@pytest.mark.parametrize("n_processes", [0, 1])
def test_samples_that_are_augmented_are_those_of_one_process(
    pool: Pool, tmp_path: Path, n_processes: int
) -> None:
    """Read by the worker itself or by loader processes, through a change of the layout."""
    job = augmented(tmp_path, "nn.Identity()", data={"loader_workers": n_processes})
    losses = losses_of(pool, job, tmp_path / "run", RESIZED)
    program, plain = load_program(job["program"]), Job.from_plain(job)
    read = ReadInTurn(dataset_of(program, plain), job)
    alone = train_alone(replace(with_job(program, plain), dataset=lambda: read), job, STEPS)
    assert losses == pytest.approx(alone, rel=1e-5)


IN_BLOCKS = """
import dataclasses

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 8)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

tp = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
program = dataclasses.replace(program, model=Net, tp=tp)
"""


@pytest.mark.e2e
def test_ranks_that_share_samples_read_them_alike(pool: Pool, tmp_path: Path) -> None:
    """Those of tp the whole sample each, the first stage of pp its input, the last its target."""
    job = augmented(tmp_path, "nn.Identity()")
    Path(job["program"]).write_text(Path(job["program"]).read_text() + IN_BLOCKS)
    alone = losses_of(pool, job, tmp_path / "alone", [Layout()], n_blocks=4)
    layouts = [Layout(tp=2), Layout(pp=2), Layout(dp_shard=2, tp=2)]
    losses = losses_of(pool, job, tmp_path / "run", layouts, n_blocks=4)
    assert losses == pytest.approx(alone, rel=1e-5)


def test_a_model_and_its_samples_draw_at_the_same_time(pool: Pool, tmp_path: Path) -> None:
    """The model in the training thread, samples beside it and between steps those of a validation:
    none meets another's numbers."""
    job = augmented(tmp_path, "nn.Dropout(0.2)", eval_every=1, eval_samples=12)
    alone = losses_of(pool, job | {"eval_every": 0}, tmp_path / "alone", [Layout()])
    losses = losses_of(pool, job, tmp_path / "run", RESIZED)
    assert losses == pytest.approx(alone, rel=1e-5)
    validated = [e.metrics["validation_loss"] for e in pool.events(Evaluated)]
    assert len(set(validated)) == len(validated) >= STEPS - 1


def test_a_dataset_that_is_another_one_in_each_process_makes_no_step(
    pool: Pool, tmp_path: Path
) -> None:
    begun(pool, tmp_path, "np.random.default_rng(os.getpid()).permutation(96)")
    pool.wait(lambda: len(pool.events(WorkerFailed)) == 2, "failure")
    failed = pool.events(WorkerFailed)
    assert {e.kind for e in failed} == {"program"} and not pool.events(StepDone)
    # of two orders one place in 96 holds the same sample by chance
    assert re.search("ranks read other values as sample (0|48|95) of the dataset", failed[0].error)


STREAM = """
class Endless:
    def __init__(self):
        self.rows, self.at = Rows(), 0
    def __iter__(self):
        while True:
            self.at += 1
            yield {**self.rows[self.at % 96], "who": torch.tensor(WHO)}
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

import dataclasses
program = dataclasses.replace(program, dataset=Endless)
"""


def test_a_stream_that_is_another_one_in_each_process_makes_no_step(
    pool: Pool, tmp_path: Path
) -> None:
    begun(pool, tmp_path, "range(96)", STREAM.replace("WHO", "os.getpid()"))
    pool.wait(lambda: len(pool.events(WorkerFailed)) == 2, "failure")
    failed = pool.events(WorkerFailed)
    assert {e.kind for e in failed} == {"program"} and not pool.events(StepDone)
    assert "ranks read other values as the first sample of the stream" in failed[0].error


def test_a_stream_that_draws_gives_every_process_the_same(pool: Pool, tmp_path: Path) -> None:
    begun(pool, tmp_path, "range(96)", STREAM.replace("WHO", "random.randrange(1 << 30)"))
    pool.wait(lambda: any(e.step == STEPS for e in pool.events(StepDone)), "the last step")
    assert not pool.events(WorkerFailed)
