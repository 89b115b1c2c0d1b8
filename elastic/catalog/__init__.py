"""What the clouds offer: GPUs and their links, instance types, dated prices.

Three CSV files, each row with its source, and users' own entries over them (ELASTIC_CATALOG,
docs/catalog.md).

`instances.csv`: hardware of a type, the same in every region. `prices.csv`: dollars per hour of a
type in one region, Linux, as the public tables named in `source` gave them on the day `at`; spot is
the median over the zones of that region. `chips.csv`: peaks of a GPU as its maker prints them, and
what a large matrix product was measured to reach. An empty cell = not known; where sources
disagree, `source` says so.

`restart_times`: what other trainers were measured to take at a change.

The prices are a fallback for where the cloud itself cannot be asked, and they age: show `PRICES_AT`
with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from elastic.catalog import gpu_names
from elastic.catalog.chips import DTYPES, REFERENCE_REGIONS, Chip, InstanceType, Quote, cpu_chip
from elastic.catalog.tables import VARIABLE, Catalog, read
from elastic.errors import alike

PRICES_AT = date(2026, 11, 22)  # when the table was put together; older rows say so in `at`

__all__ = [
    "DTYPES", "PRICES_AT", "REFERENCE_REGIONS", "VARIABLE", "Catalog", "Chip",
    "InstanceType", "Quote", "chip", "chips", "cpu_chip", "find_chip", "find_chips",
    "instance_type", "instance_types", "nearest", "read", "same_gpu",
]  # fmt: skip


def instance_type(name: str) -> InstanceType | None:
    return instance_types().get(name)


def chip(name: str) -> Chip | None:
    """By the name of its row; find_chip() takes any spelling."""
    return chips().get(name)


def find_chip(name: str, own: Sequence[str | Path] = ()) -> Chip:
    """By any usual spelling. Raises SpecError with the nearest names."""
    return gpu_names.find(name, read(own).chips)


def find_chips(name: str, own: Sequence[str | Path] = ()) -> tuple[Chip, ...]:
    """All that a spelling fits, as `h100` does each form of it. Raises SpecError where none is."""
    known = read(own).chips
    return gpu_names.matching(name, known) or (gpu_names.find(name, known),)


def same_gpu(name: str, other: str) -> bool:
    """Can two spellings stand for one GPU?"""
    return gpu_names.may_be_one(name, other, read().chips)


def nearest(name: str, cloud: str = "") -> str:
    """The known instance type whose name is most like `name`, for error messages; '' = none is."""
    names = [known for known, found in instance_types().items() if cloud in ("", found.cloud)]
    return next(iter(alike(name, names)), "")


def instance_types(own: Sequence[str | Path] = ()) -> Mapping[str, InstanceType]:
    return read(own).instances


def chips(own: Sequence[str | Path] = ()) -> Mapping[str, Chip]:
    return read(own).chips
