"""Chip, InstanceType, Quote: what stands in a row of the catalog, in plain units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import SpecError

REFERENCE_REGIONS = {"aws": "us-east-1", "gcp": "us-central1", "azure": "eastus"}
DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8", "float4")
# products asked for in tf32 run there as float32
WITHOUT_TF32 = ("Volta", "Turing", "CDNA2", "CPU")


@dataclass(frozen=True)
class Chip:
    """A GPU. FLOP/s are dense, products that add up in float32; 0 = it has no such units or nobody
    says. `fp32` and `vector_bf16` are of the units outside the tensor cores. `nvlink` (or what
    `link` names) is one direction of one GPU, 0 = none. `sm`: streaming multiprocessors or compute
    units; `watts`: the most it may draw."""

    name: str
    arch: str
    bf16_flop_per_s: float
    fp16_flop_per_s: float
    fp8_flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    pcie_bytes_per_s: float
    # the largest matrix product that was measured, 0 = not measured
    measured_bf16_flop_per_s: float
    fp32_flop_per_s: float = 0.0
    tf32_flop_per_s: float = 0.0
    fp4_flop_per_s: float = 0.0
    vector_bf16_flop_per_s: float = 0.0
    sm: int = 0
    watts: float = 0.0
    link: str = ""  # between the GPUs of a node, as in NVLink 4; '' = PCIe alone
    source: str = ""

    def peak_flop_per_s(self, dtype: str) -> float:
        """Dense peak of matrix products in one of DTYPES, 0 = not known or no such units; bfloat16
        has none before Ampere, and is then slower than float32 in software. Only tf32 falls back,
        to float32, on chips without units for it, since that is what they do when it is asked for.
        float32 is the rate without tf32. Raises SpecError."""
        peaks = {
            "float32": self.fp32_flop_per_s,
            "tf32": self.tf32_flop_per_s
            or (self.fp32_flop_per_s if self.arch in WITHOUT_TF32 else 0.0),
            "float16": self.fp16_flop_per_s,
            "bfloat16": self.bf16_flop_per_s,
            "float8": self.fp8_flop_per_s,
            "float4": self.fp4_flop_per_s,
        }
        if dtype not in peaks:
            raise SpecError(f"no peak is kept for '{dtype}'; it is one of {', '.join(DTYPES)}")
        return peaks[dtype]


class Quote(NamedTuple):
    """Of one region. `at`: the day it was read, ISO; '' = not known."""

    usd_per_h: float | None = None
    spot_usd_per_h: float | None = None
    at: str = ""
    source: str = ""

    def usd(self, spot: bool) -> float | None:
        return self.spot_usd_per_h if spot else self.usd_per_h


@dataclass(frozen=True)
class InstanceType:
    """A type of virtual machine. `gpu`: its label in Ray (ray.io/accelerator-type), '' = no GPU;
    `chip`: its row in chips.csv; `network_gbps`: between nodes, of all its interfaces that GPUs can
    use, at all times and not the peak of its bursts, 0 = not known; `efa_interfaces`: 0 = no EFA.
    `link`: between its GPUs, '' = it has one at most."""

    name: str
    cloud: str
    gpu: str
    chip: str
    gpus: int
    gpu_memory_bytes: int  # of one GPU, as the driver reports it; as printed where nobody says
    vcpus: int
    host_memory_bytes: int
    network_gbps: float
    efa_interfaces: int
    prices: Mapping[str, Quote]  # region -> on demand, spot; USD per hour of the whole machine
    link: str = ""
    link_bytes_per_s: float = 0.0  # one direction of one GPU, 0 = not known or none
    source: str = ""

    @property
    def efa(self) -> bool:
        return self.efa_interfaces > 0

    @property
    def network_bytes_per_s_per_gpu(self) -> float:
        """Of a machine without GPUs: of the machine."""
        return self.network_gbps * 1e9 / 8 / max(self.gpus, 1)

    def usd_per_h(self, region: str) -> float | None:
        """On demand in that region; None = the table has no price of it there."""
        return self.prices.get(region, Quote()).usd_per_h

    @property
    def spot_usd_per_h(self) -> float | None:
        """Spot, the median of the dated table, in the region that it has one of."""
        return self._somewhere(spot=True)[0]

    def usd_per_h_or_elsewhere(self, region: str, spot: bool = False) -> tuple[float | None, str]:
        """Price and the region that it is of: `region` itself where the table has it, else one that
        it has. (None, '') where the table has none."""
        found = self.prices.get(region, Quote()).usd(spot)
        return (found, region) if found is not None else self._somewhere(spot)

    def _somewhere(self, spot: bool) -> tuple[float | None, str]:
        preferred = REFERENCE_REGIONS.get(self.cloud, "")
        for region in sorted(self.prices, key=lambda region: (region != preferred, region)):
            found = self.prices[region].usd(spot)
            if found is not None:
                return found, region
        return None, ""


def cpu_chip(
    flop_per_s: float, memory_bytes: int, memory_bytes_per_s: float, *, bf16_flop_per_s: float = 0.0
) -> Chip:
    """This machine's processor as one chip, from numbers that were measured on it: `flop_per_s` of
    float32 products, of all its cores together. It has no link but its memory, and what was not
    measured is 0."""
    return Chip(
        name="CPU",
        arch="CPU",
        bf16_flop_per_s=bf16_flop_per_s,
        fp16_flop_per_s=0.0,
        fp8_flop_per_s=0.0,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        nvlink_bytes_per_s=0.0,
        pcie_bytes_per_s=0.0,
        measured_bf16_flop_per_s=bf16_flop_per_s,
        fp32_flop_per_s=flop_per_s,
        source="measured on this machine",
    )
