"""Known vulnerabilities of the packages that are pinned, and secrets in this repository. Needs the
extra `audit`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

pytestmark = pytest.mark.whole
# Made up, for tests, or none: file and kind.
KNOWN = {
    ("cluster_configs/gcp_a3_a2_spot.yaml", "Base64 High Entropy String"),
    ("tests/bench/radosgw.py", "Secret Keyword"),
    ("tests/e2e/test_run.py", "Secret Keyword"),
    ("tests/ledger/test_journal.py", "Secret Keyword"),
    ("tests/support/cluster/aws_hosts.py", "Secret Keyword"),
    ("tests/config/test_fingerprint.py", "Secret Keyword"),
    ("tests/config/test_masking.py", "Secret Keyword"),
    ("tests/cluster/workers/test_output.py", "Secret Keyword"),
    ("tests/config/test_masking.py", "Basic Auth Credentials"),
    ("tests/reshard/test_routes.py", "Hex High Entropy String"),
    ("tests/storage/test_cloud_faults.py", "Secret Keyword"),
    ("tests/worker/process_groups/test_control_tree.py", "Secret Keyword"),
    ("tests/worker/standalone/test_meeting.py", "Secret Keyword"),
}


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'elastic-ray[audit]'")
    return found


def test_no_pinned_package_has_a_known_vulnerability() -> None:
    words = [
        tool("pip-audit"),
        "-s",
        "pypi",
        "--no-deps",
        "--disable-pip",
        "-f",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(
        [*words, "-r", str(ROOT / "constraints.txt")], capture_output=True, text=True, timeout=600
    )
    if not done.stdout.strip():
        pytest.skip(f"pip-audit says nothing: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)["dependencies"]
    asked = [package for package in found if "skip_reason" not in package]
    if not asked:
        pytest.skip(f"PyPI's advisories cannot be reached from here: {found[0]['skip_reason']}")
    bad = {
        package["name"]: [one["id"] for one in package["vulns"]]
        for package in asked
        if package["vulns"]
    }
    assert not bad, bad


def secrets_in(folder: Path) -> set[tuple[str, str]]:
    done = subprocess.run(
        [tool("detect-secrets"), "scan", *names_in(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {
        (file, one["type"])
        for file, found in json.loads(done.stdout)["results"].items()
        for one in found
    }


def names_in(folder: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    return [
        name for name in listed.split("\0") if name and not name.endswith((".png", ".json", ".csv"))
    ]


def test_no_secret_is_in_the_repository() -> None:
    assert secrets_in(ROOT) <= KNOWN


def test_a_secret_would_be_found(tmp_path: Path) -> None:
    key = "AKIA" + "".join("QWERTYUIOPASDFGH"[k] for k in range(16))
    (tmp_path / "settings.py").write_text(f'aws_access_key_id = "{key}"\n')
    subprocess.run("git init -q . && git add -A", shell=True, cwd=tmp_path, check=True)
    assert ("settings.py", "AWS Access Key") in secrets_in(tmp_path)
