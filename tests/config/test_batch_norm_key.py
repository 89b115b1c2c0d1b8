"""The key `batch_norm` of job.yaml: what it may be, and what is said of what it may not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.config.job import job_of
from elastic.errors import SpecError
from elastic.types import Job
from elastic.types.typed_job import group_of


def job(value: Any, **more: Any) -> Job:
    data = {"steps": 2, "global_batch": 24, "batch_norm": value, **more}
    return job_of(data, Path("program.py")).job()


@pytest.mark.parametrize(
    ("value", "group"), [({"group": 6}, 6), ("step", 0), ("auto", 8), ("microbatch", None)]
)
def test_what_it_may_be(value: Any, group: int | None) -> None:
    found = job(value)
    assert group_of(found) == group
    assert Job.from_plain(found.plain()) == found and found.plain()["batch_norm"] == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"group": 5}, "batch_norm: group 5 does not divide global_batch 24; take 3, 4, 6"),
        ({"group": 1}, "key 'batch_norm.group': input should be greater than 1"),
        ({"group": 0}, "key 'batch_norm.group': input should be greater than 1"),
        ({"groups": 4}, "unknown key 'batch_norm.groups'; did you mean 'group'?"),
        ({}, "key 'batch_norm.group'"),
        ("steps", "key 'batch_norm': must be {group: 16} (so many samples have statistics"),
        (16, "auto, step, microbatch, not 16"),
        (None, "auto, step, microbatch, not"),
    ],
)
def test_what_it_may_not_be(value: Any, said: str) -> None:
    with pytest.raises(SpecError) as error:
        job(value)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_with_a_budget_of_tokens() -> None:
    with pytest.raises(SpecError, match="batch_norm and microbatch_tokens do not go together"):
        job("step", microbatch_tokens=64)
    assert group_of(job("auto", microbatch_tokens=64)) is None


def test_groups_are_those_of_every_phase() -> None:
    """They divide each phase's batch, so that the model is the same in all of them."""
    found = job("auto", steps=4, phases=[{"from_step": 2, "global_batch": 36}])
    assert [group_of(found.in_phase(number)) for number in (0, 1)] == [6, 6]
    with pytest.raises(SpecError, match="group 8 does not divide global_batch 36"):
        job({"group": 8}, steps=4, phases=[{"from_step": 2, "global_batch": 36}])
    by_tokens = job("auto", steps=4, phases=[{"from_step": 2, "microbatch_tokens": 64}])
    assert [group_of(by_tokens.in_phase(number)) for number in (0, 1)] == [None, None]
