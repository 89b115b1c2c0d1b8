"""A loop whose model is called with parts of no rows, or whose evaluation takes two rows alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.worker.loop.loop_model import LoopModel, NoRows
from elastic.worker.loop.script_host import capture
from elastic.worker.process.call_log import CallLog

SCRIPT = """
import torch, elastic
from torch import nn

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)

    def forward(self, x):
        return self.line(x.view(len(x), -1, 2))

def evaluate(model, rows):
    return model(rows).view({rows}, 4).square().sum()

model, data = Pairs(), torch.arange(64.0).view(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with elastic.loop(
    model=model, optimizer=optimizer, dataset=data, steps=3, global_batch=8,
    validation=data, evaluate=evaluate,
) as run:
    for rows in run:
        for part in rows.tensor_split(4):
            run.backward(run.model(part).square().sum())
        run.step()
"""


class Pairs(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(len(x), -1, 2))


def test_a_part_without_rows_is_named_with_the_rows_of_the_batch() -> None:
    model = LoopModel(lambda: Pairs(2, 2), CallLog(), n_rows=lambda: 3)
    model.attach(Pairs(2, 2))
    assert model(torch.zeros(1, 4)).shape == (1, 2, 2)
    with pytest.raises(
        NoRows,
        match=r"run\.model\(\.\.\.\) was given 0 rows, and raised RuntimeError: cannot reshape.*"
        "share of global_batch, has 3 rows: take no more parts than the smallest share has rows",
    ):
        model(torch.zeros(0, 4))
    with pytest.raises(RuntimeError) as caught:  # another error, with rows
        model(torch.zeros(1, 3))
    assert not isinstance(caught.value, ProgramError) and not model.broken


class Raises(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: unspecified launch failure"),
    ],
)
def test_what_a_device_raises_over_a_part_without_rows_stays_what_it_is(error: Exception) -> None:
    model = LoopModel(lambda: Raises(error), CallLog(), n_rows=lambda: 3)
    model.attach(Raises(error))
    with pytest.raises(type(error)) as caught:
        model(torch.zeros(0, 4))
    assert caught.value is error


@pytest.mark.parametrize(("rows", "said"), [("len(rows)", ""), ("2", "over 1 row of the valid")])
def test_the_driver_tries_other_rows_in_an_evaluation_and_leaves_parts_to_the_workers(
    tmp_path: Path, rows: str, said: str
) -> None:
    """Two samples cannot be cut into four parts: a share may be larger."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("{rows}", rows))
    refused = rf"elastic\.loop\(evaluate=\.\.\.\) raised RuntimeError.*train\.py:14\), {said}"
    with pytest.raises(SpecError, match=refused) if said else nullcontext():
        assert capture(file, [], 0).evaluation is not None
