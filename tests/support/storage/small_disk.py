"""A file system of a given size, which can be full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(at: Path, size: str) -> Iterator[Path]:
    """`size`: as in 120m. The test is skipped where it may not mount one."""
    at.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=False
        ).returncode
    ):
        pytest.skip("mounting a file system takes root")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)
