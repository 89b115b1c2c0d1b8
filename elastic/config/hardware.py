"""The file in which `elastic profile` leaves what it has measured, and which plan and run read: one
per kind of accelerator.

It stands in $ELASTIC_HARDWARE (a folder, or one file that ends in .json), else in elastic/hardware
under $XDG_CACHE_HOME (~/.cache).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from elastic.catalog.bounded_yaml import SHOWN_MOST
from elastic.errors import SpecError
from elastic.types import HardwareProfile
from elastic.version import user_cache

SCHEMA = 1
MOST = 1e24  # of any number in it
PLACE = "ELASTIC_HARDWARE"
AGAIN = "remove it, or measure again: elastic profile JOB"


def path_of(accelerator_type: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the file of that kind is."""
    given = user_cache(PLACE, "hardware", environment)
    if given.suffix == ".json" and environment.get(PLACE):
        return given
    return given / f"{accelerator_type.replace('/', '-')}.json"


def write_hardware(path: Path, profile: HardwareProfile, about: Mapping[str, Any]) -> None:
    """`about`: plain data: where and when it was measured, and all else that was. Raises SpecError
    where that cannot be."""
    data = {"schema": SCHEMA, **about, "profile": asdict(profile)}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise SpecError(
            f"{path}: cannot be written ({error.strerror}); give another --out FILE"
        ) from error


def check_writable(path: Path) -> None:
    """Raises SpecError, before minutes are spent, where the file could not be written."""
    folder = next(parent for parent in (path.parent, *path.parent.parents) if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "is a folder" if path.is_dir() else f"cannot be written (in {folder})"
        raise SpecError(f"{path}: {what}; give another --out FILE")


def read_hardware(path: Path) -> HardwareProfile:
    """Raises SpecError where it is no such file, or a newer version's."""
    try:
        data = json.loads(path.read_text())
        schema, found = data["schema"], data["profile"]
        if schema > SCHEMA:
            raise SpecError(
                f"{path}: was written by a newer version of elastic (schema {schema}, this one "
                f"reads {SCHEMA}); {AGAIN}"
            )
        return _profile(found)
    except OSError as error:
        raise SpecError(
            f"{path}: cannot be read ({error.strerror}); give a file that elastic profile has "
            "written"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SpecError(
            f"{path}: not a hardware profile ({type(error).__name__}: {error}); {AGAIN}"
        ) from error


def known_hardware(
    kinds: Iterable[str], environment: Mapping[str, str] = os.environ
) -> tuple[HardwareProfile, ...]:
    """What was measured of these kinds of accelerator; nothing for those that never were. Raises
    SpecError for a bad file."""
    paths = {kind: path_of(kind, environment) for kind in dict.fromkeys(kinds)}
    found = {kind: read_hardware(path) for kind, path in paths.items() if path.is_file()}
    return tuple(profile for kind, profile in found.items() if profile.accelerator_type == kind)


def _profile(data: Mapping[str, Any]) -> HardwareProfile:
    """Keys that this version does not know are left out."""
    if not isinstance(data, dict):
        raise TypeError("its profile is no keys and values")
    hints = get_type_hints(HardwareProfile)
    given = {f.name: data[f.name] for f in fields(HardwareProfile) if f.name in data}
    for name, value in given.items():
        if not _fits(value, hints[name]):
            raise TypeError(f"{name} is {repr(value)[:SHOWN_MOST]}")
    return HardwareProfile(**{name: _tuples(value) for name, value in given.items()})


def _fits(value: Any, hint: Any) -> bool:
    """Rows of as many columns as they have, and of numbers those that can be measured."""
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list):
            return False
        if kinds[-1] is Ellipsis:
            return all(_fits(item, kinds[0]) for item in value)
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else int | float)
        return fits and not isinstance(value, bool) and 0 <= value <= MOST
    return isinstance(value, hint)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
