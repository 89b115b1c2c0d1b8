"""What is found before a step is paid for: a loss that is a mean, a loss that is no scalar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from elastic.errors import ProgramError
from elastic.program import Program, load_program
from elastic.worker.rehearsal import rehearse

TINY = load_program(Path(__file__).parent.parent / "programs" / "tiny.py")


def place(loss: Callable[[Any, Any], Any] | None = None) -> Any:
    program: Program = TINY if loss is None else replace(TINY, loss=loss)
    return SimpleNamespace(program=program, dataset=program.dataset(), device=torch.device("cpu"))


def reduced(how: str) -> Callable[[Any, Any], Any]:
    return lambda output, batch: cross_entropy(output.flatten(0, 1), batch["target"].flatten(), reduction=how)


def test_a_sum_passes() -> None:
    rehearse(place())
    rehearse(place(reduced("sum")))


def test_a_mean_is_refused() -> None:
    with pytest.raises(ProgramError, match="a mean, it seems; it must return the sum"):
        rehearse(place(reduced("mean")))


def test_a_loss_per_token_is_refused_with_its_shape() -> None:
    with pytest.raises(ProgramError, match=r"a tensor of shape \[16\]; it must return the sum over the batch"):
        rehearse(place(reduced("none")))


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ProgramError, match="Program.loss returned float"):
        rehearse(place(lambda output, batch: 1.0))
