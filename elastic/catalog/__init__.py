"""What the clouds offer: instance types, their GPUs and links, and dated prices. Three CSV files, each row with its source.

`instances.csv`: hardware of a type, the same in every region. `prices.csv`: dollars per hour of a type in one region, Linux, as
the public tables named in `source` gave them; spot is the median over the zones of that region. `chips.csv`: peaks of a GPU as
its maker prints them, and what a large matrix product was measured to reach. An empty cell = not known.

The prices are a fallback for where the cloud itself cannot be asked, and they age: show `PRICES_AT` with them.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.resources import files
from types import MappingProxyType

PRICES_AT = date(2026, 11, 22)  # when the table was put together; GCP's rows are of 2024-11-07, as their source says
GIB, MIB = 2**30, 2**20
REFERENCE_REGIONS = {"aws": "us-east-1", "gcp": "us-central1"}


@dataclass(frozen=True)
class Chip:
    """A GPU. FLOP/s are dense, 0 = it has no such units or nobody says; `nvlink` is one direction of one GPU, 0 = none."""

    name: str
    arch: str
    bf16_flop_per_s: float
    fp16_flop_per_s: float
    fp8_flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    measured_bf16_flop_per_s: float  # the largest matrix product that was measured, 0 = not measured


@dataclass(frozen=True)
class InstanceType:
    """A type of virtual machine. `gpu`: its label in Ray (ray.io/accelerator-type), '' = no GPU; `chip`: its row in chips.csv;
    `network_gbps`: what it has at all times, not the peak of its bursts; `efa_interfaces`: 0 = no EFA."""

    name: str
    cloud: str
    gpu: str
    chip: str
    gpus: int
    gpu_memory_bytes: int  # of one GPU, as the driver reports it
    vcpus: int
    host_memory_bytes: int
    network_gbps: float
    efa_interfaces: int
    prices: Mapping[str, tuple[float | None, float | None]]  # region -> on demand, spot; USD per hour

    @property
    def efa(self) -> bool:
        return self.efa_interfaces > 0

    def usd_per_h(self, region: str) -> float | None:
        """On demand in that region; None = the table has no price of it there."""
        return self.prices.get(region, (None, None))[0]

    @property
    def spot_usd_per_h(self) -> float | None:
        """Spot, the median of the dated table, in the region that it has one of."""
        return self._somewhere(1)[0]

    def usd_per_h_or_elsewhere(self, region: str, spot: bool = False) -> tuple[float | None, str]:
        """Price and the region that it is of: `region` itself where the table has it, else one that it has. (None, '')
        where the table has none."""
        at = 1 if spot else 0
        found = self.prices.get(region, (None, None))[at]
        return (found, region) if found is not None else self._somewhere(at)

    def _somewhere(self, at: int) -> tuple[float | None, str]:
        preferred = REFERENCE_REGIONS.get(self.cloud, "")
        for region in sorted(self.prices, key=lambda region: (region != preferred, region)):
            if self.prices[region][at] is not None:
                return self.prices[region][at], region
        return None, ""


def instance_type(name: str) -> InstanceType | None:
    return instance_types().get(name)


def chip(name: str) -> Chip | None:
    return chips().get(name)


def nearest(name: str, cloud: str = "") -> str:
    """The known instance type whose name is most like `name`, for error messages; '' = none is."""
    names = [known for known, found in instance_types().items() if cloud in ("", found.cloud)]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), "")


@cache
def instance_types() -> Mapping[str, InstanceType]:
    prices: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for row in _rows("prices.csv"):
        by_region = prices.setdefault(row["name"], {})
        by_region[row["region"]] = (_number(row["usd_per_h"]), _number(row["spot_usd_per_h"]))
    return MappingProxyType({row["name"]: _instance(row, prices.get(row["name"], {})) for row in _rows("instances.csv")})


@cache
def chips() -> Mapping[str, Chip]:
    return MappingProxyType({row["name"]: _chip(row) for row in _rows("chips.csv")})


def _instance(row: Mapping[str, str], prices: Mapping[str, tuple[float | None, float | None]]) -> InstanceType:
    return InstanceType(
        row["name"],
        row["cloud"],
        row["gpu"],
        row["chip"],
        int(row["gpus"]),
        int(row["gpu_memory_mib"]) * MIB,
        int(row["vcpus"]),
        int(row["host_memory_mib"]) * MIB,
        float(row["network_gbps"]),
        int(row["efa_interfaces"]),
        MappingProxyType(dict(prices)),
    )


def _chip(row: Mapping[str, str]) -> Chip:
    def of(column: str, unit: float) -> float:
        return (_number(row[column]) or 0.0) * unit

    return Chip(
        row["name"],
        row["arch"],
        of("bf16_tflops", 1e12),
        of("fp16_tflops", 1e12),
        of("fp8_tflops", 1e12),
        int(of("memory_gb", 1) * GIB),
        of("memory_gb_per_s", 1e9),
        of("nvlink_gb_per_s", 1e9),
        of("pcie_gb_per_s", 1e9),
        of("bf16_tflops_measured", 1e12),
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def _rows(file: str) -> list[dict[str, str]]:
    with (files(__name__) / file).open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))
