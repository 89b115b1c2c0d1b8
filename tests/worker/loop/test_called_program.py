"""A call that a loop makes of its model, made again as a program's: with what it was called with,
and with a number that every value of its output counts in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import ProgramError, SpecError
from elastic.worker.equivalence.small_batch import batch_of
from elastic.worker.equivalence.small_copy import ROWS
from elastic.worker.loop.called_program import called_program, weighed
from elastic.worker.loop.script_host import ScriptSource, first_call
from elastic.worker.program.calls import call_model
from elastic.worker.program.loop_program import LoopProgram

SCRIPT = """
import torch, elastic
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)
    def forward({takes}):
        return {gives}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).view(16, 4)
with elastic.loop(model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=4) as run:
    for x in run:
        {before}
        run.backward(run.model({call}).square().sum())
        run.step()
"""


def called(folder: Path, call: str, takes: str = "self, x", **parts: str) -> LoopProgram:
    given = {"gives": "self.inside(x)", "before": "", "call": call, "takes": takes} | parts
    (folder / "train.py").write_text(SCRIPT.format(**given))
    return first_call(ScriptSource(str(folder / "train.py")), lambda data: batch_of(data, None))


@pytest.mark.parametrize(
    ("call", "takes", "gives"),
    [
        ("x", "self, x", "self.inside(x)"),
        ("x=x", "self, x", "self.inside(x)"),
        ("None, x", "self, ids, x", "self.inside(x)"),
        ("more={'x': [x]}", "self, x=None, *, more", "self.inside(more['x'][0])"),
        ("(x, x + 1), scale=torch.tensor(3.0)", "self, two, scale", "two[1] * scale + two[0]"),
        ("x, torch.ones(7, 4)", "self, x, table", "x + table[:3].sum()"),
        ("x.bfloat16()", "self, x", "self.inside(x)"),
        ("x, x + 1", "self, *all", "self.inside(all[0]) + all[1]"),
        ("x=x", "self, **all", "self.inside(all['x'])"),
    ],
)
def test_it_is_called_as_its_script_calls_it(
    tmp_path: Path, call: str, takes: str, gives: str
) -> None:
    program = called(tmp_path, call, takes, gives=gives)
    assert program.called is not None
    own, batch = called_program(program, program.called)
    assert {len(x) for x in batch.values()} == {ROWS}
    model = program.model()
    found = call_model(own, model, batch)
    if "bfloat16" not in call:  # that meets weights of 32 bits
        torch.testing.assert_close(found, model(*program.called.args, **program.called.kwargs))
    two = call_model(own, model, {key: x[:2] for key, x in batch.items()})
    torch.testing.assert_close(two, found[:2])


@pytest.mark.parametrize(
    ("before", "n"),
    [
        ("run.model.eval(); y = run.model(x + 1); run.model.train()", 2),
        ("with torch.no_grad(): run.model(x + 1)", 1),  # in training mode, with no other shapes
        ("with torch.no_grad(): run.model(x[:2])", 2),
        ("run.model(x + 1)", 1),
    ],
)
def test_a_call_that_does_not_train_is_made_and_the_one_that_does_is_found(
    tmp_path: Path, before: str, n: int
) -> None:
    program = called(tmp_path, "x", before=before)
    first, trained = program.called_before, program.called
    assert trained is not None and not trained.evaluates and not program.notes
    assert (first is not None) == (n == 2)
    if "eval" in before and first is not None:
        assert first.evaluates and torch.equal(first.args[0], trained.args[0] + 1)
        assert called_program(program, first)[0].batch_dependent, "compared in that mode"
        assert not called_program(program, trained)[0].batch_dependent


def test_where_no_call_trains_the_first_is_taken_and_a_note_says_so(tmp_path: Path) -> None:
    before = "run.model.eval(); run.model(x); raise KeyError('later')"
    program = called(tmp_path, "x", before=before)
    assert program.called is not None and not program.called.evaluates
    assert program.called_before is not None and program.called_before.evaluates
    (note,) = program.notes
    assert "not followed to a run.model(...) that trains: " in note and "KeyError: 'later'" in note


def test_no_more_than_a_few_rows_are_compared(tmp_path: Path) -> None:
    program = called(tmp_path, "x.repeat(9, 1)")
    assert program.called is not None and program.called.n == 9 * ROWS
    _, batch = called_program(program, program.called)
    assert {len(x) for x in batch.values()} == {ROWS}


def test_the_body_is_followed_with_values_as_that_of_a_rank_that_does_nothing_alone(
    tmp_path: Path,
) -> None:
    before = "assert x.sum().item() > 0 == run.step_index < run.steps == 3; "
    before += "[][run.rank == 0 or slice(0)]"
    # forward is not called
    program = called(tmp_path, "x", before=before, gives="a_name_that_there_is_not")
    assert program.called is not None and program.called.args[0].shape == (ROWS, 4)
    for before, why in (
        ("raise KeyError('--token=abcdefgh12')", r"train.py, line 15: KeyError: '--token=\*\*\*"),
        ("run.further", "it asks for run.further before"),
        ("break", "it has none"),
    ):
        with pytest.raises(SpecError, match=f"not followed to its first .*: .*{why}"):
            called(tmp_path, "x", before=before)


def test_each_value_of_an_output_counts() -> None:
    torch.manual_seed(0)
    output = {"logits": torch.randn(2, 3, 4), "more": [(torch.randn(2), "text", None)]}
    whole = float(weighed(output, {}))

    def with_logits(x: torch.Tensor) -> float:
        return float(weighed({**output, "logits": x}, {}))

    logits: Any = output["logits"]
    for other in (logits.flip(0), logits.roll(1, -1), -logits, logits * 1.001):
        assert abs(with_logits(other) - whole) > 1e-4 * abs(whole)
    assert float(weighed({**output, "more": []}, {})) != whole
    assert float(weighed(SimpleNamespace(**output), {})) == whole
    with pytest.raises(ProgramError, match=r"gives no numbers that are found \(a str\)"):
        weighed("text", {})
