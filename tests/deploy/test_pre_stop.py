"""The hook of a worker's pod on Kubernetes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.child import child
from support.places import ROOT
from support.waiting import until

SCRIPT = ROOT / "deploy" / "kubernetes" / "pre_stop.sh"
pytestmark = pytest.mark.e2e


def process(proc: Path, pid: int, *words: str) -> Path:
    """As /proc has it."""
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    return proc / str(pid) / "cmdline"


@contextmanager
def hook(tmp_path: Path, limit_s: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "PROC": str(tmp_path / "proc"),
        "ELASTIC_NOTICE_FILE": str(tmp_path / "notice"),
    }
    with child(["sh", str(SCRIPT), str(limit_s)], env=environment) as script:
        yield script


def test_a_pod_without_workers_ends_at_once(tmp_path: Path) -> None:
    process(tmp_path / "proc", 1, "ray::IDLE")
    process(tmp_path / "proc", 2, "/opt/elastic/bin/python", "ray::Worker")
    with hook(tmp_path, 1000) as script:
        assert script.wait(60) == 0 and not (tmp_path / "notice").exists()


def test_workers_are_told_and_waited_for_until_they_have_left(tmp_path: Path) -> None:
    worker = process(tmp_path / "proc", 7, "ray::Worker.poll")
    notice = tmp_path / "notice"
    with hook(tmp_path, 1000) as script:
        until(lambda: notice.exists() and notice.read_text() == "1000\n", "the notice")
        assert script.poll() is None
        worker.unlink()
        assert script.wait(60) == 0
    process(tmp_path / "proc", 8, "ray::Worker")
    with hook(tmp_path, 1) as script:
        assert script.wait(60) == 0, "no longer than its limit"
