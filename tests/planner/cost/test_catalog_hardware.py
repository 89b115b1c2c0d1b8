"""Profiles of the catalog's chips."""

from __future__ import annotations

import pytest
from support.planner.pools import gpu

from elastic import catalog
from elastic.planner.cost import catalog_hardware


def test_an_h100_in_its_reference_node() -> None:
    found = gpu("H100-80GB-SXM")
    assert (found.peak_flop_per_s, found.peak("float8"), found.units) == (9.89e14, 1.979e15, 132)
    assert found.memory_bytes == 80 << 30
    assert (found.memory_bytes_per_s, found.node_bytes_per_s, found.link_bytes_per_s) == (
        3.35e12,
        4.5e11,
        5e10,
    )
    assert found.reached == pytest.approx(794.5 / 989)


def test_a_network_is_named_in_gbit_per_s_of_a_gpu() -> None:
    assert gpu("H100-80GB-SXM", 100.0).link_bytes_per_s == 1.25e10
    assert gpu("A100-80GB-SXM").link_bytes_per_s == 2.5e10


def test_without_nvlink_bytes_go_through_the_host() -> None:
    assert gpu("L40S-48GB").node_bytes_per_s == 31e9 * catalog_hardware.PCIE_SHARE
    assert gpu("L40S-48GB").reached == catalog_hardware.REACHED["Ada"]


def test_a_part_without_printed_peaks_has_its_familys_by_power() -> None:
    chip = catalog.find_chip("H100-96GB-HBM2e (Grand Teton, 500 W)")
    found = catalog_hardware.profile(chip)
    assert found.peak_flop_per_s == pytest.approx(9.89e14 * 500 / 700) and found.units == 132
    assert found.memory_bytes_per_s == 2.4e12  # its own


def test_a_chip_without_bfloat16_computes_in_float16() -> None:
    assert gpu("V100-32GB-SXM2").peak_flop_per_s == 1.25e14


def test_nvlink_joins_racks_of_gb200() -> None:
    assert catalog_hardware.together(catalog.find_chip("GB200-186GB"), 4) == 72
    assert catalog_hardware.together(catalog.find_chip("H100-80GB-SXM"), 8) == 8


@pytest.mark.parametrize("chip", catalog.chips().values(), ids=lambda chip: chip.name)
def test_every_chip_has_a_profile_that_a_plan_can_use(chip: catalog.Chip) -> None:
    found = catalog_hardware.profile(chip)
    assert found.peak_flop_per_s > 1e13 and 0.3 < found.reached <= 1
    assert (
        min(
            found.memory_bytes,
            found.memory_bytes_per_s,
            found.node_bytes_per_s,
            found.link_bytes_per_s,
        )
        > 1e9
    )
