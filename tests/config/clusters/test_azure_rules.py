"""`elastic cluster check` of a file for Azure: what Azure refuses, what cannot start there, and what
would be paid for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from elastic import api
from elastic.cli.command_line import main


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """What `elastic init` writes."""
    file = tmp_path / "own.yaml"
    assert main(["init", str(tmp_path / "job"), "--on", "azure", "--cluster", str(file)]) == 0
    return file


def told(file: Path, old: str, new: str, n: int = 1) -> list[str]:
    """What is said of it once `old` is `new`."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, n))
    lines = [line.removeprefix(f"{file}:") for line in api.check_cluster(file).lines()]
    known = ("placeholders; put in your own", "~/wheels")  # what a person has to do
    return [line for line in lines if not any(words in line for words in known)]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("vmSize", "vmsize", "Azure refuses it; did you mean vmSize?"),
        ("imageSku", "imageSkus", "Azure refuses it; did you mean imageSku?"),
        ("        vmSize: Standard_D4s_v5\n", "", "vmSize is missing; name a size, as in"),
    ],
)
def test_parameters_that_azure_refuses(own: Path, old: str, new: str, said: str) -> None:
    (error,) = told(own, old, new)
    assert " error: " in error and said in error


@pytest.mark.parametrize(
    ("offer", "sku"),
    [
        ("ubuntu-2204", "2204-gen2"),
        ("ubuntu-hpc", '"2204"'),
        ("0001-com-ubuntu-server-focal", "20_04-lts-gen2"),
    ],
)
def test_an_image_whose_python_is_too_old(own: Path, offer: str, sku: str) -> None:
    """Ray's own default, on the head and on workers."""
    text = re.sub(r"imageOffer: \S+", f"imageOffer: {offer}", own.read_text())
    own.write_text(re.sub(r"imageSku: \S+", f"imageSku: {sku}", text))
    found = told(own, "vmSize", "vmSize")
    assert len(found) == 3 and all("an Ubuntu whose Python is too old" in line for line in found)
    assert " error: available_node_types.head.node_config.azure_arm_parameters.image" in found[0]
    assert "Canonical's ubuntu-24_04-lts" in found[0]
    assert told(own, "imageVersion: latest", "imageId: /subscriptions/x/images/mine", 3) == []


def test_a_worker_that_only_shuts_itself_down(own: Path) -> None:
    """What `elastic init` writes does not: Azure bills a machine that is stopped from inside."""
    command = next(
        line
        for line in yaml.safe_load(own.read_text())["worker_start_ray_commands"]
        if "end_without_head" in line
    )
    end = 'END="bash $HOME/venv/bin/delete_azure_vm.sh" '
    assert command.startswith(end + "LIMIT_S=1200 ") and "shutdown" not in command
    (warning,) = told(own, end, "")
    assert " warning: worker_start_ray_commands: a worker whose head is gone shuts" in warning
    assert "delete_azure_vm.sh" in warning
