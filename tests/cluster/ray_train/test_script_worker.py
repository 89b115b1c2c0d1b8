"""The process beside each rank of a script."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.ray_train import script_worker
from elastic.cluster.ray_train.script_worker import ScriptLog, Supervisor
from elastic.cluster.workers import output


def test_a_log_that_cannot_be_written_does_not_stop_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe is read to the end: else the script would wait for ever."""
    place: Any = type("RankPlace", (), {"rank": 0})()
    orders: Any = None
    supervisor = Supervisor(orders, place, None)
    (tmp_path / "taken").write_text("a file where the folder is to be")
    supervisor._read(io.StringIO("one\ntwo\n"), ScriptLog(tmp_path / "taken" / "rank0.log"))
    assert list(supervisor._said) == ["one", "two"] == list(supervisor._tail)
    full, written = ScriptLog(tmp_path / "rank0.log"), []

    def write(file: int, data: bytes) -> int:
        written.append(data)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        supervisor._read(io.StringIO("three\nfour\n"), full)
    full.write("five\n")
    assert written == [b"three\n", b"four\n"] and list(supervisor._said)[2:] == ["three", "four"]
    assert (tmp_path / "rank0.log").read_text() == "five\n"


def test_a_scripts_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_worker, "FILE_BYTES", 100)
    log = ScriptLog(tmp_path / "logs" / "rank0.log")
    for k in range(100):
        log.write(f"line {k:03}\n")
    files = sorted((tmp_path / "logs").glob("rank0.log*"))
    assert [path.name for path in files] in (["rank0.log", "rank0.log.1"], ["rank0.log.1"])
    assert all(path.stat().st_size < 120 for path in files)
    assert "line 098" in "".join(path.read_text() for path in files)


def test_logs_of_groups_that_are_over_go_when_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LOGS_BYTES", 250)
    for k in range(4):
        (tmp_path / f"{k}-rank0.log").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"{k}-rank0.log", (k, k))
    ScriptLog(tmp_path / "9-rank0.log").write("line\n")
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        "2-rank0.log",
        "3-rank0.log",
        "9-rank0.log",
    ]
