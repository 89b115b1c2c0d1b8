"""What a new machine is set up with: apt's locks, which its first boot holds, are waited for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.docs.pages import blocks
from support.places import ROOT

FILES = sorted(file.name for file in (ROOT / "cluster_configs").glob("*.yaml"))
FAKES = {
    "python3": "exit $NO_VENV",
    "sudo": '"$@"',
    "sleep": "exit 0",
    "cloud-init": "exit 2",  # degraded, say
    # another one updates the lists meanwhile; apt-get itself waits for dpkg's lock alone
    "apt-get": '[ "$1" != update ] || [ $(grep -c "^apt-get update" $ASKED) -ge 3 ]',
}


def command(name: str) -> str:
    """That which installs Debian packages; '' = there is none."""
    if name == "init":
        text = (ROOT / "elastic/api/templates/clusters/ray_commands.yaml").read_text()
        lines = re.sub(r"^@@\{\w+\}", "", text, flags=re.MULTILINE)  # whole lines, or none
        given = yaml.safe_load(re.sub(r"@@\{\w+\}", "x", lines))
    elif name == "install.md":
        (text,) = [found.text for found in blocks(name, "yaml") if "setup_commands" in found.text]
        given = yaml.safe_load(text)
    else:
        given = yaml.safe_load((ROOT / "cluster_configs" / name).read_text())
    return next((line for line in given["setup_commands"] if "apt-get" in line), "")


def asked(folder: Path, text: str, *, no_venv: int) -> list[str]:
    log = folder / f"asked-{no_venv}"
    log.touch()
    for name, body in FAKES.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $@" >>$ASKED\n{body}\n')
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin", "NO_VENV": str(no_venv), "ASKED": str(log),
        "HOME": str(folder),
    }  # fmt: skip
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=60)
    return log.read_text().splitlines()


@pytest.mark.e2e
@pytest.mark.parametrize("name", [*FILES, "init", "install.md"])
def test_packages_are_installed_once_the_first_boot_is_done(tmp_path: Path, name: str) -> None:
    text = command(name)
    if not text:
        assert not name.startswith(("aws", "gcp", "init", "install")), "hosts of one's own have it"
        return
    made = [line for line in asked(tmp_path, text, no_venv=1) if not line.startswith("sudo")]
    assert made[1] == "cloud-init status --wait"
    assert [line for line in made if "update" in line] == ["apt-get update -q"] * 3
    assert made[-1].startswith("apt-get -o DPkg::Lock::Timeout=600 install -yq python3-venv")


@pytest.mark.e2e
def test_an_image_that_has_them_waits_for_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path, command("init"), no_venv=0) == ["python3 -c import ensurepip"]
