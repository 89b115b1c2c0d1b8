"""The samples of each step of a job with phases."""

from __future__ import annotations

from collections import Counter
from typing import Any

from elastic.data.order import ids_of, sample_ids
from elastic.types import Job

N = 64


def ids(*phases: dict[str, Any], steps: int, n: int = N, batch: int = 8) -> list[list[int]]:
    plain = {"steps": steps, "global_batch": batch, "seed": 3, "phases": [*phases]}
    job = Job.from_plain(plain | {"n_samples": n, "data": {"train": {"folder": "x", "seq": 8}}})
    return [ids_of(job.in_phase(job.phase_at(step)), step) for step in range(steps)]


def test_phases_that_read_the_same_data_read_each_sample_once() -> None:
    found = ids({"from_step": 3, "global_batch": 4}, {"from_step": 5, "global_batch": 16}, steps=7)
    assert [len(step) for step in found] == [8, 8, 8, 4, 4, 16, 16]
    assert Counter(sum(found, [])) == Counter(range(N)), "an epoch over three phases"
    flat = sum((sample_ids(N, 8, 3, step=step) for step in range(8)), [])
    assert sum(found, []) == flat, "the order is that of a job without phases"


def test_other_data_are_read_from_their_beginning_in_an_order_of_their_own() -> None:
    longer = {"data": {"train": {"seq": 16}}}
    found = ids(
        {"from_step": 8, **longer}, {"from_step": 12, "global_batch": 4, **longer}, steps=20
    )
    assert Counter(sum(found[:8], [])) == Counter(range(N))
    assert Counter(sum(found[8:], [])) == Counter(range(N))
    assert found[8:12] != found[:4], "another order, although seed and length are the same"
    back = ids({"from_step": 8, **longer}, {"from_step": 16}, steps=24)
    assert Counter(sum(back[16:], [])) == Counter(range(N)), "data that come again begin again"


def test_without_phases_nothing_is_another() -> None:
    assert ids(steps=4) == [sample_ids(N, 8, 3, step=step) for step in range(4)]
