"""Users' own entries: they add to the tables and say over them; what is wrong in them is one
line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic import catalog
from elastic.errors import SpecError

OWN = """
chips:
  Card-32GB: {arch: Ada, memory_gb: 32, bf16_tflops: 200, fp32_tflops: 50, pcie_gb_per_s: 31, source: its data sheet}
  H100-80GB-SXM: {watts: 500}
instances:
  box: {cloud: hall, chip: card, gpus: 4, vcpus: 64, host_memory_mib: 262144, network_gbps: 100}
  p4d.24xlarge: {link: pcie}
prices:
  box: {room-1: {usd_per_h: 2.5, spot_usd_per_h: 1, at: 2026-11-01, source: the hall's list}}
  p5.48xlarge: {us-east-1: {usd_per_h: 40}}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(catalog.VARIABLE, raising=False)
    (tmp_path / "own.yaml").write_text(OWN)
    return tmp_path / "own.yaml"


def test_entries_add_and_say_over(own: Path) -> None:
    types = catalog.instance_types([own])
    box = types["box"]
    assert (box.cloud, box.chip, box.gpu, box.gpu_memory_bytes) == (
        "hall",
        "Card-32GB",
        "Card-32GB",
        32 * 2**30,
    )
    assert (box.link, box.link_bytes_per_s, box.network_bytes_per_s_per_gpu) == (
        "PCIe 4",
        31e9,
        100e9 / 32,
    )
    assert box.prices["room-1"] == catalog.Quote(2.5, 1.0, "2026-11-01", "the hall's list")
    assert catalog.find_chip("card-32gb", [own]).peak_flop_per_s("bfloat16") == 200e12
    changed, before = catalog.find_chip("H100-80GB", [own]), catalog.find_chip("H100-80GB")
    assert (changed.watts, before.watts, changed.bf16_flop_per_s) == (
        500,
        700,
        before.bf16_flop_per_s,
    )
    assert (types["p4d.24xlarge"].link, types["p4d.24xlarge"].gpus) == ("PCIe 4", 8)
    # not with the spot price of another day
    assert types["p5.48xlarge"].prices["us-east-1"] == catalog.Quote(usd_per_h=40)


def test_without_a_file_the_shipped_tables_stay_as_they_are(own: Path) -> None:
    assert "box" in catalog.instance_types([own])
    assert "box" not in catalog.instance_types()
    assert catalog.instance_types()["p5.48xlarge"].usd_per_h("us-east-1") == 55.04


def test_the_environment_names_files_and_the_last_one_wins(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = own.with_name("second.yaml")
    second.write_text("instances: {box: {vcpus: 8}}\nprices: {box: {room-1: {usd_per_h: 9}}}\n")
    monkeypatch.setenv(catalog.VARIABLE, f"{own}{os.pathsep}{second}")
    box = catalog.instance_type("box")
    assert box is not None
    assert (box.vcpus, box.gpus, box.usd_per_h("room-1")) == (8, 4, 9.0)
    second.write_text("instances: {box: {vcpus: 16}}\n")
    os.utime(second, ns=(1, 1))
    changed = catalog.instance_type("box")
    # read again
    assert changed is not None and (changed.vcpus, changed.usd_per_h("room-1")) == (16, 2.5)


def test_an_own_name_is_taken_as_it_stands_before_any_spelling(own: Path) -> None:
    own.write_text("chips: {H100: {memory_gb: 70}}\n")
    assert catalog.find_chip("H100", [own]).memory_bytes == 70 * 2**30
    assert catalog.find_chip("h100", [own]).name == "H100-80GB-SXM"


def test_another_chip_brings_its_own_memory(own: Path) -> None:
    own.write_text("instances: {p5.48xlarge: {chip: H200}}\n")
    found = catalog.instance_types([own])["p5.48xlarge"]
    assert (found.chip, found.gpu, found.gpu_memory_bytes) == (
        "H200-141GB-SXM",
        "H200-141GB-SXM",
        141 * 2**30,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chip: {}", "own.yaml: unknown key 'chip'; did you mean chips?"),
        (
            "chips: {X: {memory_bg: 3}}",
            "own.yaml: chips.X: unknown key 'memory_bg'; did you mean memory_gb",
        ),
        (
            "chips: {X: {memory_gb: much}}",
            "own.yaml: chips.X: key 'memory_gb': input should be a valid number",
        ),
        (
            "chips: {X: {bf16_tflops: -1, memory_gb: 1}}",
            "key 'bf16_tflops': input should be greater than 0 (it is -1)",
        ),
        ("chips: {X: {arch: Ada}}", "own.yaml: chips.X: key 'memory_gb' is missing"),
        (
            "chips: {X: {memory_gb: 1, nvlink_gb_per_s: 5}}",
            "own.yaml: chips.X: key 'link' is missing",
        ),
        ("chips: {X: 3}", "own.yaml: chips.X: it must hold keys and values"),
        ("instances: {b: {gpus: 1, chip: T4}}", "own.yaml: instances.b: key 'cloud' is missing"),
        (
            "instances: {b: {cloud: c, gpus: 1, vcpus: 1, host_memory_mib: 1}}",
            "instances.b: key 'chip' is missing",
        ),
        (
            "instances: {b: {cloud: c, gpus: 1, chip: T9, vcpus: 1, host_memory_mib: 1}}",
            "own.yaml: instances.b: key 'chip': unknown GPU 'T9'; did you mean T4",
        ),
        (
            "prices: {p5.48xlareg: {here: {usd_per_h: 1}}}",
            "prices.p5.48xlareg.here: there is no instance 'p5.48xlareg'; did you mean",
        ),
        (
            "prices: {p5.48xlarge: {here: {usd: 1}}}",
            "own.yaml: prices.p5.48xlarge.here: unknown key 'usd'",
        ),
        (
            "prices: {p5.48xlarge: {here: {at: 2026-01-01}}}",
            "it has neither usd_per_h nor spot_usd_per_h",
        ),
        ("a: [", "own.yaml, line 2: not YAML"),
        ("- 1", "own.yaml: it must hold chips, instances or prices"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_entry_and_key(own: Path, text: str, said: str) -> None:
    own.write_text(text + "\n")
    with pytest.raises(SpecError) as error:
        catalog.read([own])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_an_error_that_names_the_variable(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(catalog.VARIABLE, str(own.with_name("none.yaml")))
    with pytest.raises(SpecError, match=r"none\.yaml: no such catalog file .*ELASTIC_CATALOG"):
        catalog.instance_type("p5.48xlarge")
