"""Which cases of a product are enough for `make test`; the others are of the whole tier."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def meeting(*values: Sequence[Any], n: int = 2) -> list[Any]:
    """All combinations, for `parametrize`: those that are enough to let each value meet each value
    of any other n - 1 columns are run, the others are of the whole tier."""
    cases = list(product(*(range(len(column)) for column in values)))
    met = {case: set(combinations(enumerate(case), n)) for case in cases}
    missing, kept = set().union(*met.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(met[case] & missing))
        missing -= met[best]
        kept.add(best)
    return [
        pytest.param(
            *(column[i] for column, i in zip(values, case, strict=True)),
            marks=() if case in kept else pytest.mark.whole,
        )
        for case in cases
    ]
