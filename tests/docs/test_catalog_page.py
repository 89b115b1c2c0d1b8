"""docs/catalog.md: its entries are read as they stand, every key is named, and what it says of the
table is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.places import ROOT

from elastic import catalog
from elastic.catalog.schema import ChipRow, InstanceRow, PriceRow
from elastic.cli import command_line

PAGE = (ROOT / "docs" / "catalog.md").read_text()


@pytest.fixture(autouse=True)
def _only_the_shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(catalog.VARIABLE, raising=False)


def test_the_entries_of_the_page_are_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "own.yaml").write_text(block)
    types = catalog.instance_types([tmp_path / "own.yaml"])
    box = types["hall-box"]
    assert (box.chip, box.link, box.usd_per_h("room-2")) == ("EXAMPLE-96GB", "PCIe 5", 9.5)
    assert types["p5.48xlarge"].prices["us-east-1"].usd(spot=True) == 20


def test_every_key_is_named() -> None:
    # named by what stands before _tflops
    peaks = {f"{kind}_tflops" for kind in ("fp16", "fp8", "fp4", "tf32", "vector_bf16")}
    keys = {*ChipRow.model_fields, *InstanceRow.model_fields, *PriceRow.model_fields} - peaks
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", PAGE)] == []


def test_what_it_says_of_empty_cells_is_so() -> None:
    types = catalog.instance_types()
    azure = [found for found in types.values() if found.cloud == "azure"]
    without = {found.chip for found in azure if not found.prices}
    assert without == {"H200-141GB-SXM", "MI300X-192GB", "GB200-186GB", "GB300-279GB"}
    h100 = [found for found in azure if found.gpu == "H100"]
    assert h100 and all(
        quote.spot_usd_per_h is None for found in h100 for quote in found.prices.values()
    )
    assert catalog.find_chip("a100").name == "A100-40GB-SXM"


def test_the_commands_of_the_page_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    commands = [line.split("#")[0].split()[1:] for line in block.splitlines()]
    assert len(commands) == 5 and all(words[0] == "prices" for words in commands)
    for words in commands:
        if "--cluster" not in words:  # asks AWS
            assert command_line.main(words) == 0
    assert "Standard_ND96isr_H100_v5" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["docs/catalog.md", "README.md", "docs/notices.md"])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", file.read_text()):
        assert (file.parent / target).exists() or target.startswith("http"), target
