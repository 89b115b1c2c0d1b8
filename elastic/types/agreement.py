"""When two losses that should be equal are: layouts add up in another order, and the precision says how much that may do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

RELATIVE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
FLOAT8 = 5e-2
LEAST = 1e-3  # losses below it are compared as if they were this large


def tolerance(job: Mapping[str, Any]) -> float:
    """Relative difference of two losses of one sample in one state, in layouts that compute the same."""
    return FLOAT8 if job.get("float8") else RELATIVE[str(job.get("precision") or "float32")]


def agree(one: float, other: float, relative: float) -> bool:
    """What is not finite agrees with nothing finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= relative * max(abs(one), abs(other), LEAST)
