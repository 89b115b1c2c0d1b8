"""The job `dpo`: a policy beside a frozen reference, through a notice and a kill, against one process;
and of the reference nothing is in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.places import ROOT
from support.reference import Reference, collate, output_of, train
from support.worker.chain import job_of
from support.worker.faults import Fault
from support.worker.faulty_pool import FaultyPool
from support.worker.phased import PhasedDriver
from support.worker.plans import plan

from elastic.data.order import sample_ids
from elastic.program import Program, load_program
from elastic.types import Box, Layout, StepDone
from elastic.worker.checkpoint import checkpoint_index

pytestmark = [pytest.mark.slow, pytest.mark.whole]
STEPS, BATCH, N_BLOCKS = 7, 8, 2


@pytest.fixture
def pool() -> Iterator[FaultyPool]:
    pool = FaultyPool(4)
    yield pool
    pool.close()


@torch.no_grad()
def from_file(program: Program, model: torch.nn.Module) -> None:
    """The first weights, as one process reads them: both towers have the same."""
    assert program.weights is not None
    values = load_file(str(program.weights.path))
    for name, parameter in model.named_parameters():
        parameter.copy_(values[program.weights.name(name)])


def test_losses_and_accuracy_are_those_of_one_process(pool: FaultyPool, tmp_path: Path) -> None:
    job = job_of("tiny.py", STEPS, BATCH) | {"program": str(ROOT / "jobs/dpo/program.py")}
    at = {2: lambda driver: driver.notice(3)}
    driver = PhasedDriver(pool, job, tmp_path, Layout(dp_shard=4), at)
    layout = Layout(dp_replicate=2, dp_shard=2)
    driver.first = plan(1, layout, driver.workers, BATCH, peer_every=2, n_blocks=N_BLOCKS)
    pool.arm(driver.workers[1], Fault("before", 5, "commit"))
    driver.run()
    program = load_program(job["program"])
    accuracies: list[float] = []
    plain = replace(program, init=lambda model: from_file(program, model))
    before = _accuracies(plain, job, accuracies)
    alone = train(plain, job, STEPS, after_step=before)
    last = {e.step: e for e in sorted(driver.told(StepDone), key=lambda e: e.generation)}
    assert [last[s].train_loss for s in sorted(last)] == pytest.approx(alone.losses, abs=2e-5)
    assert [last[s].logged["accuracy"] for s in sorted(last)][1:] == accuracies[: STEPS - 1]
    assert [e.tokens for e in last.values()] == [BATCH] * STEPS, "pairs are counted"
    assert {p.cause for p in driver.plans} == {"start", "notice", "loss"}
    _holds_the_policy_alone(driver.state.durable[0].uri, alone)


def _accuracies(program: Program, job: dict[str, object], found: list[float]):
    """Notes that of the step to come, before its update."""

    def after_step(step: int, run: Reference) -> None:
        dataset = program.dataset()  # type: ignore[misc]
        ids = sample_ids(len(dataset), BATCH, int(job["seed"]), step=step)  # type: ignore[call-overload]
        batch = collate(dataset, ids)
        with torch.no_grad():
            sums = program.log(output_of(program, run.model, batch), batch)  # type: ignore[misc]
        found.append(float(sums["accuracy"]) / BATCH)

    return after_step


def _holds_the_policy_alone(uri: str, alone: Reference) -> None:
    stored = checkpoint_index.open_checkpoint(uri)
    assert not [name for name in stored.tensors if "reference" in name]
    for name, parameter in alone.model.named_parameters():
        if "reference" in name:
            assert not parameter.requires_grad
            continue
        shape = tuple(parameter.shape)
        got = stored.read(Box(f"model.{name}", (0,) * len(shape), shape, "float32"))
        torch.testing.assert_close(got, parameter.detach(), atol=2e-4, rtol=1e-3)
        assert f"optim.exp_avg.{name}" in stored.tensors
