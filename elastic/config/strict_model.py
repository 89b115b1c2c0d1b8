"""What all that people write goes through: models in which unknown keys are errors, finite numbers,
and none that is larger than anybody can mean. (Files of YAML: catalog/bounded_yaml.py.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of what names folders, actors and labels
NAME_MOST = 100
STEPS_MOST = 10**12  # steps of a run, and what is counted in them
SAMPLES_MOST = 10**9  # samples of a step, and places of its sequences
SEED_MOST = 2**53
NODES_MOST = 10**6  # also workers, and copies of the state
SECONDS_MOST = 1e8  # about three years
HOURS_MOST = 1e5  # about eleven years
TIME_MOST_S = 1e11  # since 1970: the year 5138
USD_MOST = 1e12
BYTES_MOST = 2**60
NORM_MOST = 1e20  # of a gradient, and deviations of one
GB_MOST = 1e9


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def mapping(value: Any) -> Mapping[str, Any]:
    """The keys and values of somebody else's file; none where it has something else there."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> Sequence[Any]:
    """Likewise the entries of a list."""
    return value if isinstance(value, list) else ()


def whole(value: Any, otherwise: int = 0) -> int:
    """Likewise a whole number that is not below 0."""
    return value if isinstance(value, int) and value >= 0 else otherwise


def finite(value: Any) -> float | None:
    """The number that a value of somebody else's file says; None = it says no finite one."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
