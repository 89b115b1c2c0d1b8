"""What a program sums besides its loss, over a validation set that does not divide by the step's
samples."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS
from support.reference import build, collate
from torch.nn.functional import cross_entropy

from elastic.data.open_datasets import Sets
from elastic.data.sample_draws import SampleDraws
from elastic.errors import ProgramError, StorageFailed
from elastic.program import Program, load_program
from elastic.types import Job, Layout, Plan, WorkerId
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.session.generation import Generation
from elastic.worker.session.worker_errors import kind_of, text_of
from elastic.worker.state.train_state import TrainState
from elastic.worker.step import evaluation
from elastic.worker.step.evaluation import validate
from elastic.worker.step.optimizer_step import Stepper

TINY = load_program(PROGRAMS / "tiny.py")
JOB = Job(seed=7, global_batch=5, n_samples=512)
N_SAMPLES = 13


def right(output: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
    return {"right": (output.argmax(-1) == batch["target"]).sum()}


def own(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
    last = model(batch["input"])[:, 0]
    return {
        "first_loss": cross_entropy(last, batch["target"][:, 0], reduction="sum"),
        "count": len(last),
    }


@pytest.fixture
def evaluated() -> Iterator[Any]:
    """Evaluates a program on one rank, after its fresh start."""
    groups = Groups(0, Layout(), torch.device("cpu"))

    def run(program: Program, tick: Any = lambda: None) -> dict[str, float]:
        state = TrainState(
            program, trace(program), groups, layout=Layout(), layers=(4,), rank=0, job=JOB
        )
        state.fill_fresh(7)
        plan = Plan(0, Layout(), (WorkerId("node0", 0),), (5,), (4,), 2)
        stepper = Stepper(program, JOB, plan, state=state, groups=groups)
        return validate(stepper, program.validation(), N_SAMPLES, draws=SampleDraws(7), tick=tick)

    yield run
    groups.close()


def test_metrics_are_per_token_and_own_sums_per_their_count(evaluated: Any) -> None:
    found = evaluated(replace(TINY, metrics=right, evaluate=own))
    validation: Any = TINY.validation and TINY.validation()
    batch = collate(validation, [i * len(validation) // N_SAMPLES for i in range(N_SAMPLES)])
    model = build(TINY, 7).eval()
    with torch.no_grad():
        tokens = int((batch["target"] != -100).sum())
        assert found["right"] == pytest.approx(
            float(right(model(batch["input"]), batch)["right"]) / tokens
        )
        assert found["first_loss"] == pytest.approx(
            float(own(model, batch)["first_loss"]) / N_SAMPLES, rel=1e-5
        )
    assert set(found) == {"validation_loss", "right", "first_loss"}


def test_a_loss_is_not_asked_of_no_rows(evaluated: Any) -> None:
    """Of the last 3 rows of 5 none is in the second micro-batch."""
    rows: list[int] = []  # 3, 2, 3, 2, 3

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        rows.append(int(batch["target"].amax(-1).numel()))
        return TINY.loss(output, batch)

    found = evaluated(replace(TINY, loss=loss))
    assert found == evaluated(TINY)
    assert (sum(rows), min(rows)) == (N_SAMPLES, 2)


def test_what_the_node_does_not_give_of_a_validation_is_not_the_programs(evaluated: Any) -> None:
    class Unreadable:
        def __init__(self, error: OSError) -> None:
            self.error = error

        def __len__(self) -> int:
            return 48

        def __getitem__(self, sample: int) -> Any:
            raise self.error

    for error, kind in (
        (OSError(errno.EIO, "Input/output error"), "unread"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), "unread"),
        (StorageFailed("s3://b/k: no whole answer"), "storage"),
    ):
        with pytest.raises(OSError, match=re.escape(str(error))) as caught:
            evaluated(replace(TINY, validation=partial(Unreadable, error)))
        assert kind_of(caught.value) == kind
        named = text_of(caught.value).startswith("the dataset failed at sample 0: ")
        assert named == (kind == "unread")


def test_it_says_before_each_batch_that_it_gets_on(evaluated: Any) -> None:
    ticks: list[int] = []
    evaluated(TINY, lambda: ticks.append(1))
    assert len(ticks) == 3, "13 samples by 5"


def test_the_worker_says_that_it_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, reported = list[tuple[str, int]](), list[Any]()
    place = SimpleNamespace(
        job=Job(eval_samples=0),
        validation=Sets(a=1, b=3),
        at_phase=lambda *told: phases.append(told),
        report=reported.append,
        script=None,
        sample_draws=None,
    )

    def validate_set(
        passes: Any, dataset: Any, n_samples: int, draws: Any, tick: Any
    ) -> dict[str, float]:
        tick()
        return {"validation_loss": float(dataset)}

    monkeypatch.setattr(evaluation, "validate_set", validate_set)
    generation: Any = SimpleNamespace(place=place, number=3, rank=0)
    Generation._evaluate(generation, None, SimpleNamespace(step=7))  # type: ignore[arg-type]
    (said,) = reported
    assert said.metrics == {
        "validation_loss": 2.0,
        "validation_loss.a": 1.0,
        "validation_loss.b": 3.0,
    }
    assert phases == [("evaluating", 7)] * 2


def test_what_is_no_sum_is_refused(evaluated: Any) -> None:
    with pytest.raises(
        ProgramError, match="Program.metrics returned Tensor; it must return a dict of sums"
    ):
        evaluated(replace(TINY, metrics=lambda output, batch: output))
    with pytest.raises(
        ProgramError, match=r"Program.metrics\['a'\] is Tensor; it must be a number"
    ):
        evaluated(replace(TINY, metrics=lambda output, batch: {"a": output}))
    with pytest.raises(ProgramError, match='must also return "count"'):
        evaluated(replace(TINY, evaluate=lambda model, batch: {"a": 1.0}))


def test_a_program_that_evaluates_by_itself_has_no_stages() -> None:
    assert trace(TINY).pipeline and not trace(replace(TINY, evaluate=own)).pipeline
