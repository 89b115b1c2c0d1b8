"""The catalog's tables: whole, without contradictions, and read as the readers of prices and
hardware expect."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from ray.util.accelerators import accelerators

from elastic import catalog
from elastic.errors import SpecError

FOLDER = Path(catalog.__file__).parent
SHARED = Path(
    os.environ.get("ELASTIC_SHARED", Path(__file__).resolve().parents[2].parent / "shared")
)
CLOUDS = {"aws", "gcp", "azure"}


@pytest.fixture(autouse=True)
def _only_the_shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(catalog.VARIABLE, raising=False)


def test_a_known_type_has_its_hardware_and_prices() -> None:
    found = catalog.instance_type("p5.48xlarge")
    assert found is not None
    assert (found.cloud, found.gpu, found.gpus, found.vcpus) == ("aws", "H100", 8, 192)
    assert (found.gpu_memory_bytes, found.host_memory_bytes) == (81920 * 2**20, 2**41)
    assert (found.network_gbps, found.efa, found.efa_interfaces) == (3200, True, 32)
    assert (found.usd_per_h("us-east-1"), found.spot_usd_per_h) == (55.04, 23.45)
    assert found.usd_per_h("eu-west-1") is None
    assert found.usd_per_h_or_elsewhere("eu-west-1") == (55.04, "us-east-1")
    assert found.usd_per_h_or_elsewhere("eu-west-1", spot=True) == (23.45, "us-east-1")
    azure = catalog.instance_types()["Standard_NC24ads_A100_v4"]
    # the region that the others are compared with
    assert azure.usd_per_h_or_elsewhere("norwayeast") == (3.673, "eastus")
    quote = found.prices["us-east-1"]
    assert quote.at == "2026-11-22" and "skypilot" in quote.source


def test_what_is_not_known_is_none() -> None:
    assert catalog.instance_type("p9.48xlarge") is None
    without = catalog.instance_type("g5.12xlarge")
    assert without is not None
    assert without.usd_per_h_or_elsewhere("us-east-1") == (None, "")
    assert without.spot_usd_per_h is None
    one_kind = catalog.instance_type("g6.48xlarge")
    assert one_kind is not None
    assert (one_kind.usd_per_h("us-east-1"), one_kind.spot_usd_per_h) == (13.3504, None)
    elsewhere = catalog.instance_type("p5.4xlarge")
    assert elsewhere is not None
    assert elsewhere.usd_per_h_or_elsewhere("us-east-1", spot=True) == (3.3417, "ap-northeast-1")


def test_the_nearest_name_is_offered() -> None:
    assert catalog.nearest("p5.48xlareg") == "p5.48xlarge"
    assert catalog.nearest("a3-highgpu-8", "gcp") == "a3-highgpu-8g"
    assert catalog.nearest("a3-highgpu-8", "aws") == ""
    assert catalog.nearest("Standard_ND96isr_H100_v6", "azure") == "Standard_ND96isr_H100_v5"


@pytest.mark.parametrize("file", ["instances.csv", "prices.csv", "chips.csv"])
def test_each_row_is_there_once_and_names_its_source(file: str) -> None:
    with (FOLDER / file).open() as opened:
        rows = list(csv.DictReader(opened))
    keys = [(row["name"], row.get("region")) for row in rows]
    assert len(rows) > 15
    assert len(set(keys)) == len(keys)
    assert all(row["source"] and None not in row.values() for row in rows)


def test_the_tables_agree_with_each_other() -> None:
    types = catalog.instance_types()
    with (FOLDER / "prices.csv").open() as opened:
        assert {row["name"] for row in csv.DictReader(opened)} <= set(types)
    # Ray has a constant for most, and labels an A10 by the name that its driver gives
    labels = {
        value for name, value in vars(accelerators).items() if name.startswith(("NVIDIA", "AMD"))
    } | {"A10"}
    for found in types.values():
        assert (
            (found.gpus > 0) == bool(found.gpu) == bool(found.chip) == (found.gpu_memory_bytes > 0)
        ), found.name
        assert found.vcpus > 0 and found.host_memory_bytes > 0 and found.network_gbps >= 0, (
            found.name
        )
        assert found.network_gbps or "network: the page says none" in found.source, found.name
        for quote in found.prices.values():
            spot, on_demand = quote.spot_usd_per_h, quote.usd_per_h
            assert on_demand is None or spot is None or 0 < spot <= on_demand, found.name
        if found.gpu:
            assert found.gpu in labels, f"{found.name}: Ray has no accelerator type {found.gpu}"
            chip = catalog.chip(found.chip)
            assert chip is not None, found.name
            assert 0.9 < found.gpu_memory_bytes / chip.memory_bytes <= 1.0, found.name


def test_every_cloud_has_types_with_gpus_and_prices() -> None:
    types = catalog.instance_types().values()
    assert {found.cloud for found in types} == CLOUDS
    for cloud in CLOUDS:
        priced = [found for found in types if found.cloud == cloud and found.gpus and found.prices]
        assert {"A100", "H100"} <= {found.gpu for found in priced}
    assert {found.chip for found in types if found.cloud == "azure"} >= {
        "MI300X-192GB",
        "H200-141GB-SXM",
        "V100-16GB-PCIe",
        "T4",
    }


def test_links_inside_a_node_are_those_of_its_chips() -> None:
    def link(name: str) -> tuple[str, float]:
        found = catalog.instance_type(name)
        assert found is not None
        return found.link, found.link_bytes_per_s

    assert link("p5.48xlarge") == ("NVLink 4", 450e9)
    assert link("p4d.24xlarge") == ("NVLink 3", 300e9)
    assert link("p3.8xlarge") == ("NVLink 2", 150e9)
    assert link("p6-b200.48xlarge") == ("NVLink 5", 900e9)
    assert link("Standard_ND96isr_MI300X_v5") == ("Infinity Fabric", 448e9)
    assert link("g5.48xlarge") == link("g6.48xlarge") == link("g6e.24xlarge") == ("PCIe 4", 31e9)
    assert link("g4dn.12xlarge") == ("PCIe 3", 15.75e9)
    assert link("g5.xlarge") == link("m5.large") == ("", 0.0)


def test_the_network_is_shared_by_the_gpus_of_a_node() -> None:
    per_gpu = {
        name: catalog.instance_types()[name].network_bytes_per_s_per_gpu
        for name in ("p5.48xlarge", "m5.large")
    }
    assert per_gpu["p5.48xlarge"] == 400e9 / 8
    assert per_gpu["m5.large"] == 0.75e9 / 8
    # not known
    assert catalog.instance_types()["Standard_NC24s_v3"].network_bytes_per_s_per_gpu == 0.0


def test_units_of_a_chip() -> None:
    found = catalog.chip("H100-80GB-SXM")
    assert found is not None
    assert (found.bf16_flop_per_s, found.memory_bytes_per_s, found.nvlink_bytes_per_s) == (
        989e12,
        3350e9,
        450e9,
    )
    assert found.measured_bf16_flop_per_s < found.bf16_flop_per_s
    assert (found.sm, found.watts, found.fp32_flop_per_s, found.tf32_flop_per_s) == (
        132,
        700,
        66.9e12,
        494.7e12,
    )
    assert found.vector_bf16_flop_per_s == 133.8e12
    assert "glennklockwood" in found.source


def test_peaks_by_dtype_fall_back_only_where_the_hardware_does() -> None:
    peaks = {
        name: [catalog.find_chip(name).peak_flop_per_s(dtype) for dtype in catalog.DTYPES]
        for name in ("V100", "B200", "L4", "A10G")
    }
    # tf32 runs as float32; no bfloat16 units
    assert peaks["V100"] == [15.7e12, 15.7e12, 125e12, 0, 0, 0]
    assert peaks["B200"] == [75e12, 1100e12, 2250e12, 2250e12, 4500e12, 9000e12]
    assert peaks["L4"] == [30.3e12, 60e12, 121e12, 121e12, 242.5e12, 0]
    # it has units for tf32, of which nobody says how fast
    assert peaks["A10G"] == [31.2e12, 0, 70e12, 70e12, 0, 0]
    unknown = catalog.find_chip("H100-96GB-HBM2e-500W")
    assert [unknown.peak_flop_per_s(dtype) for dtype in catalog.DTYPES] == [0] * 6
    with pytest.raises(SpecError, match="no peak is kept for 'int8'; it is one of float32, tf32, "):
        unknown.peak_flop_per_s("int8")


def test_peaks_do_not_contradict_each_other() -> None:
    for chip in catalog.chips().values():
        peak = {dtype: chip.peak_flop_per_s(dtype) for dtype in catalog.DTYPES}
        wider_first = [
            peak[dtype]
            for dtype in ("float32", "tf32", "bfloat16", "float8", "float4")
            if peak[dtype]
        ]
        assert wider_first == sorted(wider_first), chip.name
        assert not (peak["bfloat16"] and chip.arch in ("Volta", "Turing")), chip.name
        assert not (peak["float8"] and chip.arch in ("Volta", "Turing", "Ampere", "CDNA2")), (
            chip.name
        )
        assert not (peak["float4"] and chip.arch != "Blackwell"), chip.name
        assert bool(chip.link) == (chip.nvlink_bytes_per_s > 0), chip.name
        assert chip.memory_bytes and chip.memory_bytes_per_s and chip.watts, chip.name
        assert chip.measured_bf16_flop_per_s <= chip.bf16_flop_per_s, chip.name


def test_a_cpu_is_a_chip_of_measured_numbers() -> None:
    cpu = catalog.cpu_chip(2e11, 8 * 2**30, 2e10)
    assert (cpu.name, cpu.memory_bytes, cpu.memory_bytes_per_s, cpu.link) == (
        "CPU",
        8 * 2**30,
        2e10,
        "",
    )
    assert cpu.peak_flop_per_s("float32") == cpu.peak_flop_per_s("tf32") == 2e11
    assert cpu.peak_flop_per_s("bfloat16") == cpu.peak_flop_per_s("float16") == 0.0
    assert catalog.cpu_chip(2e11, 1, 1.0, bf16_flop_per_s=3e10).peak_flop_per_s("bfloat16") == 3e10


def test_prices_are_those_of_the_source() -> None:
    source = SHARED / "planner" / "instances.csv"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    with source.open() as opened:
        for row in csv.DictReader(opened):
            found = catalog.instance_type(row["instance"])
            assert found is not None, row["instance"]
            assert (found.gpus, found.vcpus) == (int(row["gpus"]), int(row["vcpus"]))
            assert (found.network_gbps, found.gpu_memory_bytes) == (
                float(row["network_gbps"]),
                int(row["gpu_mem_mib"]) * 2**20,
            )
            if row["on_demand_usd_h_us_east_1"]:
                assert found.usd_per_h("us-east-1") == float(row["on_demand_usd_h_us_east_1"])
