"""Schedules at their boundaries."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.program import Program
from elastic.types import Job, LrCurve
from elastic.worker.program.job_program import with_job
from elastic.worker.program.schedules import scale, schedule


def factors(steps: int, kind: str, **keys: Any) -> list[float]:
    factor = schedule(LrCurve(kind, **keys), steps)  # type: ignore[arg-type]
    return [round(factor(step), 6) for step in range(steps + 2)]


def test_warm_up_ends_at_one_and_never_begins_at_zero() -> None:
    for kind in ("constant", "linear", "cosine", "wsd"):
        found = factors(100, kind, warmup_steps=4)
        assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0], kind
    assert factors(5, "constant") == [1.0] * 7


def test_linear_and_cosine_end_at_their_least_factor() -> None:
    assert factors(8, "linear", decay_steps=4, min_factor=0.2) == [
        1.0,
        0.8,
        0.6,
        0.4,
        0.2,
        0.2,
        0.2,
        0.2,
        0.2,
        0.2,
    ]
    assert factors(6, "linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors(4, "cosine", min_factor=0.5) == [1.0, 0.926777, 0.75, 0.573223, 0.5, 0.5]
    assert factors(4, "cosine")[2] == 0.5


def test_wsd_is_stable_and_falls_in_the_last_steps() -> None:
    assert factors(10, "wsd", warmup_steps=2, decay_steps=4, min_factor=0.1) == [
        0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1,
    ]  # fmt: skip
    assert factors(20, "wsd")[17:] == [1.0, 1.0, 0.5, 0.0, 0.0], "a tenth of the job by default"


def test_a_warm_up_as_long_as_the_job_does_not_decay() -> None:
    assert factors(4, "cosine", warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("rule", "base", "factor"),
    [("none", 8, 1.0), ("linear", 8, 4.0), ("sqrt", 8, 2.0), ("linear", 64, 0.5)],
)
def test_rates_follow_the_batch(rule: str, base: int, factor: float) -> None:
    assert scale(rule, 32, base) == factor and scale(rule, 32, None) == 1.0


def test_phases_scale_the_schedule_or_have_their_own() -> None:
    plain = {
        "steps": 12, "global_batch": 4, "lr_schedule": {"kind": "linear"}, "lr_scaling": "linear",
        "base_global_batch": 4, "phases": [
            {"from_step": 4, "global_batch": 8}, {"from_step": 6, "lr_factor": 0.5},
            {"from_step": 8, "lr_schedule": {"kind": "constant", "warmup_steps": 2}},
        ],
    }  # fmt: skip
    whole = factors(12, "linear")
    want = [*whole[:4], *(2 * f for f in whole[4:6]), *(f / 2 for f in whole[6:8]), 0.5, 1, 1, 1]
    bare = Program(model=dict, optimizer=dict, loss=max)
    for phase in (0, 2):
        found = with_job(bare, Job.from_plain({**plain, "phase": phase})).lr_factor
        assert found is not None
        assert [found(step) for step in range(12)] == pytest.approx(want, abs=1e-6)
