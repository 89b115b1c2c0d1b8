"""What all that people write goes through: YAML of bounded size, models in which unknown keys are errors, finite numbers, and
none that is larger than anybody can mean.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from elastic.errors import SpecError

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where it was built in: ten times as fast
DEPTH_MOST = 100  # of lists and keys in YAML
VALUES_MOST = 1_000_000  # in YAML, those behind aliases counted each time
SHOWN_MOST = 80  # characters of a wrong value

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


def finite(value: Any) -> float | None:
    """The number that a value of somebody else's file says; None = it says no finite one."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def shown_of(value: str | float) -> str:
    """As an error shows it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "an integer of thousands of digits"
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}... of {len(text)} characters"


def read_yaml(path: Path, shown: str) -> Any:
    """Raises SpecError with the file as `shown` and the line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{shown}: cannot be read: {error}") from error
    return yaml_of(text, shown)


def yaml_of(text: str, shown: str, several: bool = False) -> Any:
    """`several`: a list of its documents. Raises SpecError that begins with `shown`, with the line where that is known."""
    try:
        if _depth(text) > DEPTH_MOST:  # libyaml builds what is nested by recursion, to the end of the stack
            raise SpecError(f"{shown}: lists or keys are nested more than {DEPTH_MOST} deep in it")
        found = list(yaml.load_all(text, Loader=YAML_LOADER)) if several else yaml.load(text, Loader=YAML_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise SpecError(f"{shown}{at}: not YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from error
    except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:  # too many digits, `!!timestamp 1`
        raise SpecError(f"{shown}: not YAML: {' '.join(str(error).split())[:SHOWN_MOST]}") from error
    if not _countable(found):
        raise SpecError(f"{shown}: it holds more than {VALUES_MOST:,} values, those behind aliases counted each time")
    return found


def _depth(text: str) -> int:
    """How deep lists and keys are nested in it; not looked at further than is too deep."""
    depth, most = 0, 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        most = max(most, depth)
        if most > DEPTH_MOST:
            break
    return most


def _countable(data: Any) -> bool:
    """Small lists that hold each other through aliases can stand for more values than any memory has, or hold themselves."""
    n, left = 0, [data]
    while left:
        value = left.pop()
        n += 1
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list | tuple | set):
            left += value
        if n + len(left) > VALUES_MOST:
            return False
    return True
