"""read(): the tables that come with the package, and users' own files over them."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elastic.catalog.bounded_yaml import read_yaml
from elastic.catalog.chips import Chip, InstanceType, Quote
from elastic.catalog.gpu_names import find
from elastic.catalog.schema import ChipRow, InstanceRow, OwnFile, PriceRow, checked, suggestion
from elastic.errors import SpecError
from elastic.text import GIB, MIB

VARIABLE = "ELASTIC_CATALOG"  # own files, with os.pathsep between them
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Catalog:
    chips: Mapping[str, Chip]
    instances: Mapping[str, InstanceType]


@dataclass
class _Tables:
    """Rows by name, as dictionaries, so that an own entry can say over some keys only; `said_in`:
    the file that spoke last of an entry, for errors."""

    chips: Rows
    instances: Rows
    prices: dict[str, Rows]  # name -> region -> row
    said_in: dict[str, str]


def read(own: Sequence[str | Path] = ()) -> Catalog:
    """With the files that ELASTIC_CATALOG names and those of `own` over it, the last one wins.
    Raises SpecError."""
    named = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    return _read(tuple(_stamp(Path(path)) for path in (*named, *own)))


def _stamp(path: Path) -> tuple[str, int]:
    """With its time, so that a file that has changed is read again."""
    try:
        return str(path), path.stat().st_mtime_ns
    except OSError as error:
        raise SpecError(
            f"{path}: no such catalog file ({error.strerror}); {VARIABLE} or --catalog names it"
        ) from error


@cache
def _read(stamps: tuple[tuple[str, int], ...]) -> Catalog:
    tables = _shipped()
    for file, _ in stamps:
        _add(tables, file)
    chips = {
        name: _chip(name, row, _place(tables, f"chips.{name}"))
        for name, row in tables.chips.items()
    }
    instances = {}
    for name, row in tables.instances.items():
        prices = tables.prices.get(name, {})
        quotes = {
            region: _quote(said, _place(tables, f"prices.{name}.{region}"))
            for region, said in prices.items()
        }
        instances[name] = _instance(
            name, row, chips, prices=quotes, where=_place(tables, f"instances.{name}")
        )
    for name in tables.prices:
        if name not in instances:
            where = next(place for place in tables.said_in if place.startswith(f"prices.{name}."))
            raise SpecError(
                f"{_place(tables, where)}: there is no instance "
                f"'{name}'{suggestion(name, instances)}"
            )
    return Catalog(MappingProxyType(chips), MappingProxyType(instances))


def _shipped() -> _Tables:
    chips, instances = (
        {row.pop("name"): row for row in _csv(file)} for file in ("chips.csv", "instances.csv")
    )
    prices: dict[str, Rows] = {}
    for row in _csv("prices.csv"):
        prices.setdefault(row.pop("name"), {})[row.pop("region")] = row
    return _Tables(chips, instances, prices, {})


def _csv(file: str) -> list[dict[str, Any]]:
    with (files(__package__) / file).open(encoding="utf-8") as opened:
        return [{key: cell for key, cell in row.items() if cell} for row in csv.DictReader(opened)]


def _add(tables: _Tables, file: str) -> None:
    """A user's file; each entry is checked alone first, since what it says over another is only a
    part."""
    data = read_yaml(Path(file), file)
    if not isinstance(data, dict):
        raise SpecError(f"{file}: it must hold chips, instances or prices")
    own = checked(OwnFile, data, file)
    for name, row in own.chips.items():
        place = f"chips.{name}"
        checked(ChipRow, _mapping(row, f"{file}: {place}"), f"{file}: {place}")
        tables.chips[name] = {**tables.chips.get(name, {}), **row}
        tables.said_in[place] = file
    for name, row in own.instances.items():
        place = f"instances.{name}"
        checked(InstanceRow, _mapping(row, f"{file}: {place}"), f"{file}: {place}")
        before = dict(tables.instances.get(name, {}))
        if "chip" in row:  # what stood there was of another chip
            before = {
                key: cell for key, cell in before.items() if key not in ("gpu", "gpu_memory_mib")
            }
        tables.instances[name] = {**before, **row}
        tables.said_in[place] = file
    for name, regions in own.prices.items():
        for region, row in regions.items():
            place = f"prices.{name}.{region}"
            checked(PriceRow, _mapping(row, f"{file}: {place}"), f"{file}: {place}")
            # not mixed with a price of another day
            tables.prices[name] = {**tables.prices.get(name, {}), region: row}
            tables.said_in[place] = file


def _mapping(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict) or not row:
        raise SpecError(f"{where}: it must hold keys and values, as in docs/catalog.md")
    return row


def _place(tables: _Tables, place: str) -> str:
    return f"{tables.said_in.get(place, 'catalog')}: {place}"


def _chip(name: str, data: Mapping[str, Any], where: str) -> Chip:
    row = checked(ChipRow, data, where)
    if row.memory_gb is None:
        raise SpecError(f"{where}: key 'memory_gb' is missing")
    if row.nvlink_gb_per_s and not row.link:
        raise SpecError(
            f"{where}: key 'link' is missing: what the link of nvlink_gb_per_s is called, as in "
            "NVLink 4"
        )
    return Chip(
        name=name,
        arch=row.arch,
        bf16_flop_per_s=_times(row.bf16_tflops, 1e12),
        fp16_flop_per_s=_times(row.fp16_tflops, 1e12),
        fp8_flop_per_s=_times(row.fp8_tflops, 1e12),
        memory_bytes=int(row.memory_gb * GIB),
        memory_bytes_per_s=_times(row.memory_gb_per_s, 1e9),
        nvlink_bytes_per_s=_times(row.nvlink_gb_per_s, 1e9),
        pcie_bytes_per_s=_times(row.pcie_gb_per_s, 1e9),
        measured_bf16_flop_per_s=_times(row.bf16_tflops_measured, 1e12),
        fp32_flop_per_s=_times(row.fp32_tflops, 1e12),
        tf32_flop_per_s=_times(row.tf32_tflops, 1e12),
        fp4_flop_per_s=_times(row.fp4_tflops, 1e12),
        vector_bf16_flop_per_s=_times(row.vector_bf16_tflops, 1e12),
        sm=row.sm or 0,
        watts=row.watts or 0.0,
        link=row.link,
        source=row.source,
    )


def _instance(
    name: str,
    data: Mapping[str, Any],
    chips: Mapping[str, Chip],
    *,
    prices: Mapping[str, Quote],
    where: str,
) -> InstanceType:
    row = checked(InstanceRow, data, where)
    missing = [
        key for key in ("cloud", "gpus", "vcpus", "host_memory_mib") if getattr(row, key) is None
    ]
    missing += ["chip"] if row.gpus and not row.chip else []
    if missing:
        raise SpecError(f"{where}: key '{missing[0]}' is missing")
    chip = _chip_of(row.chip, chips, where) if row.gpus else None
    link, speed = _link(chip, row)
    return InstanceType(
        name=name,
        cloud=row.cloud or "",
        gpu=(row.gpu or chip.name) if chip else "",
        chip=chip.name if chip else "",
        gpus=row.gpus or 0,
        gpu_memory_bytes=(row.gpu_memory_mib * MIB if row.gpu_memory_mib else chip.memory_bytes)
        if chip
        else 0,
        vcpus=row.vcpus or 0,
        host_memory_bytes=(row.host_memory_mib or 0) * MIB,
        network_gbps=row.network_gbps or 0.0,
        efa_interfaces=row.efa_interfaces,
        prices=MappingProxyType(dict(prices)),
        link=link,
        link_bytes_per_s=speed,
        source=row.source,
    )


def _chip_of(name: str, chips: Mapping[str, Chip], where: str) -> Chip:
    try:
        return find(name, chips)
    except SpecError as error:
        raise SpecError(f"{where}: key 'chip': {error}") from None


def _link(chip: Chip | None, row: InstanceRow) -> tuple[str, float]:
    """Between the GPUs of the machine, and what one GPU has of it in one direction."""
    if chip is None or (row.gpus or 0) < 2:
        return "", 0.0
    if chip.link and row.link != "pcie":
        return chip.link, chip.nvlink_bytes_per_s
    return PCIE.get(round(chip.pcie_bytes_per_s / 1e9), "PCIe"), chip.pcie_bytes_per_s


# GB/s of 16 lanes, one way
PCIE = {16: "PCIe 3", 31: "PCIe 4", 32: "PCIe 4", 63: "PCIe 5", 64: "PCIe 5"}


def _quote(data: Mapping[str, Any], where: str) -> Quote:
    row = checked(PriceRow, data, where)
    if row.usd_per_h is None and row.spot_usd_per_h is None:
        raise SpecError(f"{where}: it has neither usd_per_h nor spot_usd_per_h")
    return Quote(
        row.usd_per_h, row.spot_usd_per_h, row.at.isoformat() if row.at else "", row.source
    )


def _times(value: float | None, unit: float) -> float:
    return float(round((value or 0.0) * unit))
