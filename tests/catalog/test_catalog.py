"""The catalog's tables: whole, without contradictions, and read as the readers of prices and hardware expect."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from ray.util.accelerators import accelerators

from elastic import catalog

FOLDER = Path(catalog.__file__).parent
SHARED = Path(os.environ.get("ELASTIC_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))


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


def test_what_is_not_known_is_none() -> None:
    assert catalog.instance_type("p9.48xlarge") is None
    without = catalog.instance_type("g5.12xlarge")
    assert without is not None
    assert without.usd_per_h_or_elsewhere("us-east-1") == (None, "")
    assert without.spot_usd_per_h is None
    one_kind = catalog.instance_type("p5.4xlarge")
    assert one_kind is not None
    assert (one_kind.usd_per_h("us-east-1"), one_kind.spot_usd_per_h) == (6.88, None)


def test_the_nearest_name_is_offered() -> None:
    assert catalog.nearest("p5.48xlareg") == "p5.48xlarge"
    assert catalog.nearest("a3-highgpu-8", "gcp") == "a3-highgpu-8g"
    assert catalog.nearest("a3-highgpu-8", "aws") == ""


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
    labels = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA")}
    for found in types.values():
        assert (found.gpus > 0) == bool(found.gpu) == bool(found.chip) == (found.gpu_memory_bytes > 0), found.name
        assert found.vcpus > 0 and found.host_memory_bytes > 0 and found.network_gbps > 0, found.name
        for on_demand, spot in found.prices.values():
            assert on_demand is None or spot is None or 0 < spot <= on_demand, found.name
        if found.gpu:
            assert found.gpu in labels, f"{found.name}: Ray has no accelerator type {found.gpu}"
            chip = catalog.chip(found.chip)
            assert chip is not None, found.name
            assert 0.9 < found.gpu_memory_bytes / chip.memory_bytes <= 1.0, found.name


def test_units_of_a_chip() -> None:
    found = catalog.chip("H100-80GB-SXM")
    assert found is not None
    assert (found.bf16_flop_per_s, found.memory_bytes_per_s, found.nvlink_bytes_per_s) == (989e12, 3350e9, 450e9)
    assert found.measured_bf16_flop_per_s < found.bf16_flop_per_s


def test_prices_are_those_of_the_source() -> None:
    source = SHARED / "planner" / "instances.csv"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    with source.open() as opened:
        for row in csv.DictReader(opened):
            found = catalog.instance_type(row["instance"])
            assert found is not None, row["instance"]
            assert (found.gpus, found.vcpus) == (int(row["gpus"]), int(row["vcpus"]))
            assert (found.network_gbps, found.gpu_memory_bytes) == (float(row["network_gbps"]), int(row["gpu_mem_mib"]) * 2**20)
            if row["on_demand_usd_h_us_east_1"]:
                assert found.usd_per_h("us-east-1") == float(row["on_demand_usd_h_us_east_1"])
