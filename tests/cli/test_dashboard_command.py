"""`elastic dashboard`: what it refuses in a line, and what it starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.child import child
from support.places import ROOT
from support.waiting import until

from elastic.api.show_dashboard import DashboardBeside
from elastic.cli.command_line import main
from elastic.ledger.run_folder import RunFolder
from elastic.storage import LocalStorage


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["dashboard", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_folder_without_runs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no runs in" in refused([], capsys)


@contextmanager
def started(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with child(
        [sys.executable, "-m", "elastic", "dashboard", "--port", "0", "--json", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]


def runs_at(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}api/runs") as answer:
        return list(json.load(answer)["runs"])


@pytest.mark.e2e
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_shows_a_run_until_it_is_interrupted(storage: Path, how: signal.Signals) -> None:
    with started(["tiny-1"]) as (process, url):
        assert [one["name"] for one in runs_at(url)] == ["tiny-1"]
        process.send_signal(how)
        assert process.wait(60) == 0


@pytest.mark.e2e
def test_beside_a_driver_it_waits_for_the_run_and_ends_with_the_driver(storage: Path) -> None:
    journal = storage / "tiny-1" / "journal.jsonl"
    text = journal.read_text()
    journal.unlink()
    with started([str(storage / "tiny-1"), "--beside-driver"]) as (process, url):
        assert not runs_at(url)[0]["read"]
        journal.write_text(text)
        until(lambda: runs_at(url)[0]["read"], "the run is read")
        assert process.stdin is not None
        process.stdin.close()  # also where the driver was killed
        assert process.wait(60) == 0


@pytest.mark.e2e
def test_what_a_run_starts_says_its_url_and_ends_with_it(storage: Path) -> None:
    said: list[str] = []
    folder = storage / "tiny-1"
    beside = DashboardBeside(RunFolder(LocalStorage(folder), folder), said.append)
    try:
        until(lambda: bool(said), "it says where it is")
        assert said[0].startswith("dashboard: http://127.0.0.1:")
        assert runs_at(said[0].removeprefix("dashboard: "))[0]["name"] == "tiny-1"
    finally:
        beside.close()
    assert beside._process.returncode == 0
    with pytest.raises(OSError):
        runs_at(said[0].removeprefix("dashboard: "))
