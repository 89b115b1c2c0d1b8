"""The quickstart job: its files agree with each other, its drill can happen, and its program
learns."""

import math

import pytest
import torch
from support.places import ROOT
from support.reference import build, collate, count_tokens, evaluate, train

from elastic.config.job import JobSpec, load_job
from elastic.config.pool_checks import check_fit
from elastic.program import Program, load_program
from elastic.types import parse_layout

FOLDER = ROOT / "jobs" / "quickstart"


@pytest.fixture(scope="module")
def job() -> JobSpec:
    return load_job(FOLDER)


@pytest.fixture(scope="module")
def program(job: JobSpec) -> Program:
    return load_program(job.program)


def test_layouts_cover_every_size_that_the_drill_leads_to(job: JobSpec, program: Program) -> None:
    check_fit(job, [pool.pool() for pool in job.pools])
    layouts = [parse_layout(text) for text in job.layouts()]
    assert {layout.world_size for layout in layouts} == {6, 4, 2}
    assert any(layout.tp > 1 for layout in layouts) and any(layout.pp > 1 for layout in layouts)
    assert all(job.global_batch % n == 0 for n in range(1, 5)) and job.global_batch % 6 == 0
    assert all(program.tp_limit % layout.tp == 0 for layout in layouts)
    assert max(layout.pp for layout in layouts) <= len(program.model().layers)


def test_the_drill_takes_the_nodes_that_there_are(job: JobSpec) -> None:
    """Played on paper: spot nodes join and leave as the entries say, and a checkpoint lies between
    the loss of both and 0."""
    spot, every = 2, 1
    counts = [every + spot]
    for entry in job.drill:
        taken = len(entry.nodes())
        assert taken <= counts[-1] - 1, f"{entry.plain()} leaves no node"
        spot += 1 if entry.add else -taken
        assert entry.add != "spot" or spot <= 2
        counts.append(every + spot)
    assert [2 * n for n in counts] == [6, 4, 2, 4, 6, 2, 4]
    steps = [entry.at_step for entry in job.drill if entry.at_step is not None]
    assert steps == sorted(steps) and steps[-1] < job.steps
    both = next(entry for entry in job.drill if len(entry.nodes()) > 1)
    assert isinstance(job.durable_every, int) and both.at_step is not None
    # the last copy is complete, and some steps are lost
    assert 0 < both.at_step % job.durable_every < job.durable_every


def test_the_cosine_is_as_long_as_the_job(job: JobSpec, program: Program) -> None:
    assert program.lr_factor is not None
    factors = [program.lr_factor(step) for step in range(job.steps)]
    assert factors.index(max(factors)) < 30 and max(factors) == 1.0
    assert factors[0] > 0 and factors[-1] < 0.06 and all(f > 0 for f in factors)
    assert all(a > b for a, b in zip(factors[30:], factors[31:]))  # it falls to the very end


def test_data_are_python_text_split_by_file(program: Program) -> None:
    assert program.validation is not None
    data, validation = program.dataset(), program.validation()
    assert len(data) > 10 * len(validation) and len(validation) >= 240
    batch = collate(data, range(200))
    assert batch["input"].shape == (200, 128) and batch["input"].dtype == torch.int64
    assert b"import " in bytes(batch["input"].flatten().tolist())


def test_optimizer_takes_the_parts_that_a_stage_has(program: Program) -> None:
    named = [
        ("norm.weight", torch.nn.Parameter(torch.ones(4))),
        ("head.weight", torch.nn.Parameter(torch.ones(4, 4))),
    ]
    for part in (named, named[:1], named[1:]):
        groups = program.optimizer(iter(part)).param_groups
        assert sum(len(group["params"]) for group in groups) == len(part)
        assert all(
            (group["weight_decay"] > 0) == (p.ndim > 1) for group in groups for p in group["params"]
        )


@pytest.mark.slow
def test_size_and_first_loss(job: JobSpec, program: Program) -> None:
    assert build(program, job.seed).embed.weight.detach().std().item() == pytest.approx(
        0.02, rel=0.05
    )
    run = train(program, job.plain() | {"global_batch": 6}, 8)
    assert 1e6 <= sum(p.numel() for p in run.model.parameters()) <= 3e6
    assert run.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert run.losses[-1] < run.losses[0] - 0.5
    assert evaluate(program, run.model, 8) < run.losses[0] - 0.5
    assert count_tokens(program, collate(program.dataset(), range(2))) == 2 * 128


@pytest.mark.slow
def test_sample_is_text_behind_the_prompt(program: Program) -> None:
    model = program.model()
    torch.manual_seed(0)
    assert program.init is not None and program.sample is not None
    program.init(model)
    text = program.sample(model)
    assert text.startswith("    def ") and len(text.encode()) >= 260
