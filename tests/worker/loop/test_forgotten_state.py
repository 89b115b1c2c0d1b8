"""What a script carries beside the model is named before it starts, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.worker.loop.script_host import capture

TEXT = """
import copy, torch, elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn, part = torch.nn.MSELoss(reduction="sum"), model.weight
{before}
{enter}
    {loop}
        run.backward(loss_fn(run.model(x), x[:, :1]))
        run.step()
        {body}
"""
EACH = "for x in run:"
LOOP = (
    "elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(16, 4), steps=4, "
    "global_batch=4{})"
)
SCHEDULER = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)"


def notes(
    folder: Path, *, before: str = "", body: str = "pass", extra: str = "", loop: str = EACH
) -> list[str]:
    file = folder / "train.py"
    enter = f"with {LOOP.format(extra)} as run:"
    file.write_text(TEXT.format(before=before, body=body, enter=enter, loop=loop))
    return list(capture(file, [], 0).notes)


def test_an_object_that_is_not_handed_over_is_named(tmp_path: Path) -> None:
    (said,) = notes(tmp_path, before=SCHEDULER, body="scheduler.step()")
    assert said.startswith("train.py, line 7: scheduler (StepLR) has a state_dict() and is not in")
    assert said.endswith("give extra_state={'scheduler': scheduler}")
    extra = ", extra_state={'s': scheduler}"
    assert notes(tmp_path, before=SCHEDULER, body="scheduler.step()", extra=extra) == []
    (said,) = notes(tmp_path, before="ema = copy.deepcopy(model)")
    assert "ema (Linear) has a state_dict()" in said
    (said,) = notes(tmp_path, before="ema = torch.optim.swa_utils.AveragedModel(model)")
    assert said.endswith(
        "it needs whole weights, of which a rank has parts: docs/loop.md, An average of the weights"
    )


@pytest.mark.parametrize(
    ("before", "body", "name"),
    [
        ("n = 0", "n += 1", "n"),
        ("best = 9.0", "best = min(best, run.train_loss)", "best"),
        ("mean = 0.0", "\n        mean = 0.9 * mean + 0.1 * run.train_loss", "mean"),
    ],
)
def test_a_number_that_is_carried_is_named(
    tmp_path: Path, before: str, body: str, name: str
) -> None:
    (said,) = notes(tmp_path, before=before, body=body)
    line = 12 if body.startswith("\n") else 11
    assert said.startswith(f"train.py, line {line}: {name} is carried from step to step: a worker")


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("", "pass"),
        ("lr = 0.1", "lr = 0.1 * run.step_index"),
        ("total = 0", "total = 1; total += 2"),
        ("", "n = 1; n += 1"),
        ("for i in range(3): i += 1", "pass"),
        ("model.head = torch.nn.Identity()", "pass"),
    ],
)
def test_what_a_step_makes_anew_is_not(tmp_path: Path, before: str, body: str) -> None:
    assert notes(tmp_path, before=before, body=body) == []


TEACHER = """teacher = copy.deepcopy(model).requires_grad_(False).eval()
teacher.load_state_dict(model.state_dict())
def averaged(of):
    for old, new in zip(of.parameters(), model.parameters()): old.lerp_(new, 0.1)
def distance(x): return (teacher(x) - run.model(x)).square().sum()"""


@pytest.mark.parametrize(
    "body",
    ["distance(x)", "y = teacher(x)", "y = teacher.forward(x)", "y = len(repr(teacher))",
     "run.log({'far': float(loss_fn(input=teacher(x), target=x))})"],
)  # fmt: skip
def test_a_frozen_module_that_is_only_called_is_not(tmp_path: Path, body: str) -> None:
    assert notes(tmp_path, before=TEACHER, body=body) == []


@pytest.mark.parametrize(
    ("before", "body"),
    [
        (TEACHER, "averaged(teacher)"),
        (TEACHER, "averaged(of=teacher)"),
        (TEACHER, "teacher.load_state_dict(model.state_dict())"),
        (TEACHER, "for p in teacher.parameters(): p.add_(1)"),
        (TEACHER, "teacher.weight.data.add_(1)"),
        ("teacher = copy.deepcopy(model)", "y = teacher(x)"),  # trained, for all that is known
        ("teacher = torch.nn.BatchNorm1d(4, affine=False)", "y = teacher(x)"),
    ],
)
def test_an_average_of_the_weights_is_named(tmp_path: Path, before: str, body: str) -> None:
    (said,) = notes(tmp_path, before=before, body=body)
    assert ": teacher (" in said and "give extra_state={'teacher': teacher}" in said


def test_what_each_epoch_begins_anew_is_not(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    enter = f"run = {LOOP.format('')}.start()\nfor epoch in run.epochs():\n    total = 0.0"
    body = "total += 1; seen += 1"
    file.write_text(TEXT.format(before="seen = 0", body=body, enter=enter, loop=EACH))
    (said,) = capture(file, [], 0).notes
    assert "seen is carried" in said


BAR = "def bar(of, **how): return of\nclass Own: pass\nself = Own(); n = 0"
OF_ITSELF = f"self.run = {LOOP.format('')}.start(); run = self.run\nif True:"


@pytest.mark.parametrize(
    "loop", ["for x in bar(run):", "for x in bar(of=run):", "for _, x in enumerate(bar(run)):"]
)
def test_a_loop_through_a_bar_is_one_through_the_run(tmp_path: Path, loop: str) -> None:
    (said,) = notes(tmp_path, before=BAR, body="n += 1", loop=loop)
    assert ": n is carried from step to step: a worker" in said
    assert notes(tmp_path, before=BAR, body="n = 1", loop=loop) == []


def test_a_loop_through_an_attribute_is_one_through_the_run(tmp_path: Path) -> None:
    file, loop = tmp_path / "train.py", "for x in self.run:"
    file.write_text(TEXT.format(before=BAR, body="n += 1", enter=OF_ITSELF, loop=loop))
    (said,) = capture(file, [], 0).notes
    assert ": n is carried from step to step: a worker" in said


@pytest.mark.parametrize(
    "loop", ["for i, x in enumerate(run):", "for i, x in bar(enumerate(bar(run), 1)):"]
)
def test_what_enumerate_counts_is_named(tmp_path: Path, loop: str) -> None:
    (said,) = notes(tmp_path, before=BAR, body="run.log({'i': 0.1 * i})", loop=loop)
    assert said.startswith("train.py, line 10: i counts the batches of one process: a worker that")
    assert said.endswith("anew; where more than what is printed depends on it, use run.step_index")
    assert notes(tmp_path, before=BAR, body="for i in range(3): pass", loop=EACH) == []
    assert notes(tmp_path, before=BAR, loop=loop) == [], "nothing reads it"


TOKENS = """
import torch, elastic
model = torch.nn.Embedding(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ROWS = torch.ones(16, 5, dtype=torch.int64)
rows = {rows}
with elastic.loop(model=model, optimizer=optimizer, dataset=rows, steps=4, global_batch=4{extra}) as run:
    for x in run:
        run.backward(run.model({x}).sum())
        run.step()
"""


@pytest.mark.parametrize(
    ("rows", "x", "extra", "told"),
    [
        ("torch.ones(16, 5, dtype=torch.int64)", "x", "", True),
        ("torch.ones(16, 5, dtype=torch.int64).numpy()", "x", "", True),
        ("torch.ones(16, 5, dtype=torch.int64)", "x", ", count=lambda rows: rows.numel()", False),
        ("torch.ones(16, dtype=torch.int64)", "x", "", False),
        ("[(row, row) for row in torch.ones(16, 5, dtype=torch.int64)]", "x[0]", "", False),
        ("[{'input_ids': r, 'labels': r} for r in ROWS]", "x['input_ids']", "", True),
        ("[{'input_ids': r, 'at': r} for r in ROWS]", "x['input_ids']", "", True),
        ("[{'input_ids': r, 'labels': r[0]} for r in ROWS]", "x['input_ids']", "", False),
        ("[{'input_ids': r, 'label': r[0]} for r in ROWS]", "x['input_ids']", "", False),
        ("[{'input_ids': r, 'target': r} for r in ROWS]", "x['input_ids']", "", False),
    ],
)
def test_rows_of_tokens_that_are_counted_as_samples_are_told(
    tmp_path: Path, rows: str, x: str, extra: str, told: bool
) -> None:
    """Else the loss, and with it the gradient that is clipped, is as many times too large."""
    file = tmp_path / "train.py"
    file.write_text(TOKENS.format(rows=rows, x=x, extra=extra))
    found = list(capture(file, [], 0).notes)
    assert len(found) == told
    assert not told or "a sample is 5 whole numbers; if they are tokens, count=" in found[0]


def test_a_model_that_is_left_in_evaluation_mode_is_told(tmp_path: Path) -> None:
    (said,) = notes(tmp_path, before="model.eval()")
    assert "the model is in evaluation mode" in said
    assert notes(tmp_path, before="model.eval(); model.train()") == []
