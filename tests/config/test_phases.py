"""`phases:` in job.yaml: what is refused, in one line, and what each phase is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.docs.pages import blocks

from elastic.config.fingerprint import differences
from elastic.config.job import JobSpec, job_of
from elastic.errors import SpecError
from elastic.types import Job

SOURCE = {"folder": "text", "seq": 16, "tokenizer": "bytes"}
MIXED = {
    "mixture": {"code": {"folder": "code", "weight": 3}, "prose": {"jsonl": "prose", "weight": 1}},
    "seq": 16,
    "tokenizer": "bytes",
}


def spec_of(*phases: dict[str, Any], **keys: Any) -> JobSpec:
    given = {"steps": 100, "global_batch": 8, "data": {"train": SOURCE}, "phases": [*phases]}
    return job_of(given | keys, Path("/jobs/any/program.py"), "job.yaml")


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (({"from_step": 10}, {"from_step": 10}), "entry 2: from_step=10 does not come after 10"),
        (({"from_step": 20}, {"from_step": 10}), "entry 2: from_step=10 does not come after 20"),
        (({"from_step": 100},), "entry 1: from_step=100 is not within the job's 100 steps"),
        (({"global_batch": 4},), "key 'phases.0.from_step' is missing"),
        (({"from_step": 1, "global_bach": 4},), "did you mean 'global_batch'"),
        (({"from_step": 1, "program": "x"},), "'program' is the same for all steps of a run; a"),
        (({"from_step": 1, "optimizer": {}},), "'optimizer' is the same for all steps of a run"),
        (({"from_step": 1, "layout": "dp_shard=9"},), "entry 1: layout 'dp_shard=9' has 9 data"),
        (({"from_step": 1, "global_batch": 0},), "'phases.0.global_batch': .* greater than 0"),
        (({"from_step": 1, "data": {"validation": {}}},), "phases.0.data.validation"),
        (({"from_step": 1, "data": {"train": {"sq": 8}}},), "entry 1: unknown key 'data.train.sq'"),
        (
            ({"from_step": 60, "lr_schedule": {"kind": "linear", "warmup_steps": 50}},),
            "entry 1: lr_schedule: warmup_steps=50 are more than the job's 40 steps",
        ),
    ],
)
def test_what_is_wrong_is_one_line(phases: tuple[dict[str, Any], ...], said: str) -> None:
    with pytest.raises(SpecError, match=said) as error:
        spec_of(*phases)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("job.yaml: ")


def test_a_script_has_none() -> None:
    with pytest.raises(SpecError, match="phases: a script reads its own data"):
        spec_of({"from_step": 5}, script="train.py")


def test_each_phase_is_the_job_with_its_own_keys() -> None:
    later = {"from_step": 40, "data": {"train": {"seq": 64}}, "layout": {2: "tp=2"}}
    spec = spec_of({"from_step": 10, "global_batch": 16}, later)
    first, second, third = spec.each_phase()
    assert [one.steps for one in (first, second, third)] == [10, 30, 60]
    assert [one.global_batch for one in (first, second, third)] == [8, 16, 8]
    assert third.data.train is not None and (third.data.train.seq, third.data.train.folder) == (
        64,
        "text",
    )
    assert (second.layout, third.layout) == ("auto", {"2": "tp=2"})
    assert spec_of().each_phase() == [spec_of()]


def test_a_source_is_changed_where_it_says_so_and_replaced_where_it_is_another() -> None:
    weights = {"mixture": {"code": {"weight": 1}}}
    mixed = spec_of({"from_step": 1, "data": {"train": weights}}, data={"train": MIXED})
    found = mixed.each_phase()[1].data.train
    assert found is not None and found.mixture is not None
    assert {name: part.weight for name, part in found.mixture.items()} == {"code": 1, "prose": 1}
    other = {"jsonl": "more.jsonl", "seq": 32, "tokenizer": "bytes"}
    replaced = spec_of({"from_step": 1, "data": {"train": other}}).each_phase()[1].data.train
    assert replaced is not None and replaced.plain() == other


def test_the_job_comes_back_in_the_phase_that_it_was_in() -> None:
    job = spec_of({"from_step": 10, "global_batch": 16}, {"from_step": 40, "lr_factor": 0.5}).job()
    for number in range(3):
        of = job.in_phase(number)
        assert Job.from_plain(json.loads(json.dumps(of.plain()))) == of
        assert of.in_phase(0) == job
    assert [job.phase_at(step) for step in (0, 9, 10, 39, 40, 99, 100)] == [0, 0, 1, 1, 2, 2, 2]
    assert [job.in_phase(k).until_step for k in range(3)] == [10, 40, 100]


def test_other_phases_are_another_curve() -> None:
    was, now = (
        {"phases": spec_of(*one).job().plain()["phases"]} for one in ((), ({"from_step": 5},))
    )
    assert differences(was, now).startswith("phases ([], now [{'from_step': 5}])")
    older = {"seed": 1}
    assert "phases" in differences(older, {**older, **now}), "it was begun without any"
    assert not differences(older, {**older, **was})
    assert not differences({}, now), "nothing was begun"


def test_the_job_of_the_page_is_read() -> None:
    page = "training-shapes.md"
    (block,) = [one for one in blocks(page) if one.text.startswith("steps: 60000")]
    spec = job_of(yaml.safe_load(block.text), Path("/jobs/any/program.py"))
    assert [(one.steps, one.global_batch) for one in spec.each_phase()] == [
        (20000, 512),
        (30000, 1024),
        (10000, 128),
    ]
    last = spec.each_phase()[2].data.train
    assert last is not None and last.mixture is not None
    assert (last.seq, last.mixture["books"].weight) == (32768, 3)
