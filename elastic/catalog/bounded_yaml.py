"""YAML that people write: of bounded size and depth, each key once, each error with its file and
line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from elastic.errors import SpecError

# libyaml's where it was built in: ten times as fast
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEPTH_MOST = 100  # of lists and keys
VALUES_MOST = 1_000_000  # those behind aliases counted each time
MERGED = "<<"  # the keys of another mapping; it may be there for each of several
SHOWN_MOST = 80  # characters of a wrong value, or of what is wrong with it


def read_yaml(path: Path, shown: str) -> Any:
    """Raises SpecError with the file as `shown` and the line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{shown}: cannot be read: {error}") from error
    return yaml_of(text, shown)


def yaml_of(text: str, shown: str, several: bool = False) -> Any:
    """`several`: a list of its documents. Raises SpecError that begins with `shown`, with the line
    where that is known."""
    try:
        _check_structure(text, shown)
        found = (
            list(yaml.load_all(text, Loader=YAML_LOADER))
            if several
            else yaml.load(text, Loader=YAML_LOADER)
        )
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise SpecError(
            f"{shown}{at}: not YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}"
        ) from error
    except (
        ValueError,
        OverflowError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:  # too many digits, `!!timestamp 1`
        raise SpecError(
            f"{shown}: not YAML: {' '.join(str(error).split())[:SHOWN_MOST]}"
        ) from error
    if not _countable(found):
        raise SpecError(
            f"{shown}: it holds more than {VALUES_MOST:,} values, those behind aliases counted "
            "each time"
        )
    return found


def _check_structure(text: str, shown: str) -> None:
    """Raises SpecError where lists and keys are nested too deep, for libyaml builds them by
    recursion, to the end of the stack; and for a key that is there twice, of which YAML's readers
    take the last and say nothing."""
    keys: list[dict[str, int] | None] = []  # of what is open: a mapping's keys, None = a list
    at_key: list[bool] = []
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            keys.pop()
            at_key.pop()
        elif isinstance(event, yaml.NodeEvent):
            known = keys[-1] if keys else None
            if known is not None:
                if at_key[-1] and isinstance(event, yaml.ScalarEvent):
                    _check_new(event, known, shown)
                at_key[-1] = not at_key[-1]
            if isinstance(event, yaml.CollectionStartEvent):
                keys.append({} if isinstance(event, yaml.MappingStartEvent) else None)
                at_key.append(True)
        if len(keys) > DEPTH_MOST:
            raise SpecError(f"{shown}: lists or keys are nested more than {DEPTH_MOST} deep in it")


def _check_new(key: yaml.ScalarEvent, known: dict[str, int], shown: str) -> None:
    line = key.start_mark.line + 1 if key.start_mark is not None else 0
    if key.value in known and key.value != MERGED:
        raise SpecError(
            f"{shown}, line {line}: '{key.value[:SHOWN_MOST]}' is there already, in line "
            f"{known[key.value]}; take one of them away"
        )
    known[key.value] = line


def _countable(data: Any) -> bool:
    """Small lists that hold each other through aliases can stand for more values than any memory
    has, or hold themselves."""
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
