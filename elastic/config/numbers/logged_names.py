"""Numbers that the user's own code tells of a step: what they may be called and be, and how many
there may be. They stand beside those that are told of every step, in tables and in trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elastic.errors import ProgramError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,99}")
NAMES_MOST = 64  # each is a column of a table, and a curve
# told of every step: columns of metrics.csv
STEP_NAMES = (
    "step", "at_s", "generation", "workers", "train_loss", "tokens", "step_tokens", "step_time_s",
    "tokens_per_s", "grad_norm",
)  # fmt: skip


def checked_names(numbers: Any, where: str) -> dict[str, Any]:
    """What was given, where its names may be told; `where`: what was called. Raises
    ProgramError."""
    if not isinstance(numbers, Mapping):
        raise ProgramError(
            f"{where} was given a {type(numbers).__name__}; give a dict of names and numbers, as "
            'in {"lr": 0.1}'
        )
    for name in numbers:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ProgramError(
                f"{where}: '{name!s:.60}' is no name for a number; it is a letter or _, "
                "then letters, digits and _ . / -, at most 100 in all"
            )
        if name in STEP_NAMES:
            raise ProgramError(
                f"{where}: '{name}' is reported at every step already; choose another name"
            )
    if len(numbers) > NAMES_MOST:
        raise ProgramError(f"{where}: {len(numbers)} names; there may be {NAMES_MOST} in a run")
    return dict(numbers)


def number_of(value: Any, name: str, where: str) -> float:
    """A Python, numpy or torch number as a float. Raises ProgramError."""
    found = value
    if getattr(value, "numel", lambda: 1)() == 1 and hasattr(value, "item"):
        found = value.item()
    if isinstance(found, bool) or not isinstance(found, int | float):
        shape = getattr(value, "shape", None)
        kind = type(value).__name__ + (f" of shape {list(shape)}" if shape else "")
        raise ProgramError(f"{where}['{name}'] is a {kind}; it must be one number")
    return float(found)


class NamesSeen:
    """All names that one process has told."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def add(self, numbers: Mapping[str, Any], where: str) -> None:
        """Raises ProgramError where there are too many."""
        self._seen |= numbers.keys()
        if len(self._seen) > NAMES_MOST:
            newest = next(name for name in reversed([*numbers]))
            raise ProgramError(
                f"{where}: '{newest}' is name number {len(self._seen)}; there may be {NAMES_MOST} "
                "in a run, so a name should not contain what changes from step to step"
            )
