"""Numbers by name that a program sums over batches, added over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elastic.config.numbers.logged_names import checked_names
from elastic.errors import ProgramError
from elastic.worker.process_groups.control_tree import Control
from elastic.worker.process_groups.wire import gather_numbers

COUNT = "count"


class Sums(dict[str, float]):
    """Name -> sum."""

    def add(self, found: Any, where: str, counts: bool = True) -> None:
        """`counts`: False = another rank has the same sums; a number that is cut over ranks is
        added up by all of them. Raises ProgramError where `found` is no dict of numbers."""
        if not isinstance(found, Mapping):
            raise ProgramError(
                f"{where} returned {type(found).__name__}; it must return a dict of sums over the "
                "batch"
            )
        for name, value in found.items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ProgramError(
                    f"{where}['{name}'] is {type(value).__name__}; it must be a number: the sum "
                    "over the batch"
                )
            if counts:
                self[str(name)] = self.get(str(name), 0.0) + value

    def over(self, control: Control) -> Sums:
        """The sums of all ranks together; every rank calls it, also those that have none."""
        if control.size == 1:
            return self
        out = Sums()
        for part in gather_numbers(self, control):
            out.add(part, "a rank")
        return out

    def per_token(self, tokens: float, where: str) -> dict[str, float]:
        """As they are told of a step. Raises ProgramError for names that cannot be told."""
        found = checked_names(self, where)
        return {name: value / max(1.0, tokens) for name, value in found.items()}

    def means(self) -> dict[str, float]:
        """Divided by the sum that is called "count". Raises ProgramError where there is none."""
        if not self:
            return {}
        if self.get(COUNT, 0.0) <= 0:
            raise ProgramError(
                'Program.evaluate must also return "count": what its other sums are divided by'
            )
        return {name: value / self[COUNT] for name, value in self.items() if name != COUNT}


class KeptSums:
    """What a program tells of the batches of a training step, read when the step is done: nobody
    waits for the device before."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._kept: dict[tuple[int, int], tuple[dict[str, Any], bool]] = {}

    def begin(self) -> None:
        """A step; what an earlier one has left is none of it."""
        self._kept = {}

    def add(self, found: Any, counts: bool, *, rows: tuple[int, int]) -> None:
        """As Sums.add; `rows`: which batch they are of, and the first of them. The newest word on
        them counts: a pipeline asks for a loss once more, to see what its stages hand on."""
        if not isinstance(found, Mapping):
            Sums().add(found, self.where)
        kept = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in found.items()
        }
        self._kept[rows] = kept, counts

    def taken(self, control: Control) -> Sums:
        """The sums of all ranks; every rank calls it."""
        sums = Sums()
        for found, counts in self._kept.values():
            sums.add(found, self.where, counts)
        self.begin()
        return sums.over(control)
