"""What a script tells of the step that it is in, until rank 0 reports the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic.config.numbers.logged_names import NamesSeen, checked_names, number_of

WHERE = "run.log"


class LoggedNumbers:
    """Script and training thread take turns, so there is no lock. A tensor is read when the step is
    reported: nobody waits for the device before."""

    def __init__(self) -> None:
        self._seen = NamesSeen()
        self._found: dict[str, Any] = {}

    def begin(self) -> None:
        """Of another step; what was told of one that was not committed is gone."""
        self._found = {}

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Raises ProgramError where a name or a number is none."""
        found = checked_names(numbers, WHERE)
        self._seen.add(found, WHERE)
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and _is_number(value):
                self._found[name] = value.detach().clone()
            else:
                self._found[name] = number_of(value, name, WHERE)

    def taken(self) -> dict[str, float]:
        found, self._found = self._found, {}
        return {name: number_of(value, name, WHERE) for name, value in found.items()}


def _is_number(value: torch.Tensor) -> bool:
    return value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
