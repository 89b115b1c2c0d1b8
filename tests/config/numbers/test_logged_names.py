"""What a number of the user's own may be called, and be: one line where it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic.config.numbers.logged_names import NAMES_MOST, NamesSeen, checked_names, number_of
from elastic.errors import ProgramError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "was given a list; give a dict of names and numbers"),
        ({"a b": 1}, "'a b' is no name for a number"),
        ({"": 1}, "'' is no name for a number"),
        ({3: 1}, "'3' is no name for a number"),
        ({"x" * 101: 1}, f"'{'x' * 60}' is no name"),
        ({"train_loss": 1}, "'train_loss' is reported at every step already"),
        ({f"n{i}": 1 for i in range(NAMES_MOST + 1)}, "65 names; there may be 64 in a run"),
    ],
)
def test_a_name_that_cannot_be_told_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ProgramError) as caught:
        checked_names(given, "run.log")
    assert said in str(caught.value) and str(caught.value).startswith("run.log")
    assert "\n" not in str(caught.value)


def test_names_that_change_from_step_to_step_are_found_out() -> None:
    seen = NamesSeen()
    for step in range(NAMES_MOST):
        seen.add({f"loss_{step}": 1.0}, "run.log")
    seen.add({"loss_0": 1.0}, "run.log")
    with pytest.raises(ProgramError, match="'new' is name number 65"):
        seen.add({"loss_1": 1.0, "new": 2.0}, "run.log")


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), torch.tensor(2), torch.tensor([2])]
)
def test_a_number_is_one_of_any_library(value: Any) -> None:
    assert number_of(value, "a", "run.log") == 2.0


@pytest.mark.parametrize(
    ("value", "kind"),
    [("2", "str"), (None, "NoneType"), (True, "bool"), (torch.tensor(True), "Tensor"),
     (torch.ones(2, 3), "Tensor of shape [2, 3]"), ([1], "list"), (1j, "complex")],
)  # fmt: skip
def test_what_is_no_number_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ProgramError) as caught:
        number_of(value, "lr", "run.log")
    assert str(caught.value) == f"run.log['lr'] is a {kind}; it must be one number"
