"""docs/clusters.md and docs/network.md: what they name is there, and their section for a cluster
file is one."""

from __future__ import annotations

import re

import pytest
import yaml
from support.places import ROOT

from elastic.cli import command_line
from elastic.config.clusters.elastic_section import Own, OwnPool, own_section

PAGE = (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize(
    "page",
    ["docs/clusters.md", "docs/network.md", "cluster_configs/README.md", "deploy/iam/README.md"],
)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
        assert (file.parent / target).exists() or target.startswith("http"), target


def test_every_cluster_file_is_listed() -> None:
    names = [file.name for file in (ROOT / "cluster_configs").glob("*.yaml")]
    assert len(names) >= 7
    assert [name for name in names if f"(../cluster_configs/{name})" not in PAGE] == []


def test_the_section_for_this_package_can_be_read_and_all_its_keys_are_named() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    own, problems = own_section(yaml.safe_load(block))
    assert problems == []
    assert own.on_demand_floor == 1
    assert own.pools["p5-block"].ends_at_s == 1796124600.0
    assert [key for key in (*Own.model_fields, *OwnPool.model_fields) if key not in PAGE] == []


def test_the_commands_of_this_package_are_there() -> None:
    lines = [
        line.split("  #")[0].split() for line in PAGE.splitlines() if line.startswith("elastic ")
    ]
    lines += [
        line.rstrip("\\").split()
        for line in PAGE.splitlines()
        if line.startswith("    elastic run")
    ]
    assert len(lines) >= 2
    for words in lines:
        assert command_line.parser().parse_args(words[1:]).handler
