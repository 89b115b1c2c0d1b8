"""What this package starts as `python -m` imports nothing from the folder in which the user stands,
which may have a select.py, or another `elastic`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

from elastic.version import own_path, python_path

START = re.compile(r'\[\s*sys\.executable,\s*"-m"')


def test_none_is_started_without_p() -> None:
    files = [*(ROOT / "elastic").rglob("*.py")]
    assert [str(file) for file in files if START.search(file.read_text())] == []
    assert sum('"-P", "-m"' in file.read_text() for file in files) > 8


def test_one_that_imports_the_same_knows_where_this_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python was started by `-c`, or to type in, that is an empty entry."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first", "", "/last"])
    assert own_path() == ["/first", str(tmp_path), "/last"]


def test_this_package_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "__init__.py").touch()
    words = [sys.executable, "-P", "-m", "elastic", "--version"]
    said = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": python_path()}, capture_output=True, check=True
    )
    assert said.stdout.startswith(b"elastic ")
