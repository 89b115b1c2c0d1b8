"""`elastic prices`: the catalog as a table and as JSON, its filters, the GPUs, and pools of a
cluster file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic import catalog
from elastic.cli import command_line

CLUSTERS = ROOT / "cluster_configs"


@pytest.fixture(autouse=True)
def _only_the_shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(catalog.VARIABLE, raising=False)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert command_line.main(["prices", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_row_says_hardware_prices_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    rows = said(capsys, "--gpu", "h100", "--cloud", "aws", "--region", "us-east-1")["prices"]
    (row,) = [row for row in rows if row["instance_type"] == "p5.48xlarge"]
    assert (row["gpus"], row["chip"], row["gpu_memory_bytes"]) == (
        "8 H100",
        "H100-80GB-SXM",
        81920 * 2**20,
    )
    assert (row["link"], row["network_gbps"], row["network_bytes_per_s_per_gpu"]) == (
        "NVLink 4",
        3200,
        50e9,
    )
    assert (row["usd_per_h"], row["usd_per_gpu_h"], row["spot_usd_per_gpu_h"]) == (
        55.04,
        6.88,
        2.93125,
    )
    assert row["available"] is None and row["at"] == "2026-11-22" and "skypilot" in row["source"]
    assert "karpenter" in row["hardware_source"]


def test_each_filter_leaves_only_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    everything = said(capsys)["prices"]
    # also those without a price
    assert {row["instance_type"] for row in everything} == set(catalog.instance_types())
    azure = said(capsys, "--cloud", "azure")["prices"]
    assert azure == [row for row in everything if row["cloud"] == "azure"] and len(azure) > 100
    westus = said(capsys, "--cloud", "azure", "--region", "westus")["prices"]
    assert westus == [row for row in azure if row["region"] == "westus"] and westus
    a100 = said(capsys, "--gpu", "A100_80GB")["prices"]
    assert {row["chip"] for row in a100} == {"A100-80GB-SXM", "A100-80GB-PCIe"}
    assert {row["cloud"] for row in a100} == {"aws", "gcp", "azure"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpu", "H900"], "unknown GPU 'H900'; did you mean H"),
        (["--cloud", "awz"], "--cloud awz: no such cloud in the catalog; did you mean aws?"),
        (["--region", "us-eats-1"], "did you mean us-east-1"),
        (
            ["--region", "us-east-1", "--cloud", "azure"],
            "no price in such a region of azure; there is centralus, eastus",
        ),
        (["--chips", "--cloud", "aws"], "leave --cloud and --region out"),
        (["--chips", "--gpu", "X1"], "unknown GPU 'X1'"),
        (["--catalog", "none.yaml"], "none.yaml: no such catalog file"),
    ],
)
def test_a_word_that_nothing_has_is_one_line_and_exit_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["prices", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and line in err


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["prices", "--gpu", "h200"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["TYPE", "CLOUD", "GPUS", "MEMORY", "LINK", "NETWORK", "REGION"]
    (row,) = [line for line in lines if line.startswith("p5en.48xlarge") and "us-east-1" in line]
    wanted = (
        "p5en.48xlarge aws 8 H200 141 GiB NVLink 4 3200 Gb/s us-east-1 63.2960 17.4000 7.9120 "
        "2.1750 - 2026-11-22"
    )
    assert " ".join(row.split()) == wanted
    (unpriced,) = [line for line in lines if line.startswith("Standard_ND96isr_H200_v5")]
    assert unpriced.split()[-7:] == ["-"] * 7
    assert (
        any(line.startswith("source: skypilot") for line in lines)
        and lines[-1] == f"table of {catalog.PRICES_AT}"
    )
    assert command_line.main(["prices", "--gpu", "3090"]) == 0
    assert capsys.readouterr().out.startswith("nothing in the catalog is that")


def test_gpus_with_peaks_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["prices", "--chips"]) == 0
    text = capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("B200-180GB-SXM ")]
    wanted = (
        "B200-180GB-SXM Blackwell 2250 2250 4500 9000 1100 75 148 1000 180 8000 NVLink 5 900 63"
    )
    assert " ".join(row.split()) == wanted
    assert "\nB200-180GB-SXM: stas00/ml-engineering" in text
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["prices", "--chips", "--cluster", "any.yaml"])
    assert "not allowed with argument" in capsys.readouterr().err
    (chip,) = said(capsys, "--chips", "--gpu", "l4")["chips"]
    assert (chip["name"], chip["fp32_flop_per_s"], chip["nvlink_bytes_per_s"]) == (
        "L4-24GB",
        30.3e12,
        0,
    )


def test_own_entries_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "instances: {box: {cloud: hall, chip: RTX 4090, gpus: 4, vcpus: 64, host_memory_mib: "
        "262144}}\nprices: {box: {room: {usd_per_h: 2}}}\n"
    )
    (row,) = said(
        capsys, "--catalog", str(file), "--gpu", "4090", "--cloud", "hall", "--region", "room"
    )["prices"]
    assert (row["instance_type"], row["link"], row["usd_per_gpu_h"]) == ("box", "PCIe 4", 0.5)
    assert command_line.main(["prices", "--catalog", str(file), "--cluster", "any.yaml"]) == 2
    assert f"set {catalog.VARIABLE}" in capsys.readouterr().err


def test_pools_of_a_cluster_file_have_hardware_beside_their_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(CLUSTERS / "gcp_a3_a2_spot.yaml")
    rows = said(capsys, "--cluster", file)["prices"]
    assert {row["chip"] for row in rows} == {"H100-80GB-SXM", "A100-40GB-SXM"} and {
        row["cloud"] for row in rows
    } == {"gcp"}
    assert all(row["link"].startswith("NVLink") and row["usd_per_gpu_h"] for row in rows)
    (h100,) = said(capsys, "--cluster", file, "--gpu", "h100")["prices"]
    assert h100["usd_per_gpu_h"] == round(h100["usd_per_node_h"] / 8, 6)
    assert said(capsys, "--cluster", file, "--gpu", "t4")["prices"] == []
    assert command_line.main(["prices", "--cluster", file]) == 0
    text = capsys.readouterr().out
    assert "USD/GPU-H" in text and "NVLink 4" in text


def test_pools_of_machines_that_no_cloud_has_say_what_their_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    text = (CLUSTERS / "gcp_a3_a2_spot.yaml").read_text()
    # whose hardware says nothing of GPUs
    file.write_text(text.replace("a3-highgpu-8g", "e2-standard-8"))
    rows = {
        row["pool"]: row for row in said(capsys, "--cluster", str(file), "--cloud", "gcp")["prices"]
    }
    assert rows["a3-spot"]["gpus"] == "8 H100" and rows["a3-spot"]["chip"] == "H100-80GB-SXM"
    laptop = said(capsys, "--cluster", str(CLUSTERS / "laptop.yaml"))["prices"]
    assert laptop and all(
        row["gpus"] == "-" and row["usd_per_gpu_h"] is None and row["chip"] == "" for row in laptop
    )
    assert command_line.main(["prices", "--cluster", str(file), "--region", "us-central2"]) == 2
    assert "did you mean us-central1" in capsys.readouterr().err
