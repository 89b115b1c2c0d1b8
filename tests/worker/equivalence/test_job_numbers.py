"""A model's numbers on a machine without a cluster, and one line for what stands in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from torch import Tensor, nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program, load_program
from elastic.types import Job
from elastic.worker.equivalence.job_numbers import model_profile_of, samples_of
from elastic.worker.profile.sample_profile import traced_sample
from elastic.worker.step.loss_scale import profile_of

TINY = load_program(PROGRAMS / "tiny.py")
JOB: dict[str, Any] = {"program": "job/program.py", "steps": 4, "global_batch": 4}


def test_it_is_what_a_worker_finds() -> None:
    found = model_profile_of(TINY, Job.from_plain(JOB | {"precision": "float16"}))
    assert replace(found, sample=None) == profile_of(
        TINY, Job.from_plain(JOB | {"precision": "float16"})
    )
    assert found.sample == traced_sample(TINY, Job(precision="float16"), TINY.dataset()[0])  # type: ignore[misc]
    assert found.sample is not None and found.sample.flop > 0


def test_samples_of_unequal_length_have_no_profile() -> None:
    unequal = load_program(PROGRAMS / "tiny_unequal.py")
    assert model_profile_of(unequal, Job.from_plain(JOB | {"microbatch_tokens": 64})).sample is None
    assert samples_of(unequal, Job.from_plain(JOB | {"microbatch_tokens": 64}), 4) == []


def test_the_first_samples() -> None:
    dataset: Any = TINY.dataset and TINY.dataset()
    assert [int(x["input"][0]) for x in samples_of(TINY, Job.from_plain(JOB), 3)] == [
        int(dataset[i]["input"][0]) for i in range(3)
    ]
    assert len(samples_of(replace(TINY, dataset=lambda: [dataset[0]]), Job.from_plain(JOB), 3)) == 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("two\nlines")


def unreadable() -> Any:
    raise FileNotFoundError("no corpus")


@pytest.mark.parametrize(
    ("program", "kind", "line"),
    [
        (replace(TINY, model=Broken, tp={}), ProgramError,
        "job/program.py: on the meta device, where tensors have no values, "
            "it raised ValueError: two lines"),
        (replace(TINY, dataset=unreadable), SpecError,
        "job/program.py: its dataset raised FileNotFoundError: no corpus"), (replace(TINY,
        dataset=list), SpecError, "Program.dataset: it has no samples"), (replace(TINY,
        optimizer=None), SpecError, "no optimizer: give Program.optimizer"), (replace(TINY,
        model=lambda: 3), ProgramError, "Program.model must return an nn.Module, not int"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(program: Program, kind: type[Exception], line: str) -> None:
    with pytest.raises(kind) as raised:
        model_profile_of(program, Job.from_plain(JOB))
    assert str(raised.value).startswith(line)


def test_no_weights_are_made() -> None:
    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            assert self.weight.is_meta

    wide = Program(model=lambda: nn.ModuleDict({"layers": nn.ModuleList([Watched()])}).layers[0],
        optimizer=TINY.optimizer,
        dataset=lambda: [{"input": torch.zeros(4)}], loss=lambda output,
        batch: output.sum())  # fmt: skip
    assert model_profile_of(wide, Job.from_plain(JOB)).n_params == 20
