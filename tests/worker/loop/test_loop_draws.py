"""What a model draws in a script's loop: a run that is resized follows the one that is not, and what
cannot be so is told by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.worker.chain import job_of, pass_through
from support.worker.loop_case import loop_job
from support.worker.plans import live, plan
from support.worker.recovery import recover, start
from support.worker.worker_pool import Pool
from torch import Tensor, nn

import elastic
from elastic.types import Layout, StepDone
from elastic.types.grid import Coordinates
from elastic.worker.equivalence.draw_trial import try_call
from elastic.worker.parallel.activation_checkpointing import checkpoint_blocks
from elastic.worker.parallel.keyed_draws import KeyedDraws, StepDraws, row_keys
from elastic.worker.program.calls import ModelCall, ModelCalls
from elastic.worker.program.loop_program import no_loss

SEQ, D = 6, 4
AT = Coordinates(0, 0, 0, 0, 0)
CHAIN = [
    Layout(dp_shard=3, activation_checkpointing="full"),
    Layout(tp=2, activation_checkpointing="selective"),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=2),
]


def losses(
    pool: Pool, run: Path, *args: str, layouts: list[Layout], steps: int = 14
) -> list[float]:
    job: dict[str, Any] = loop_job("loop_drops.py", steps=steps) | {"args": list(args)}
    every = 3 if len(layouts) > 1 else 1
    return [e.train_loss for e in pass_through(pool, job, run, layouts, every=every)]


@pytest.mark.e2e
@pytest.mark.parametrize("calls", ["whole", pytest.param("twice", marks=pytest.mark.whole)])
def test_a_resized_loop_follows_the_undisturbed_one(pool: Pool, tmp_path: Path, calls: str) -> None:
    how = ("--calls", calls, "--double")
    alone = losses(pool, tmp_path / "one", *how, layouts=[Layout()])
    resized = losses(pool, tmp_path / "many", *how, layouts=CHAIN)
    assert resized == pytest.approx(alone, rel=1e-12)


@pytest.mark.e2e
def test_a_loop_draws_what_a_program_draws(pool: Pool, tmp_path: Path) -> None:
    """Also where it calls its model with parts of the batch."""
    program = pass_through(pool, job_of("tiny_drops.py", 6), tmp_path / "p", [Layout()], every=1)
    for calls in ("whole", "parts"):
        found = losses(
            pool, tmp_path / calls, "--calls", calls, layouts=[Layout(dp_shard=2)], steps=6
        )
        assert found == pytest.approx([e.train_loss for e in program], rel=1e-5)


@pytest.mark.e2e
def test_a_kill_and_a_growth_change_nothing_of_what_is_drawn(pool: Pool, tmp_path: Path) -> None:
    """Steps are done again from peer replicas; a worker that comes later has a model of its own to
    find out about."""
    alone = losses(pool, tmp_path / "one", layouts=[Layout()])
    job: dict[str, Any] = loop_job("loop_drops.py", steps=14)
    workers, first = start(pool, job, tmp_path / "many", Layout(dp_shard=3))
    try:
        pool.wait(lambda: any(e.step >= 5 for e in pool.events(StepDone, 1)), "step 5")
        pool.kill(workers[1])
        survivors = [workers[0], workers[2]]
        second = recover(pool, first, Layout(dp_shard=2), survivors, survivors)
        pool.wait(lambda: any(e.step >= 9 for e in pool.events(StepDone, 2)), "step 9")
        grown = [workers[0], workers[2], workers[3]]
        pool.enter(plan(3, Layout(dp_shard=3), grown, 12, resume=live(second)))
        pool.quiesced(3, 3)
    finally:
        pool.revive()
    found = {e.step: e.train_loss for e in pool.events(StepDone)}
    assert [found[step] for step in range(1, 15)] == pytest.approx(alone, rel=1e-4)


# ------------------------------------------------------------------------------- without any worker


class Drawing(nn.Module):
    """A block that draws by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x).exp() * F.dropout(x, 0.4), 0.4).sin()


PROGRAM = elastic.Program(
    model=lambda: nn.Sequential(Drawing(), Drawing(), nn.Dropout(0.2)), loss=no_loss, blocks="[01]"
)


class Scripted:
    """A script's model in one step of these samples."""

    def __init__(self, ids: list[int], wrap: Callable[[list[nn.Module]], None]) -> None:
        self.said: list[str] = []
        self.draws = KeyedDraws(find=try_call, say=self.said.append)
        self.ids, self.wrap = ids, wrap
        self.again()

    def again(self) -> None:
        """Another generation."""
        self.program = self.draws.of(PROGRAM)
        torch.manual_seed(0)
        self.model = self.program.model()
        self.wrap(list(self.model)[:2])

    def gradients(self, *parts: Tensor, before: tuple[int, ...] = ()) -> list[Tensor]:
        """Of the weights, after calls with these parts of the batch; `before`: rows of calls in
        evaluation mode."""
        step = StepDraws(self.draws, row_keys(1, 1, [self.ids]), [0], 1)
        calls = ModelCalls(len(self.ids), lambda c: step.of_call(c, self.program, self.model))
        with self.draws.step(Layout(), AT, told=True), calls.of(self.model):
            for n in before:
                self.model.eval()
                with torch.no_grad():
                    self.model(torch.ones(n, SEQ, D))
                self.model.train()
            torch.stack([self.model(x).sum() for x in parts]).sum().backward()
        step.check_all(calls)
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def plain(_: list[nn.Module]) -> None:
    """Nothing is computed again."""


X = torch.randn(6, SEQ, D, generator=torch.Generator().manual_seed(3))
IDS = [31, 7, 12, 400, 5, 8]


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_what_is_found_in_the_first_call_draws_inside_of_what_is_around_a_block(how: str) -> None:
    want = Scripted(IDS, plain).gradients(X)
    script = Scripted(IDS, partial(checkpoint_blocks, mode=how))
    for _ in range(2):  # found in the first call; known where the model is built
        torch.testing.assert_close(script.gradients(X), want)
        script.again()
    torch.testing.assert_close(script.gradients(X[:4], X[4:]), want)
    assert not script.said


def test_an_evaluation_of_other_rows_changes_nothing_of_what_is_drawn() -> None:
    want = Scripted(IDS, plain).gradients(X[:4], X[4:])
    script = Scripted(IDS, plain)
    for before in ((4,), (6, 9), (2,)):  # nobody has been told of the model before the first one
        torch.testing.assert_close(script.gradients(X[:4], X[4:], before=before), want)
        script.again()
    # dropout of this model is on in evaluation mode too
    assert all("for the 9 rows that run.model is called with" in line for line in script.said)


def test_a_second_pass_draws_others() -> None:
    script = Scripted(IDS, plain)
    once = script.gradients(X)
    script.again()
    twice = script.gradients(X, X)
    assert not any(torch.allclose(two, 2 * one) for one, two in zip(once, twice, strict=True))


def test_the_scripts_own_random_numbers_stay_what_they_are() -> None:
    script = Scripted(IDS, plain)
    for _ in range(2):
        torch.manual_seed(5)
        script.gradients(X)
        assert float(torch.rand(1)) == float(torch.rand(1, generator=torch.manual_seed(5)))


def test_rows_that_are_not_those_of_the_batch_are_named_once() -> None:
    both = torch.cat([X, X])
    script = Scripted(IDS, partial(checkpoint_blocks, mode="full"))
    torch.manual_seed(1)
    one = script.gradients(both)
    script.again()
    torch.manual_seed(2)
    assert not torch.allclose(script.gradients(both)[0], one[0])  # torch's own numbers
    (line,) = script.said
    assert line.startswith(
        "0 draws (bernoulli_) for the 12 rows that run.model is called with, where the batch "
        "has 6: nobody knows whose they are; call it with the batch"
    )


def test_a_part_of_the_batch_alone_is_named_once() -> None:
    script = Scripted(IDS, plain)
    for _ in range(2):
        script.gradients(X[2:])
        script.again()
    (line,) = script.said
    assert line.startswith("run.model was called with 4 of the 6 samples of a batch, nobody knows")


def test_what_is_drawn_between_the_passes_of_a_program_is_not_told() -> None:
    """A rehearsal draws for no samples; of a script the same is told."""
    script = Scripted(IDS, plain)
    script.gradients(X)
    for told in (False, True):
        with script.draws.step(Layout(), AT, told=told):
            script.model(X)
        assert len(script.said) == told
    assert "draws (bernoulli_) where nobody knows whose samples these are" in script.said[0]


def test_rows_are_found_inside_of_what_the_model_is_called_with() -> None:
    found: list[ModelCall] = []
    calls = ModelCalls(6, lambda call: found.append(call) or nullcontext())  # type: ignore[func-returns-value]
    model = nn.Module()
    model.forward = lambda one, *, more: None  # type: ignore[method-assign]
    with calls.of(model):
        for n in (4, 2, 6):
            model(None, more={"x": X[:n], "mask": torch.ones(3)})
    assert [(call.rows, call.again) for call in found] == [
        (range(4), 0), (range(4, 6), 0), (range(6), 1),
    ]  # fmt: skip
    assert all(list(call.given) == ["0"] for call in found) and not calls.first
