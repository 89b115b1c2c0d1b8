"""The loss scale: when it changes, and what it is part of."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.chain import job_of

from elastic.program import load_program
from elastic.reshard.rank_boxes import LOSS_SCALE, RNG, owned_boxes
from elastic.types import Job, Layout
from elastic.worker.program.commit import Commit, step_done
from elastic.worker.step.loss_scale import (
    GROWTH_STEPS,
    LARGEST,
    SMALLEST,
    LossScale,
    fresh_scale,
    profile_of,
)
from elastic.worker.step.optimizer_step import Pending, Stepper


def box(scale: float = 0.0, good: float = 0.0) -> torch.Tensor:
    return torch.tensor([scale, good], dtype=torch.float64)


@pytest.mark.parametrize(
    ("n_tokens", "first"), [(1, 2.0**16), (1000, 64.0), (1 << 20, 2.0**-4), (0, 2.0**16)]
)
def test_the_first_scale_is_a_power_of_two_that_fits_the_sum(n_tokens: int, first: float) -> None:
    scale = LossScale(box())
    scale.begin(n_tokens)
    assert scale.value == first
    scale.begin(1)
    assert scale.value == first, "only a run that begins chooses it"


def test_it_halves_when_gradients_overflow_and_doubles_after_many_good_steps() -> None:
    scale = LossScale(box(8.0))
    for _ in range(GROWTH_STEPS - 1):
        scale.after(False)
    assert scale.value == 8.0
    scale.after(False)
    assert scale.box.tolist() == [16.0, 0.0]
    scale.after(False)
    scale.after(True)
    assert scale.box.tolist() == [8.0, 0.0]


def test_its_bounds() -> None:
    scale = LossScale(box(LARGEST, GROWTH_STEPS - 1))
    scale.after(False)
    assert scale.value == LARGEST
    scale = LossScale(box(SMALLEST * 2))
    assert not scale.exhausted
    scale.after(True)
    scale.after(True)
    assert scale.value == SMALLEST and scale.exhausted


def test_without_a_box_nothing_is_scaled() -> None:
    scale = LossScale(None)
    scale.begin(5)
    scale.after(True)
    assert (scale.value, scale.on) == (1.0, False)


def test_it_is_a_box_of_the_state_in_float16_only() -> None:
    job = job_of("tiny.py", 1)
    program = load_program(Path(job["program"]))
    for precision, there in (("float32", False), ("bfloat16", False), ("float16", True)):
        profile = profile_of(program, Job.from_plain(job | {"precision": precision}))
        owned = [
            b.fqn
            for rank in range(4)
            for b in owned_boxes(profile, Layout(pp=2, tp=2), (2, 2), rank)
        ]
        assert owned.count(LOSS_SCALE) == there and owned.count(RNG) == 1
        assert bool(fresh_scale(Job.from_plain(job | {"precision": precision}))) == there


def test_the_journal_tells_a_skipped_step() -> None:
    good, bad = (Commit(0.0, 6.0, 3.0, (1, 2), overflowed) for overflowed in (False, True))
    assert step_done(1, 5, bad).skipped and not step_done(1, 5, good).skipped
    assert bad.finite and bad.train_loss == 2.0


@pytest.mark.parametrize("overflowed", [False, True])
def test_a_step_that_overflowed_on_some_rank_is_applied_on_none(overflowed: bool) -> None:
    """This rank's own gradients are good ones; the commit says that another's are not."""
    done: list[str] = []
    state = SimpleNamespace(
        step=1,
        skip=lambda: done.append("skipped"),
        apply=lambda *_: done.append("applied"),
        reached=SimpleNamespace(without=lambda gradients, _: gradients),
    )
    stepper: Any = Stepper.__new__(Stepper)
    stepper.pending, stepper.state, stepper.clip_grad_norm = Pending(1, {}, 2.0, 1.0), state, None
    stepper.trip, stepper.done = None, deque()
    stepper.loss_scale = SimpleNamespace(
        value=4.0, after=lambda was: done.append(f"scale heard {was}")
    )
    stepper._apply(Commit(1.0, 2.0, 8.0, overflowed=overflowed))
    assert done == (
        ["skipped", "scale heard True"] if overflowed else ["applied", "scale heard False"]
    )
    assert stepper.pending is None
    assert list(stepper.done) == [(1, (1.0, 2.0, 8.0, 0.0, 0.0, float(overflowed)))]
