"""A GPU is found by any usual spelling, and by nothing else."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from elastic import catalog
from elastic.errors import SpecError

SHARED = Path(
    os.environ.get("ELASTIC_SHARED", Path(__file__).resolve().parents[2].parent / "shared")
)
SPELLINGS = {
    "A100-40GB-SXM": ("a100", "A100-40GB", "A100_40GB", "A100-40G", "NVIDIA A100-SXM4-40GB"),
    "A100-80GB-SXM": ("A100-80GB", "A100_80GB", "a100 80 gb", "NVIDIA A100-SXM4-80GB", "A100-80G"),
    "A100-80GB-PCIe": ("NVIDIA A100 80GB PCIe", "a100-pcie"),
    "V100-16GB-SXM2": ("v100", "Tesla V100-SXM2-16GB", "V100-16GB"),
    "V100-32GB-SXM2": ("V100-32GB", "Tesla V100-SXM2-32GB"),
    "V100-16GB-PCIe": ("Tesla V100-PCIE-16GB",),
    "H100-80GB-SXM": ("h100", "H100-80GB", "NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
    "H100-80GB-PCIe": ("NVIDIA H100 PCIe",),
    "H100-94GB-NVL": ("NVIDIA H100 NVL", "H100-94GB"),
    "H100-96GB-HBM2e (Grand Teton, 500 W)": ("H100-96GB-HBM2e-500W", "h100-96gb"),
    "H200-141GB-SXM": ("H200", "H200-141GB", "NVIDIA H200"),
    "B200-180GB-SXM": ("b200", "NVIDIA B200"),
    "B300-288GB-SXM": ("B300",),
    "GB200-186GB": ("GB200", "NVIDIA GB200"),
    "GB300-279GB": ("gb300",),
    "T4": ("T4", "Tesla T4", "t4-16gb", "nvidia_t4"),
    "A10G-24GB": ("A10G", "NVIDIA A10G", "A10G-24GB"),
    "A10-24GB": ("A10", "NVIDIA A10"),
    "L4-24GB": ("l4", "NVIDIA L4"),
    "L40S-48GB": ("L40S", "NVIDIA L40S"),
    "MI300X-192GB": ("mi300x", "AMD Instinct MI300X", "AMD-Instinct-MI300X-OAM"),
    "MI250X-128GB": ("AMD-Instinct-MI250X",),
    "RTX-3090-24GB": ("NVIDIA GeForce RTX 3090", "3090"),
    "RTX-4090-24GB": ("rtx4090", "RTX_4090", "NVIDIA GeForce RTX 4090"),
    "RTX-5090-32GB": ("RTX 5090",),
    "RTX-6000-Ada-48GB": ("NVIDIA RTX 6000 Ada Generation",),
    "RTX-A6000-48GB": ("NVIDIA RTX A6000", "a6000"),
}


def test_each_chip_is_found_by_its_usual_names_and_its_own() -> None:
    assert set(SPELLINGS) == set(catalog.chips())
    for name, spellings in SPELLINGS.items():
        assert [catalog.find_chip(spelling).name for spelling in (name, *spellings)] == [name] * (
            1 + len(spellings)
        )


def test_a_family_is_all_its_forms() -> None:
    assert [chip.name for chip in catalog.find_chips("h100")][:3] == [
        "H100-80GB-SXM",
        "H100-80GB-PCIe",
        "H100-94GB-NVL",
    ]
    assert [chip.name for chip in catalog.find_chips("a100-80gb")] == [
        "A100-80GB-SXM",
        "A100-80GB-PCIe",
    ]
    assert [chip.name for chip in catalog.find_chips("A100-80GB-SXM")] == ["A100-80GB-SXM"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H900", "did you mean H"),
        ("A100-PCIE-40GB", "A100-40GB-SXM"),  # a card that no row is of: not taken for another
        ("Quadro RTX 6000", "RTX-6000-Ada-48GB"),
        ("h100:8", "H100-80GB-SXM"),
        ("80GB", "unknown GPU '80GB'"),
        ("rtx", "'elastic prices --chips' lists them"),
        ("", "unknown GPU ''"),
    ],
)
def test_what_is_none_is_refused_in_one_line_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpecError, match="unknown GPU") as error:
        catalog.find_chip(name)
    assert near in str(error.value) and "\n" not in str(error.value)


def test_the_names_of_published_measurements_are_found() -> None:
    source = SHARED / "planner" / "public.csv"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    with source.open() as opened:
        names = {row["gpu"] for row in csv.DictReader(opened)}
    found = {name: catalog.find_chip(name).name for name in names}
    assert len(found) > 10 and all(
        chip.startswith(name.split("-")[0]) for name, chip in found.items()
    )
